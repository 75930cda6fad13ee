"""The commands as a user runs them: what they print, their exit codes, one line for a mistake."""

from __future__ import annotations

import contextlib
import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from checkpoint_tools import hf_to_megatron, inspect_checkpoint, megatron_to_hf, verify
from checkpoint_tools.command import run
from megappo.checkpoint.run_state import RunState, write_run_state
from tests.support.convert import assert_same, hf_tensors, make_source
from tests.support.ranks import run_ranks

FOLDER = TemporaryDirectory(prefix="commands-")
COMMANDS = {
    module.__name__.rpartition(".")[2]: module.main
    for module in (hf_to_megatron, inspect_checkpoint, megatron_to_hf, verify)
}


def called(rank: int, command: str, arguments: list[str], log: str) -> int:
    """One command in a forked process, its output in a file."""
    with Path(log).open("w") as file:
        with contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
            return run(COMMANDS[command], arguments)


def command(name: str, *arguments: object) -> tuple[int, str]:
    """Exit code and output of a command."""
    log = Path(FOLDER.name) / "log"
    [code] = run_ranks(1, called, name, [str(a) for a in arguments], str(log))
    return code, log.read_text()


@cache
def source() -> Path:
    """A Hugging Face folder."""
    return make_source(Path(FOLDER.name) / "source", "qwen2", layers=2)


@cache
def step() -> Path:
    """A step of a run: a policy as actor, its critic."""
    folder = Path(FOLDER.name) / "run" / "checkpoints" / "step_3"
    folder.mkdir(parents=True)
    for role, options in (("actor", ["--check"]), ("critic", ["--check", "--value-head"])):
        code, said = command("hf_to_megatron", "--hf", source(), "--out", folder / role, *options)
        assert code == 0 and "logits differ from transformers' by at most" in said
    write_run_state(folder, RunState(3, 12, 0.1, [], None, {"megatron": {"world_size": 4}}))
    (folder.parent / "latest").write_text("step_3\n")
    return folder


def test_there_and_back_by_commands(tmp_path: Path) -> None:
    """With a single file for --hf, a run for --megatron, small files, a check of both."""
    run_folder = step().parent.parent
    code, said = command(
        "megatron_to_hf",
        "--megatron",
        run_folder,
        "--role",
        "actor",
        "--out",
        tmp_path / "back",
        "--max-shard-size",
        "50KB",
    )
    assert code == 0 and str(step() / "actor") in said
    assert_same(hf_tensors(tmp_path / "back"), hf_tensors(source()))
    assert len(list((tmp_path / "back").glob("*.safetensors"))) >= 3
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("1+1=\nhello\n\n")
    code, said = command("verify", source(), step() / "actor", "--prompts", prompts)
    assert code == 0 and "equal bit for bit" in said and "logits differ by at most" in said
    code, said = command("verify", step() / "actor", tmp_path / "back", "--tolerance", "1e-12")
    assert code == 1 and "NOT equal" in said
    code, said = command(
        "hf_to_megatron", "--hf", make_source(tmp_path / "one", "llama", max_shard_size="5GB")
        / "model.safetensors", "--out", tmp_path / "single", "--dtype", "bf16",
    )  # fmt: skip
    assert code == 0, said
    code, said = command("verify", tmp_path / "one", tmp_path / "single", "--dtype", "bf16")
    assert code == 1 and "only in" not in said
    config = json.loads((tmp_path / "single" / "hf" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"


def test_a_critic_comes_back_as_a_classifier(tmp_path: Path) -> None:
    """C1: with the head that training would have started with; transformers' own class."""
    code, said = command(
        "megatron_to_hf", "--megatron", step(), "--role", "critic", "--out", tmp_path / "critic"
    )
    assert code == 0, said
    tensors = hf_tensors(tmp_path / "critic")
    assert tuple(tensors["score.weight"].shape) == (1, 128) and tensors["score.weight"].any()
    config = json.loads((tmp_path / "critic" / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForSequenceClassification"]
    code, said = command("verify", tmp_path / "critic", step() / "critic", "--logits")
    assert code == 0 and "logits differ by at most" in said


def test_inspect_says_what_is_there() -> None:
    """Family, sizes, types, roles, step, and what to do next."""
    for path, words in (
        (source(), ["Hugging Face", "qwen2", "float32", "2 layers", "vocabulary 103", "tied"]),
        (step() / "actor", ["distributed checkpoint", "qwen2", "tp 1", "megatron_to_hf"]),
        (step(), ["step:", "3", "actor, critic", "ranks 4", "critic: head", "value"]),
        (step().parent.parent, ["training run", "step_3"]),
    ):
        code, said = command("inspect_checkpoint", path)
        assert code == 0 and all(word in said for word in words), said
    code, said = command("inspect_checkpoint", step() / "actor", "--tensors")
    assert "[2, 192, 128]" in said and "decoder.layers.mlp.linear_fc1.weight" in said
    code, said = command("inspect_checkpoint", step() / "rng")
    assert code == 1 and "does not exist" in said


def test_inspect_recommends_nothing_that_fails(tmp_path: Path) -> None:
    """A family that megappo does not know: its name, no command, and an exit code."""
    folder = shutil.copytree(source(), tmp_path / "gemma")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "gemma3_text"}))
    code, said = command("inspect_checkpoint", folder)
    assert code == 1 and "not supported" in said and "gemma3_text" in said
    assert "hf_to_megatron" not in said


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("megatron_to_hf", ["--megatron", "STEP", "--out", "X"], "--role actor"),
        ("megatron_to_hf", ["--megatron", "HF", "--out", "X"], "is a Hugging Face folder"),
        ("hf_to_megatron", ["--hf", "STEP", "--out", "X"], "is a training checkpoint"),
        ("hf_to_megatron", ["--hf", "HF", "--out", "HF"], "holds the folder"),
        ("hf_to_megatron", ["--hf", "HF", "--out", "STEP"], "--out: "),
        ("megatron_to_hf", ["--megatron", "ACTOR", "--out", "ACTOR/hf"], "came from"),
        ("megatron_to_hf", ["--megatron", "ACTOR", "--out", "STEP"], "holds the checkpoint"),
        ("megatron_to_hf", ["--megatron", "ACTOR", "--out", "X", "--max-shard-size", "big"], "5GB"),
        ("verify", ["HF", "NOWHERE"], "does not exist"),
        ("verify", ["HF", "ACTOR", "--prompts", "NOWHERE"], "NOWHERE"),
    ],
)
def test_a_mistake_is_one_line(name: str, arguments: list[str], words: str, tmp_path: Path) -> None:
    """C12: without a traceback, with an exit code, and nothing is written."""
    places = {"STEP": step(), "HF": source(), "ACTOR": step() / "actor", "X": tmp_path / "x"}
    given = [str(places.get(a, a)).replace("ACTOR/", f"{step()}/actor/") for a in arguments]
    code, said = command(name, *given)
    assert code == 1 and words in said, said
    assert said.startswith("error: ") and said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
