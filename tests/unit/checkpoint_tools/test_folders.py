"""C12: whatever a user points at is named, and the line says what to pass instead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoint_tools.command import parse_bytes
from checkpoint_tools.folders import hf_folder, identify, megatron_folder


def _touch(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    return folder


def _empty(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _megatron(folder: Path) -> Path:
    return _touch(folder, ".metadata", "metadata.json", "common.pt", "__0_0.distcp")


def _step(folder: Path, *roles: str) -> Path:
    for role in roles:
        _megatron(folder / role)
    return _touch(folder, "run_state.json", "rng/rank_0.pt")


def _run(folder: Path) -> Path:
    for number in (5, 10):
        _step(folder / "checkpoints" / f"step_{number}", "actor", "critic")
    (folder / "checkpoints" / "latest").write_text("step_5\n")
    return folder


def _hf(folder: Path) -> Path:
    return _touch(folder, "config.json", "model.safetensors")


KINDS: list[tuple[str, Callable[[Path], Path], str]] = [
    ("hf", _hf, "hf_to_megatron --hf takes it"),
    ("hf", lambda p: _touch(p, "config.json", "model.safetensors.index.json"), "takes it"),
    ("hf_config_only", lambda p: _touch(p, "config.json", "tokenizer.json"), "lacks model.safe"),
    ("hf_pickled", lambda p: _touch(p, "config.json", "pytorch_model.bin"), "safe_serialization"),
    ("safetensors_file", lambda p: _hf(p) / "model.safetensors", "pass its folder"),
    ("megatron", _megatron, "megatron_to_hf --megatron takes it"),
    ("megatron_broken", lambda p: _touch(p, "__0_0.distcp", "common.pt"), "did not finish"),
    ("megatron_broken", lambda p: _touch(p, "common.pt", ".metadata"), "did not finish"),
    ("torch_dcp", lambda p: _touch(p, "__0_0.distcp", ".metadata"), "save_pretrained()"),
    ("hf_adapter", lambda p: _touch(p, "adapter_config.json", "adapter_model.safetensors"), "peft"),
    ("hf_cache", lambda p: _touch(p, "refs/main", "snapshots/3f2a/config.json"), "snapshots/3f2a"),
    (
        "megatron_parent",
        lambda p: _touch(p, "latest_checkpointed_iteration.txt", "iter_0000010/x"),
        "iter_0000010",
    ),
    ("deepspeed", lambda p: _touch(p, "mp_rank_00_model_states.pt"), "zero_to_fp32.py"),
    ("megatron_legacy", lambda p: _touch(p, "mp_rank_00/model_optim_rng.pt"), "torch_dist"),
    ("step", lambda p: _step(p, "actor", "critic"), "actor or "),
    ("run", _run, "step_5 or "),
    ("run", lambda p: _run(p) / "checkpoints", "step_5 or "),
    ("run", lambda p: _touch(p, "logs/rank_0.log", "samples/step_1.jsonl"), "no checkpoint yet"),
    ("empty", _empty, ""),
    ("missing", lambda p: p, ""),
    ("file", lambda p: _touch(p, "notes.txt") / "notes.txt", ""),
    ("unknown", lambda p: _touch(p, "thesis.tex"), "it holds thesis.tex"),
    ("unknown", lambda p: _hf(p / "inner").parent, "inner"),
    ("unknown", lambda p: _megatron(p / "actor").parent, "actor"),
]


@pytest.mark.parametrize(("kind", "make", "hint"), KINDS)
def test_every_kind_is_told_from_the_others(
    kind: str, make: Callable[[Path], Path], hint: str, tmp_path: Path
) -> None:
    """What it is, and what to do with it."""
    found = identify(make(tmp_path / "x"))
    assert found.kind == kind
    assert hint in str(found) and "\n" not in str(found)


@pytest.mark.parametrize(("kind", "make", "hint"), KINDS)
def test_commands_take_what_they_can_use(
    kind: str, make: Callable[[Path], Path], hint: str, tmp_path: Path
) -> None:
    """And refuse the rest in one line: what was found, what was expected."""
    path = make(tmp_path / "x")
    for command, taken in (
        (hf_folder, {"hf", "safetensors_file"}),
        (lambda p: megatron_folder(p, None), {"megatron"}),
        (lambda p: megatron_folder(p, "critic"), {"step", "run"}),
    ):
        if kind in taken and hint != "no checkpoint yet":
            assert (tmp_path / "x") in (command(path), *command(path).parents)
            continue
        with pytest.raises(ValueError, match=r"expected|--role") as error:
            command(path)
        assert str(tmp_path / "x") in str(error.value) and "\n" not in str(error.value)


def test_the_role_is_found_or_asked_for(tmp_path: Path) -> None:
    """One model needs no --role; of several, one is named in the answer."""
    alone = _step(tmp_path / "alone", "actor")
    assert megatron_folder(alone) == alone / "actor"
    both = _step(tmp_path / "both", "actor", "critic")
    with pytest.raises(ValueError, match=r"actor, critic.*give --role actor or pass .*both/actor"):
        megatron_folder(both)
    assert megatron_folder(both, "critic") == both / "critic"
    with pytest.raises(ValueError, match="without judge; its models: actor, critic"):
        megatron_folder(both, "judge")
    run = _run(tmp_path / "run")
    assert megatron_folder(run, "actor") == run / "checkpoints" / "step_5" / "actor"


@pytest.mark.parametrize(
    ("tracker", "first"), [("20", "iter_0000020"), ("30\n", "iter_0000030"), ("release", None)]
)
def test_the_tracker_names_the_latest(tmp_path: Path, tracker: str, first: str | None) -> None:
    """A newer folder that Megatron-LM did not finish, or was told to leave, is not taken."""
    for number in (10, 20, 30):
        _megatron(tmp_path / f"iter_{number:07d}")
    _megatron(tmp_path / "iter_0000040")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(tracker)
    assert megatron_folder(tmp_path) == tmp_path / (first or "iter_0000040")


def test_sizes_of_files() -> None:
    """As the options of other tools are written."""
    assert parse_bytes("5GB") == 5 * 10**9
    assert parse_bytes("50 kb") == 50_000
    assert parse_bytes("1.5M") == 1_500_000
    assert parse_bytes("123") == 123
    for wrong in ("", "5 bananas", "-1GB", "0GB", "GB"):
        with pytest.raises(ValueError, match="is no size"):
            parse_bytes(wrong)
