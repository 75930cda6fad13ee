"""Where a run goes on from, decided before any rank starts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from megappo.checkpoint.run_state import RunState, write_run_state
from megappo.config import load
from megappo.config.schema import Config
from megappo.trainer.resume import changed_keys, checkpoint_store, resume_point
from tests.e2e.runs import make_inputs


@pytest.fixture
def args(tmp_path: Path) -> Config:
    """A run of 6 prompts, twice, that wants to resume."""
    config = make_inputs(tmp_path, prompts=6)
    argv = ["--config", str(config), "--output_dir", str(tmp_path / "out")]
    return load([*argv, "--ckpt.load_enable", "true", "--train.num_episodes", "2"])


def save(args: Config, consumed: int, *roles: str) -> Path:
    """A checkpoint whose roles are empty folders."""
    store = checkpoint_store(args)
    folder = store.begin(3)
    write_run_state(folder, RunState(3, consumed, 0.05, [], None, {}))
    for role in roles:
        (folder / role).mkdir()
    return store.commit(3)


def test_without_a_checkpoint_a_run_starts_anew(args: Config) -> None:
    """``load_enable`` may stay on from the first start."""
    assert resume_point(args) is None


@pytest.mark.parametrize("consumed", [4, 8, 12])
def test_a_checkpoint_of_this_run_is_taken(args: Config, consumed: int) -> None:
    """Also that of a run which is over."""
    folder = save(args, consumed, "actor", "critic")
    point = resume_point(args)
    assert point is not None and point.folder == folder and folder.is_absolute()
    assert (point.state.step, point.state.consumed_samples) == (3, consumed)


@pytest.mark.parametrize(
    ("consumed", "roles", "reason"),
    [
        (13, ("actor", "critic"), r"has used 13 prompts, but this run has 12 \(6 in .* x"),
        (4, ("actor",), "holds no critic, which this run trains"),
        (4, (), "holds no actor, which this run trains"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(
    args: Config, consumed: int, roles: tuple[str, ...], reason: str
) -> None:
    """One line that names the key and the folder."""
    folder = save(args, consumed, *roles)
    with pytest.raises(ValueError, match=reason) as caught:
        resume_point(args)
    assert str(caught.value).startswith(f"ckpt.load_enable: {folder} ")


def test_a_folder_that_is_no_checkpoint_is_named(args: Config) -> None:
    """It has the name of one and nothing in it."""
    (checkpoint_store(args).root / "step_7").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"step_7 is not a checkpoint"):
        resume_point(args)


@pytest.mark.parametrize(
    ("section", "key", "value", "named"),
    [
        ("train", "seed", 7, ["train.seed"]),
        ("train", "max_steps", 9, ["train.max_steps"]),
        ("actor", "eps_clip_low_high", (0.1, 0.3), ["actor.eps_clip_low_high"]),
        ("logger", "console", True, []),
        ("ckpt", "save_steps", 1, []),
    ],
)
def test_keys_that_changed_since_the_save_are_found(
    args: Config, section: str, key: str, value: object, named: list[str]
) -> None:
    """Those of the algorithm, by their dotted names; an unchanged run has none."""
    save(args, 4, "actor", "critic")
    folder = checkpoint_store(args).begin(4)
    write_run_state(folder, RunState(4, 4, 0.05, [], None, dataclasses.asdict(args)))
    (folder / "actor").mkdir()
    (folder / "critic").mkdir()
    checkpoint_store(args).commit(4)
    point = resume_point(args)
    assert point is not None and changed_keys(point.state, args) == []
    part = dataclasses.replace(getattr(args, section), **{key: value})
    assert changed_keys(point.state, dataclasses.replace(args, **{section: part})) == named
