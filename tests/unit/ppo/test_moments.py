"""Running mean and deviation against numpy's over everything."""

from __future__ import annotations

import json

import numpy as np
import pytest

from megappo.ppo.moments import RunningMoments


@pytest.mark.parametrize("offset", [0.0, -3.5, 1e6])
def test_batches_are_as_one(offset: float) -> None:
    """Whatever the cut, and however far the mean is from 0; an empty batch changes nothing."""
    values = offset + np.random.default_rng(0).normal(2.0, 0.7, 97)
    moments = RunningMoments()
    for batch in np.split(values, [1, 1, 40, 41]):
        moments.update(batch.tolist())
    assert moments.count == 97
    assert moments.mean == pytest.approx(values.mean(), rel=1e-12)
    assert moments.deviation == pytest.approx(values.std(), rel=1e-9)
    assert moments.normalise(float(values[3])) == pytest.approx(
        (values[3] - values.mean()) / values.std(), rel=1e-6, abs=1e-9
    )


def test_by_hand() -> None:
    """Of 1, 2, 3, 6: mean 3, squares 4 + 1 + 0 + 9 = 14, deviation sqrt(3.5)."""
    moments = RunningMoments()
    moments.update([1.0, 2.0])
    moments.update([3.0, 6.0])
    assert moments.state() == [4, 3.0, 14.0]
    assert moments.normalise(6.0) == pytest.approx(3 / 3.5**0.5)


def test_equal_scores_and_none() -> None:
    """No deviation: 0, not a division by it."""
    moments = RunningMoments()
    assert moments.normalise(5.0) == 0.0
    moments.update([0.3] * 7)
    assert moments.normalise(0.3) == 0.0


def test_state_goes_through_json() -> None:
    """Bit for bit, and what comes next is the same."""
    moments, again = RunningMoments(), RunningMoments()
    moments.update([0.1, 0.7, -2.3])
    again.load(json.loads(json.dumps(moments.state())))
    for each in (moments, again):
        each.update([1 / 3, 9.0])
    assert again.state() == moments.state()
