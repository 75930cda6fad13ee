"""The prompt file: checked once from end to end, then read row by row.

Loading walks the file once and keeps only where each usable row starts, so memory does not
grow with the text; a row is parsed, rendered and tokenised again when it is asked for.
Every fault is found here, with ``file:line``, before any model is loaded. The driver alone
does this: there is no collective that other ranks could wait in. ``datasets`` is not used
because its JSON reader names no line and refuses labels of mixed types.

Does not know batches or their order: ``stream.py`` does.
"""

from __future__ import annotations

import codecs
import logging
import sys
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from transformers import PreTrainedTokenizerBase

from megappo.config.schema import DataConfig
from megappo.data.rows import Row, RowError, RowReader
from megappo.records import Prompt

logger = logging.getLogger(__name__)

_CHUNK_ROWS, _CHUNK_CHARACTERS = 1024, 1 << 18
"""Most rows and text tokenised together while the file is checked."""
_PROGRESS_SECONDS = 5.0
"""A check that takes longer than this reports its progress on stderr."""


class PromptDataset:
    """The usable rows of a JSON-lines file, in file order, as :class:`~megappo.records.Prompt`.

    ``prompt_id`` is the 0-based line number, so it stays the same whatever is skipped.

    Attributes:
        num_rows: rows looked at (blank lines are not rows).
        num_skipped: rows that could not be used (``data.invalid_rows: skip``).
        num_dropped: overlong prompts left out (``data.overlong_prompts: drop``).
        num_cut: overlong prompts that are cut (``left`` or ``right``).
    """

    def __init__(
        self,
        path: str | Path,
        config: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_prompt_len: int,
        vocab_size: int | None = None,
        key: str = "data.prompt_dataset",
    ) -> None:
        """Check the whole file.

        Args:
            path: the file.
            config: field names, templates, and what to do with bad or overlong rows.
            tokenizer: of the policy.
            max_prompt_len: most tokens a prompt may have (data.max_len - rollout.max_new_tokens).
            vocab_size: of the policy; a prompt with a token beyond it is refused. None is any.
            key: configuration key of ``path``, for messages.

        Raises:
            ValueError: if the file cannot be read, a row is refused, or no row is left.
        """
        if max_prompt_len < 1:
            raise ValueError(
                f"data.max_len - rollout.max_new_tokens leaves {max_prompt_len} tokens for the "
                "prompt; raise data.max_len or lower rollout.max_new_tokens"
            )
        if config.max_samples is not None and config.max_samples < 1:
            raise ValueError(f"data.max_samples = {config.max_samples}, wanted at least 1 or null")
        self._path = Path(path)
        self._config = config
        self._tokenizer = tokenizer
        self._max_prompt_len = max_prompt_len
        self._vocab_size = vocab_size
        self._reader = RowReader(config, tokenizer)
        self._offsets = array("q")
        self._lines = array("q")
        self._first_fault = ""
        self.num_rows = self.num_skipped = self.num_dropped = self.num_cut = 0
        self._file = _open(self._path, key)
        self._scan()
        self._report(key)

    def __len__(self) -> int:
        """Number of usable prompts."""
        return len(self._offsets)

    def __getitem__(self, index: int) -> Prompt:
        """Read, render and tokenise the ``index``-th usable row.

        Raises:
            ValueError: if the file has been changed since it was checked.
        """
        offset, line = self._offsets[index], self._lines[index]
        self._file.seek(offset)
        try:
            row = self._read(self._file.readline(), offset)
        except RowError as error:
            raise ValueError(f"{self._path}:{line} has changed since the start: {error}") from error
        ids = self._tokenize([row.text])[0]
        text = row.text
        if len(ids) > self._max_prompt_len:
            keep_end = self._config.overlong_prompts == "left"
            ids = ids[-self._max_prompt_len :] if keep_end else ids[: self._max_prompt_len]
            text = str(self._tokenizer.decode(ids))  # what the policy is really asked
        return Prompt(line - 1, tuple(ids), text, row.label, row.messages)

    def __iter__(self) -> Iterator[Prompt]:
        """All prompts in file order."""
        return (self[index] for index in range(len(self)))

    def _scan(self) -> None:
        """Check every row and note where the usable ones start."""
        size = self._path.stat().st_size
        pending: list[tuple[int, int, str]] = []
        last_report = time.monotonic()
        end = characters = 0
        for line, raw in enumerate(self._file, start=1):
            offset, end = end, end + len(raw)
            if not raw.removeprefix(codecs.BOM_UTF8).strip():
                continue
            if self.num_rows == self._config.max_samples:
                break
            self.num_rows += 1
            try:
                pending.append((offset, line, self._read(raw, offset).text))
                characters += len(pending[-1][2])
            except RowError as error:
                self._accept(pending)  # so that the first fault of the file is the one reported
                self._refuse(line, error)
            if len(pending) >= _CHUNK_ROWS or characters >= _CHUNK_CHARACTERS:
                self._accept(pending)
                characters = 0
            if time.monotonic() - last_report > _PROGRESS_SECONDS:
                last_report = time.monotonic()
                share = f"{100 * end // max(size, 1)} % ({self.num_rows:,} rows)"
                print(f"megappo: {self._path}: checked {share}", file=sys.stderr)
        self._accept(pending)

    def _accept(self, pending: list[tuple[int, int, str]]) -> None:
        """Check the lengths of rendered rows ``(offset, line, text)``; empties the list."""
        tokenized = self._tokenize([text for _, _, text in pending])
        for (offset, line, _), ids in zip(pending, tokenized, strict=True):
            length = len(ids)
            if length == 0:
                self._refuse(line, RowError(f"{self._config.input_key!r} tokenises to nothing"))
                continue
            if self._vocab_size is not None and max(ids) >= self._vocab_size:
                raise ValueError(
                    f"{self._path}:{line}: the tokenizer gives token {max(ids)}, but the policy's "
                    f"vocabulary has {self._vocab_size}: tokenizer and config.json of "
                    "actor.model_name_or_path do not belong together"
                )
            if length > self._max_prompt_len and not self._keep_overlong(line, length):
                continue
            self._offsets.append(offset)
            self._lines.append(line)
        pending.clear()

    def _keep_overlong(self, line: int, length: int) -> bool:
        mode = self._config.overlong_prompts
        if mode == "error":
            raise ValueError(
                f"{self._path}:{line}: the prompt has {length} tokens, more than data.max_len - "
                f"rollout.max_new_tokens = {self._max_prompt_len}; raise data.max_len, or set "
                "data.overlong_prompts to drop, left or right"
            )
        if mode == "drop":
            self.num_dropped += 1
            self._note(line, f"the prompt has {length} tokens")
            return False
        self.num_cut += 1
        return True

    def _refuse(self, line: int, reason: RowError) -> None:
        if self._config.invalid_rows == "error":
            raise ValueError(
                f"{self._path}:{line}: {reason} (data.invalid_rows: skip leaves such rows out)"
            ) from reason
        self.num_skipped += 1
        self._note(line, str(reason))

    def _note(self, line: int, reason: str) -> None:
        self._first_fault = self._first_fault or f"; first: {self._path}:{line}: {reason}"

    def _read(self, raw: bytes, offset: int) -> Row:
        return self._reader.read(raw.removeprefix(codecs.BOM_UTF8) if offset == 0 else raw)

    def _tokenize(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        # A chat template writes the special tokens itself.
        special = not self._config.apply_chat_template
        encoded = self._tokenizer(
            texts, add_special_tokens=special, return_attention_mask=False, verbose=False
        )
        ids: list[list[int]] = encoded["input_ids"]
        return ids

    def _report(self, key: str) -> None:
        counts = (
            f"{self.num_rows} rows, {self.num_skipped} invalid ones skipped, "
            f"{self.num_dropped} overlong ones dropped (more than {self._max_prompt_len} tokens), "
            f"{self.num_cut} cut"
        )
        if not self._offsets:
            raise ValueError(
                f"{self._path} ({key}) holds no usable prompt: {counts}{self._first_fault}"
            )
        if self.num_skipped or self.num_dropped or self.num_cut:
            logger.warning("%s: %s%s", self._path, counts, self._first_fault)


def _open(path: Path, key: str) -> BinaryIO:
    """Open for the life of the dataset: a file that is replaced meanwhile is not mixed in."""
    if path.is_dir():
        raise ValueError(f"{path} ({key}) is a folder, wanted a JSON-lines file")
    try:
        return path.open("rb")
    except OSError as error:
        raise ValueError(f"cannot read {path} ({key}): {error.strerror}") from error
