"""Even bins and few bins, against all divisions of small cases and against their own bounds."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megappo.data.partition import even_bins, even_groups, few_bins, loads

numbers = st.lists(st.integers(0, 50), max_size=40).map(lambda x: np.array(x, np.int64))


@given(sizes=numbers, num_bins=st.integers(1, 12))
def test_even_bins_differ_by_the_largest_number_at_most(sizes: np.ndarray, num_bins: int) -> None:
    """Every number has one bin; order and bins repeat."""
    bins = even_bins(sizes, num_bins)
    assert len(bins) == len(sizes) and np.all((bins >= 0) & (bins < num_bins))
    sums = loads(sizes, bins, num_bins)
    assert sums.sum() == sizes.sum()
    assert sums.max() - sums.min() <= sizes.max(initial=0)
    assert np.array_equal(bins, even_bins(sizes.copy(), num_bins))


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=7).map(np.array),
    num_bins=st.integers(1, 3),
)
def test_even_bins_are_near_the_best_of_all_divisions(sizes: np.ndarray, num_bins: int) -> None:
    """The fullest bin is at most 7/6 (two bins) or 4/3 - 1/9 (three) of the least possible."""
    found = loads(sizes, even_bins(sizes, num_bins), num_bins).max()
    best = min(
        loads(sizes, np.array(bins), num_bins).max()
        for bins in product(range(num_bins), repeat=len(sizes))
    )
    assert found <= best * {1: 1, 2: 7 / 6, 3: 11 / 9}[num_bins]


@pytest.mark.parametrize(
    ("sizes", "num_bins", "sums"),
    [
        ([8, 7, 6, 5, 4], 2, [16, 14]),
        ([8, 7, 6, 5, 4], 3, [11, 11, 8]),
        ([9], 3, [9, 0, 0]),
        ([], 2, [0, 0]),
    ],
)
def test_even_bins_by_differencing(sizes: list[int], num_bins: int, sums: list[int]) -> None:
    """8, 7, 6, 5, 4 is the textbook's case: 16 and 14, where longest first gives 17 and 13."""
    array = np.array(sizes, np.int64)
    assert sorted(loads(array, even_bins(array, num_bins), num_bins), reverse=True) == sums


@given(
    sizes=st.lists(st.integers(0, 50), min_size=12, max_size=12).map(np.array),
    num_groups=st.sampled_from([1, 2, 3, 4, 6, 12]),
)
def test_even_groups_have_as_many_numbers_each(sizes: np.ndarray, num_groups: int) -> None:
    """Equal counts; sums differ by no more than neighbours in rank do."""
    groups = even_groups(sizes, num_groups)
    assert np.bincount(groups, minlength=num_groups).tolist() == [12 // num_groups] * num_groups
    sums = loads(sizes, groups, num_groups)
    layers = np.sort(sizes).reshape(-1, num_groups)
    assert sums.max() - sums.min() <= (layers[:, -1] - layers[:, 0]).max()


@given(sizes=numbers, capacity=st.integers(50, 120))
def test_few_bins_keep_the_capacity(sizes: np.ndarray, capacity: int) -> None:
    """No bin is too full, and no two would fit into one."""
    bins = few_bins(sizes, capacity)
    count = int(bins.max(initial=-1)) + 1
    sums = np.sort(loads(sizes, bins, count))
    assert sums.max(initial=0) <= capacity
    assert count < 2 or sums[0] + sums[1] > capacity


def test_few_bins_leave_the_least_room() -> None:
    """The last 2 goes into the bin of 8, where first fit would open the room beside 7."""
    assert few_bins(np.array([7, 8, 2]), 10).tolist() == [1, 0, 0]
    assert few_bins(np.array([6, 6, 4, 4, 4]), 12).tolist() == [0, 0, 1, 1, 1]
