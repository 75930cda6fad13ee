"""The prompt file: faults with file and line (C54), overlong prompts (C52), size (C55)."""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from megappo.config.schema import DataConfig
from megappo.data.prompts import PromptDataset

Writer = Callable[..., Path]
FIVE_LINES = (
    {"input": "one"},
    b'{"input": "tw',
    b'{"input": "thr\xe6e"}',
    {"input": ""},
    {"question": "five", "answer": "5"},
)


def load(
    path: Path, tokenizer: PreTrainedTokenizerBase, max_prompt_len: int = 64, **config: Any
) -> PromptDataset:
    """The dataset with the given data settings."""
    return PromptDataset(path, DataConfig(**config), tokenizer, max_prompt_len=max_prompt_len)


def test_plain_rows(write: Writer, tokenizer: PreTrainedTokenizerBase) -> None:
    """Rows come in file order with text, ids, label and line number; blank lines are no rows."""
    path = write({"q": "2+3", "a": 5}, b"", {"q": "ä", "a": ["x"]}, b"  ")
    data = load(path, tokenizer, input_key="q", label_key="a", input_template="{{{}}}=")
    assert len(data) == data.num_rows == 2
    assert [(p.prompt_id, p.text, p.label) for p in (data[0], data[1])] == [
        (0, "{2+3}=", 5),
        (2, "{ä}=", ["x"]),
    ]
    assert list(data[0].token_ids) == tokenizer("{2+3}=")["input_ids"]
    assert data[-1] == data[1]
    assert [p.prompt_id for p in data] == [0, 2]


def test_special_tokens_are_added_unless_a_chat_template_writes_them(
    write: Writer, tokenizer: PreTrainedTokenizerBase
) -> None:
    """A chat prompt is tokenised as rendered; messages and plain strings are both taken."""
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    path = write({"input": [*messages, {"role": "user", "content": "a"}]}, {"input": "b"})
    data = load(path, tokenizer, apply_chat_template=True)
    assert data[0].text == "<user>hi\n<assistant>ho\n<user>a\n<assistant>"
    assert data[1].text == "<user>b\n<assistant>"
    assert tokenizer.decode(list(data[1].token_ids)) == data[1].text


@pytest.mark.parametrize(
    ("first_bad", "wanted"),
    [
        (1, r":2: not valid JSON \(Unterminated string.*at column 11\); wanted one JSON object"),
        (2, r":2: not UTF-8 \(byte 0xE6 at column 15\)"),
        (3, r":2: 'input' is empty"),
        (4, r":2: no field 'input' \(data.input_key\); fields present: 'question', 'answer'"),
    ],
)
def test_c54_each_fault_names_line_and_reason(
    write: Writer, tokenizer: PreTrainedTokenizerBase, first_bad: int, wanted: str
) -> None:
    """Each fault of the five-line file, alone on line 2."""
    with pytest.raises(ValueError, match=wanted) as caught:
        load(write(FIVE_LINES[0], FIVE_LINES[first_bad]), tokenizer)
    assert "\n" not in str(caught.value) and "prompts.jsonl:2: " in str(caught.value)
    assert "data.invalid_rows" in str(caught.value)


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ([1, 2], "the line is a list, wanted one JSON object"),
        (b"plain text", "not valid JSON"),
        (b"null", "the line is null"),
        ({"input": 3}, "'input' is a number, wanted text"),
        ({"input": None}, "'input' is null, wanted text"),
        ({"input": " \n\t"}, "'input' is empty"),
        ({"input": [{"role": "user", "content": "x"}]}, "needs? data.apply_chat_template: true"),
        (b'{"input": "\\ud83d"}', r"half a surrogate pair \(\\ud83d\)"),
        (b'{"input": "' + b"[" * 9 + b'"', "not valid JSON"),
        (b'{"input": ' + b"[" * 200_000, "not readable as JSON"),
        (b'{"input": "\x00"}', "not valid JSON"),
        (b"\xff\xfe{\x00", "not UTF-8"),
        (b"{}", "fields present: none"),
    ],
)
def test_c54_other_faults(
    write: Writer, tokenizer: PreTrainedTokenizerBase, line: Any, wanted: str
) -> None:
    """Rows of other wrong kinds are one-line errors too, and can be skipped."""
    path = write({"input": "good"}, line)
    with pytest.raises(ValueError, match=f"prompts.jsonl:2: .*{wanted}"):
        load(path, tokenizer)
    assert load(path, tokenizer, invalid_rows="skip").num_skipped == 1


def test_c54_skip_counts(
    write: Writer, tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    """Skip mode keeps the good row, counts the rest and names the first fault."""
    with caplog.at_level(logging.WARNING):
        data = load(write(*FIVE_LINES), tokenizer, invalid_rows="skip")
    assert (len(data), data.num_rows, data.num_skipped) == (1, 5, 4)
    assert "5 rows, 4 invalid ones skipped" in caplog.text
    assert "prompts.jsonl:2: not valid JSON" in caplog.text


@pytest.mark.parametrize(
    "lines", [FIVE_LINES[1:], (), (b"",), (b"\xef\xbb\xbf",), ({"input": " "},)]
)
def test_c54_no_usable_row(
    write: Writer, tokenizer: PreTrainedTokenizerBase, lines: tuple[Any, ...]
) -> None:
    """A file without a usable row is refused, also in skip mode."""
    with pytest.raises(ValueError, match=r"\(data.prompt_dataset\) holds no usable prompt"):
        load(write(*lines), tokenizer, invalid_rows="skip")


@pytest.mark.parametrize("end", [b"\n", b"", b"\n\n", b"\r\n\r\n"])
def test_c54_bom_and_blank_last_line(
    write: Writer, tokenizer: PreTrainedTokenizerBase, end: bytes
) -> None:
    """A byte order mark, blank last lines and Windows line ends are no faults."""
    path = write(b'\xef\xbb\xbf{"input": "a"}\r', b'{"input": "b"}' + end, last_newline=False)
    data = load(path, tokenizer)
    assert [p.text for p in data] == ["a", "b"]


def test_c54_label_missing_and_chat_faults(
    write: Writer, tokenizer: PreTrainedTokenizerBase
) -> None:
    """A missing label, and messages that the template or the format refuses."""
    with pytest.raises(ValueError, match=r":1: no field 'label' \(data.label_key\)"):
        load(write({"input": "a"}), tokenizer, label_key="label")
    for value, wanted in [
        ([{"role": "system", "content": "x"}], "the chat template refuses 'input': no system role"),
        ([{"content": "x"}], "message 0 of 'input' is an object, wanted .* 'role' and 'content'"),
        (["x"], "message 0 of 'input' is text"),
        ([], "'input' is empty"),
        ([{"role": "user", "content": ""}], "'input' is empty"),
        (7, "'input' is a number"),
    ]:
        with pytest.raises(ValueError, match=wanted):
            load(write({"input": value}), tokenizer, apply_chat_template=True)


def test_settings_that_cannot_work(write: Writer, tokenizer: PreTrainedTokenizerBase) -> None:
    """Templates, limits and paths are refused by key before a row is read."""
    path = write({"input": "a"})
    for template in ("no place", "{} {}", "{name}", "{0}", "{", "}"):
        with pytest.raises(ValueError, match="data.input_template"):
            load(path, tokenizer, input_template=template)
    with pytest.raises(ValueError, match="keep one of them"):
        load(path, tokenizer, input_template="{}", apply_chat_template=True)
    with pytest.raises(ValueError, match="leaves 0 tokens .* raise data.max_len"):
        load(path, tokenizer, max_prompt_len=0)
    with pytest.raises(ValueError, match="data.max_samples = 0"):
        load(path, tokenizer, max_samples=0)
    with pytest.raises(ValueError, match="cannot read .*No such file"):
        load(path.parent / "missing.jsonl", tokenizer)
    with pytest.raises(ValueError, match="is a folder"):
        load(path.parent, tokenizer)


def test_a_tokenizer_without_chat_template(
    write: Writer, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """apply_chat_template needs a template, and says so before reading rows."""
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(ValueError, match="has no chat template"):
        load(write({"input": "a"}), tokenizer, apply_chat_template=True)


@pytest.mark.parametrize(("limit", "length"), [(8, 20), (1, 2), (8, 9), (5, 300)])
def test_c52_overlong_prompts(
    write: Writer, tokenizer: PreTrainedTokenizerBase, limit: int, length: int
) -> None:
    """Error names line and length; drop counts; left and right give at most ``limit`` ids."""
    text = "".join(random.Random(length).choices("abcdef", k=length))
    path = write({"input": "x" * limit}, {"input": text})
    with pytest.raises(ValueError, match=f"prompts.jsonl:2: the prompt has {length} tokens, more"):
        load(path, tokenizer, max_prompt_len=limit)
    dropped = load(path, tokenizer, max_prompt_len=limit, overlong_prompts="drop")
    assert (len(dropped), dropped.num_dropped) == (1, 1)
    left = load(path, tokenizer, max_prompt_len=limit, overlong_prompts="left")
    right = load(path, tokenizer, max_prompt_len=limit, overlong_prompts="right")
    assert (left[1].text, right[1].text) == (text[-limit:], text[:limit])
    assert tokenizer.decode(list(left[1].token_ids)) == text[-limit:]
    assert len(left[1].token_ids) == len(right[1].token_ids) == limit
    assert left.num_cut == right.num_cut == 1
    assert left[0].text == "x" * limit


def test_c52_all_dropped(write: Writer, tokenizer: PreTrainedTokenizerBase) -> None:
    """Nothing left is an error that says why."""
    path = write({"input": "123456789"}, {"input": "1234567890"})
    with pytest.raises(ValueError, match="no usable prompt: 2 rows, .* 2 overlong ones dropped"):
        load(path, tokenizer, max_prompt_len=8, overlong_prompts="drop")


def test_first_fault_of_the_file_is_reported(
    write: Writer, tokenizer: PreTrainedTokenizerBase
) -> None:
    """An overlong row before an invalid one is the one that is named."""
    path = write({"input": "123456789"}, b"{")
    with pytest.raises(ValueError, match="prompts.jsonl:1: the prompt has 9 tokens"):
        load(path, tokenizer, max_prompt_len=8)


def test_max_samples(write: Writer, tokenizer: PreTrainedTokenizerBase) -> None:
    """Only the first rows are looked at: a fault behind them is none."""
    path = write({"input": "a"}, {"input": "b"}, b"{")
    assert len(load(path, tokenizer, max_samples=2)) == 2
    with pytest.raises(ValueError, match=":3: not valid JSON"):
        load(path, tokenizer, max_samples=3)


def test_a_replaced_file_is_not_mixed_in(write: Writer, tokenizer: PreTrainedTokenizerBase) -> None:
    """Rows come from the file that was checked; one overwritten in place is noticed."""
    path = write({"input": "old"}, {"input": "row"})
    data = load(path, tokenizer)
    write({"input": "other"}, name="new.jsonl").replace(path)
    assert data[0].text == "old"
    data = load(path, tokenizer)
    path.write_text("#" * 40)
    with pytest.raises(ValueError, match="prompts.jsonl:1 has changed since the start"):
        data[0]


def resident_bytes() -> int:
    """Memory that this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize(
    ("rows", "words", "config"),
    [
        (200_000, 2, {}),
        (5_000, 2, {"apply_chat_template": True}),
        (5_000, 2, {"overlong_prompts": "drop"}),
        (1_000, 200, {"overlong_prompts": "left"}),
    ],
)
def test_c55_big_files(
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerBase,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
    words: int,
    config: dict[str, Any],
) -> None:
    """Time and memory stay bounded, progress is shown, and no collective is needed."""
    monkeypatch.setattr("megappo.data.prompts._PROGRESS_SECONDS", 0.05)
    path = tmp_path / "big.jsonl"
    text = "word " * words
    with path.open("w") as file:
        for row in range(rows):
            file.write(json.dumps({"input": f"{row} {text}", "label": row}) + "\n")
    start, memory = time.process_time(), resident_bytes()
    data = load(path, tokenizer, label_key="label", **config)
    seconds, memory = time.process_time() - start, resident_bytes() - memory
    assert len(data) == rows or config.get("overlong_prompts") == "drop"
    assert seconds < 5 + rows * 3e-4
    assert memory < 48e6
    assert rows < 100_000 or "checked" in capsys.readouterr().err
    assert not dist.is_initialized()
    assert data[len(data) - 1].label == rows - 1
