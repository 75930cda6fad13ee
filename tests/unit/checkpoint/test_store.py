"""Checkpoint folders: the pointer moves last, and the newest are kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from megappo.checkpoint.run_state import RunState, read_run_state, write_run_state
from megappo.checkpoint.store import CheckpointStore


def save(store: CheckpointStore, step: int, text: str = "x") -> None:
    """Write a one-file checkpoint."""
    (store.begin(step) / "data").write_text(text)
    store.commit(step)


def test_latest_names_the_last_commit(tmp_path: Path) -> None:
    """A folder that was begun but not committed is not a checkpoint."""
    store = CheckpointStore(tmp_path / "c", max_num=3)
    assert store.latest() is None
    save(store, 2)
    (store.begin(4) / "data").write_text("half")
    assert store.latest() == tmp_path / "c" / "step_2"
    assert store.steps() == [2]


def test_leftovers_are_removed_by_the_next_save(tmp_path: Path) -> None:
    """An interrupted save leaves nothing once another one has begun."""
    store = CheckpointStore(tmp_path, max_num=3)
    (store.begin(1) / "data").write_text("half")
    (tmp_path / ".writing_latest").write_text("step_")
    save(store, 2)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["latest", "step_2"]


@pytest.mark.parametrize(("max_num", "kept"), [(1, [8]), (2, [6, 8]), (9, [2, 4, 6, 8])])
def test_retention(tmp_path: Path, max_num: int, kept: list[int]) -> None:
    """The newest ``max_num`` stay."""
    store = CheckpointStore(tmp_path, max_num=max_num)
    for step in (2, 4, 6, 8):
        save(store, step)
    assert store.steps() == kept


def test_what_was_just_saved_is_never_dropped(tmp_path: Path) -> None:
    """A new run in the folder of a longer one: the old one's checkpoints go, oldest first."""
    old, new = CheckpointStore(tmp_path, max_num=3), CheckpointStore(tmp_path, max_num=3)
    for step in (90, 95, 100):
        save(old, step)
    for step, kept in ((2, [2, 95, 100]), (4, [2, 4, 100]), (6, [2, 4, 6]), (8, [4, 6, 8])):
        save(new, step)
        assert new.steps() == kept
        assert new.latest() == tmp_path / f"step_{step}"


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    """A resumed run may save a step that an earlier one saved."""
    store = CheckpointStore(tmp_path, max_num=2)
    save(store, 3, "old")
    save(store, 3, "new")
    assert (tmp_path / "step_3" / "data").read_text() == "new"


@pytest.mark.parametrize("pointer", ["step_9", "", None])
def test_a_pointer_to_nothing_falls_back(
    tmp_path: Path, pointer: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """The newest whole checkpoint is taken, with a warning."""
    store = CheckpointStore(tmp_path, max_num=5)
    save(store, 2)
    save(store, 10)
    if pointer is None:
        (tmp_path / "latest").unlink()
    else:
        (tmp_path / "latest").write_text(pointer)
    assert store.latest() == tmp_path / "step_10"
    assert "step_10" in caplog.text


def test_run_state_reads_back_bit_equal(tmp_path: Path) -> None:
    """Floats survive, and a missing or foreign file is named."""
    state = RunState(3, 12, 0.1 + 0.2, [[8, 0.1 + 0.7, 1e-9]], None, {"train": {"seed": 42}})
    write_run_state(tmp_path, state)
    assert read_run_state(tmp_path) == state
    (tmp_path / "run_state.json").write_text('{"step": 1}')
    with pytest.raises(ValueError, match="run_state.json is not a run state"):
        read_run_state(tmp_path)
    with pytest.raises(ValueError, match="not a checkpoint"):
        read_run_state(tmp_path / "nowhere")
