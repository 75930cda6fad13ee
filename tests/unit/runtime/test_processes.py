"""Which processes a run has: their numbers, names, logs and groups, for both placements."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megappo.runtime.groups import RankCall
from megappo.runtime.processes import Processes, ranks_per_node
from megappo.topology import Topology


class Recorder:
    """Remembers the last calls and answers each with its rank."""

    def __init__(self) -> None:
        self.calls: dict[int, RankCall] = {}

    def dispatch(self, calls: Mapping[int, RankCall]) -> dict[int, Any]:
        """Record."""
        self.calls = dict(calls)
        return {rank: rank for rank in calls}

    def shutdown(self) -> None:
        """Nothing to end."""


INSIDE = Processes(Topology(4, tp=2, pp=2), engine_tp=2)
APART = Processes(Topology(4, tp=2, pp=2), engine_tp=3, num_apart=6)


def test_numbers() -> None:
    """Engines fill the mesh's ranks, or come after them."""
    assert (INSIDE.count, INSIDE.mesh, INSIDE.engines) == (4, range(4), range(4))
    assert (APART.count, APART.mesh, APART.engines) == (10, range(4), range(4, 10))


def test_names_and_logs() -> None:
    """An engine's process counts from 0 among the engines, whatever was called in it."""
    assert [INSIDE.name("engine", 3), APART.name("critic", 3)] == ["engine rank 3", "critic rank 3"]
    assert [APART.name("mesh", 4), APART.name("engine", 9)] == ["engine rank 0", "engine rank 5"]
    paths = [APART.log_path(Path("logs"), process).name for process in (0, 3, 4, 9)]
    assert paths == ["rank_0.log", "rank_3.log", "engine_0.log", "engine_5.log"]


@pytest.mark.parametrize(
    ("processes", "leaders"), [(INSIDE, [0, 2]), (APART, [4, 7])], ids=["inside", "apart"]
)
def test_a_replica_of_the_engine_group_is_an_engine(
    processes: Processes, leaders: list[int]
) -> None:
    """Its ranks are neighbours and get the same argument; the first answers."""
    recorder = Recorder()
    assert processes.engine_group(recorder).call("generate", ["a", "b"]) == leaders
    size = processes.engine_tp
    assert recorder.calls == {
        first + i: RankCall("engine", "generate", argument)
        for first, argument in zip(leaders, "ab", strict=True)
        for i in range(size)
    }


def test_who_takes_part_in_a_sync_and_in_an_exchange() -> None:
    """Inside, the group alone; apart, the mesh sends weights and the engines send tokens."""
    recorder = Recorder()
    INSIDE.engine_group(recorder).broadcast("sync_weights", 1)
    assert {call.target for call in recorder.calls.values()} == {"engine"}
    INSIDE.role_group(recorder, "actor").broadcast("load_batch")
    assert {call.target for call in recorder.calls.values()} == {"actor"}
    APART.engine_group(recorder).broadcast("sync_weights", 1)
    assert {rank: call.target for rank, call in recorder.calls.items()} == {
        **dict.fromkeys(range(4), "actor"),
        **dict.fromkeys(range(4, 10), "engine"),
    }
    APART.role_group(recorder, "actor").broadcast("load_batch")
    assert {rank: call.target for rank, call in recorder.calls.items()} == {
        **dict.fromkeys(range(4), "actor"),
        **dict.fromkeys(range(4, 10), "engine"),
    }
    APART.role_group(recorder, "actor").broadcast("update", 0)
    assert sorted(recorder.calls) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("aaaa", 4),
        ("aabb", 2),
        ("aabbc", 2),
        ("a", 1),
        ("abbcc", None),
        ("aaabbccc", None),
        ("aabbb", None),
    ],
)
def test_ranks_per_node(nodes: str, expected: int | None) -> None:
    """A number only where rank // number tells the node."""
    assert ranks_per_node(nodes) == expected
