"""Who sends: the own rank, then the same node, and among equals whoever has least to send."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megappo.weights.sources import SourceChoice, fill


def _ranks(*ranks: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(ranks, dtype=np.int64)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    levels=st.lists(st.integers(0, 50), min_size=1, max_size=6),
    count=st.integers(0, 40),
    size=st.integers(1, 20),
)
def test_levels_as_if_filled_one_by_one(levels: list[int], count: int, size: int) -> None:
    """The same levels as when every item goes on the lowest, except for which of equals."""
    greedy = list(levels)
    for _ in range(count):
        greedy[greedy.index(min(greedy))] += size
    counts = fill(np.array(levels), count, size)
    assert counts.min() >= 0
    assert sorted(np.array(levels) + counts * size) == sorted(greedy)


def test_own_rank_then_node_then_any() -> None:
    """Ranks 0-3 and 4-7 are nodes; replicas are 1, 2 and 5."""
    replicas, takers = _ranks(1, 2, 5), _ranks(2, 0, 3, 4, 9)
    chosen = SourceChoice(ranks_per_node=4).choose(replicas, takers, num_copies=3, size=10)
    sources = replicas[chosen]
    assert (sources[0] == 2).all()
    assert set(sources[1:3].flat) == {1, 2}
    assert (sources[3] == 5).all()
    # Nobody is near rank 9: six near copies made 3 for each of the node's two replicas, and 5
    # has sent 3 as well.
    assert sorted(sources[4]) == [1, 2, 5]


def test_one_node_is_no_node() -> None:
    """Without nodes all replicas serve alike, and what a rank copies to itself counts nothing."""
    replicas = _ranks(0, 1, 2, 3)
    chosen = SourceChoice().choose(replicas, _ranks(*range(12)), num_copies=5, size=1)
    assert (chosen[:4] == np.arange(4)[:, None]).all()
    assert np.bincount(chosen[4:].ravel()).tolist() == [10] * 4


def test_load_is_remembered_per_set_of_replicas() -> None:
    """A large copy from one replica is made up for by small ones from the other."""
    choice = SourceChoice()
    large = choice.choose(_ranks(0, 1), _ranks(5), num_copies=1, size=100)
    small = choice.choose(_ranks(0, 1), _ranks(5), num_copies=12, size=10)
    assert large.tolist() == [[0]]
    assert np.bincount(small.ravel()).tolist() == [1, 11]
    other = choice.choose(_ranks(0, 2), _ranks(5), num_copies=2, size=10)
    assert sorted(other.ravel()) == [0, 1]


def test_takers_ask_few_replicas() -> None:
    """Each taker is served by one replica where loads allow: long messages, few pairs."""
    chosen = SourceChoice().choose(_ranks(0, 1, 2), _ranks(*range(3, 9)), num_copies=7, size=3)
    assert all(len(set(row)) == 1 for row in chosen.tolist())
