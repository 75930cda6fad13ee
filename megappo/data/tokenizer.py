"""The tokenizer and the ids that end a response, both read from a Hugging Face folder.

Knows files only: no model is loaded and nothing is fetched. The driver uses the tokenizer
to render and tokenise prompts; the stop ids go to the engine with every request.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from transformers import AutoTokenizer, PreTrainedTokenizerBase

_STOP_ID_FILES = ("generation_config.json", "config.json")


def load_tokenizer(
    hf_dir: str | Path, key: str = "actor.model_name_or_path"
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a local Hugging Face folder; code in the folder is never run.

    Args:
        hf_dir: the folder.
        key: configuration key of the folder, for messages.

    Raises:
        ValueError: if the folder does not exist or holds no tokenizer that can be read.
    """
    folder = Path(hf_dir)
    if not folder.is_dir():
        raise ValueError(f"no model folder at {folder} ({key})")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # broken files raise anything here, a bare Exception included
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"no tokenizer can be read from {folder} ({key}): {reason[:300]}"
        ) from error
    return cast(PreTrainedTokenizerBase, tokenizer)


def stop_token_ids(hf_dir: str | Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids that end a response, without repeats and in the order in which they are found.

    All that ``eos_token_id`` (a number or a list) names in ``generation_config.json`` and in
    ``config.json``; the tokenizer's own end-of-sequence id only where both are silent.
    An empty tuple means that every response runs to its full length.

    Raises:
        ValueError: if a file is not a JSON object or names something that is not a token id.
    """
    found: list[int] = []
    for name in _STOP_ID_FILES:
        path = Path(hf_dir) / name
        if path.is_file():
            found += _eos_ids(path)
    if not found and isinstance(tokenizer.eos_token_id, int):
        found = [tokenizer.eos_token_id]
    return tuple(dict.fromkeys(found))


def _eos_ids(path: Path) -> list[int]:
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, wanted a JSON object")
    eos = content.get("eos_token_id")
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    for token_id in ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
            raise ValueError(
                f"{path}: eos_token_id = {eos!r}, wanted a token id or a list of token ids"
            )
    return ids
