"""Tokenizer and stop ids from a folder (C10's share)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from megappo.data.tokenizer import load_tokenizer, stop_token_ids


def folder(tmp_path: Path, **files: Any) -> Path:
    """A folder with the given JSON files (named without their ending)."""
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / f"{name}.json").write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("generation", "config", "wanted"),
    [
        ({"eos_token_id": [2, 7]}, {"eos_token_id": 2}, (2, 7)),
        ({"eos_token_id": [2, 7]}, {"eos_token_id": [2, 7]}, (2, 7)),
        ({"eos_token_id": 5}, {"eos_token_id": [5, 9, 5]}, (5, 9)),
        ({"eos_token_id": None}, {"eos_token_id": 3}, (3,)),
        ({}, {"eos_token_id": 3}, (3,)),
        (None, {"eos_token_id": [3, 4]}, (3, 4)),
        ({"eos_token_id": 0}, None, (0,)),
        ({"eos_token_id": []}, {}, (0,)),
        (None, None, (0,)),
    ],
)
def test_c10_stop_ids(
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerBase,
    generation: dict[str, Any] | None,
    config: dict[str, Any] | None,
    wanted: tuple[int, ...],
) -> None:
    """All ids of both files; the tokenizer's (0) only where they name none."""
    files = {"generation_config": generation, "config": config}
    made = folder(tmp_path, **{k: v for k, v in files.items() if v is not None})
    assert stop_token_ids(made, tokenizer) == wanted


@pytest.mark.parametrize("bad", ["</s>", [2, "7"], -1, 2.0, True, {"id": 2}])
def test_stop_ids_that_are_none(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, bad: Any
) -> None:
    """Anything but token ids is refused with the file's name."""
    made = folder(tmp_path, generation_config={"eos_token_id": bad})
    with pytest.raises(ValueError, match="generation_config.json: eos_token_id = .*, wanted"):
        stop_token_ids(made, tokenizer)


def test_broken_files(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """A file that is cut off, or holds no object, is named."""
    with pytest.raises(ValueError, match="config.json is not valid JSON"):
        stop_token_ids(folder(tmp_path, config='{"eos'), tokenizer)
    with pytest.raises(ValueError, match="config.json holds a list"):
        stop_token_ids(folder(tmp_path, config=[2]), tokenizer)


def test_load(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """A saved tokenizer comes back with added token and chat template."""
    tokenizer.save_pretrained(tmp_path)
    again = load_tokenizer(tmp_path)
    assert len(again) == len(tokenizer)
    assert again.chat_template == tokenizer.chat_template
    assert again("a b")["input_ids"] == tokenizer("a b")["input_ids"]


def test_load_from_nothing(tmp_path: Path) -> None:
    """A missing folder, an empty one and one with a broken file are one line each."""
    with pytest.raises(ValueError, match=r"no model folder at .*\(actor.model_name_or_path\)"):
        load_tokenizer(tmp_path / "missing")
    for content in (None, "{", "[]"):
        if content is not None:
            (tmp_path / "tokenizer_config.json").write_text(content)
            (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(ValueError, match="no tokenizer can be read from") as caught:
            load_tokenizer(tmp_path)
        assert "\n" not in str(caught.value)
