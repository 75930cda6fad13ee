"""Groups: one argument and one result per replica, whatever carries the call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from megappo.runtime.groups import Partners, RankCall, RankGroup
from megappo.topology import Topology


class Recorder:
    """Answers every call with its rank and argument."""

    def __init__(self) -> None:
        self.calls: dict[int, RankCall] = {}

    def dispatch(self, calls: Mapping[int, RankCall]) -> dict[int, Any]:
        """Record."""
        self.calls = dict(calls)
        return {rank: (rank, call.argument) for rank, call in calls.items()}

    def shutdown(self) -> None:
        """Nothing to end."""


@pytest.mark.parametrize(
    ("world", "tp", "pp"), [(1, 1, 1), (2, 2, 1), (4, 1, 2), (8, 2, 2), (6, 3, 1)]
)
def test_every_rank_gets_its_replicas_argument(world: int, tp: int, pp: int) -> None:
    """All ranks are called; the last stage's first tensor rank answers for a replica."""
    topology, recorder = Topology(world, tp, pp), Recorder()
    group = RankGroup(
        recorder,
        "actor",
        [topology.replica_ranks(d) for d in range(topology.dp)],
        [topology.output_rank(d) for d in range(topology.dp)],
    )
    results = group.call("update", [f"argument {d}" for d in range(topology.dp)])
    assert sorted(recorder.calls) == list(range(world))
    for rank, call in recorder.calls.items():
        assert call == RankCall("actor", "update", f"argument {topology.coordinates(rank).dp}")
    assert results == [(topology.output_rank(d), f"argument {d}") for d in range(topology.dp)]


def test_calls_without_an_argument_and_broadcasts() -> None:
    """``call(method)`` passes None, ``broadcast`` the same thing to all."""
    group = RankGroup(Recorder(), "ref", [[0], [1]], [0, 1])
    assert group.call("compute_log_probs") == [(0, None), (1, None)]
    assert group.broadcast("update", 3) == [(0, 3), (1, 3)]
    assert group.num_replicas == 2


def test_partners_take_part_in_their_method_alone() -> None:
    """They are called as their own target with the common argument, and none of them answers."""
    recorder = Recorder()
    group = RankGroup(
        recorder, "engine", [[2, 3], [4, 5]], [2, 4], {"sync": Partners("actor", range(2))}
    )
    assert group.broadcast("sync", 7) == [(2, 7), (4, 7)]
    assert recorder.calls == {
        **{rank: RankCall("actor", "sync", 7) for rank in (0, 1)},
        **{rank: RankCall("engine", "sync", 7) for rank in (2, 3, 4, 5)},
    }
    group.call("generate", ["a", "b"])
    assert sorted(recorder.calls) == [2, 3, 4, 5]
