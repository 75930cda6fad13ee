"""Mean and deviation of all numbers seen so far, batch by batch.

Pure arithmetic on Python floats; the driver keeps one for each reward model, and its state
in the checkpoint. Knows no rewards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

MIN_DEVIATION = 1e-6


class RunningMoments:
    """Count, mean and sum of squared differences from the mean.

    Two batches are joined as in Chan, Golub and LeVeque (1979), so that nothing is lost however
    far the mean is from 0.
    """

    def __init__(self) -> None:
        """Nothing seen."""
        self.count = 0
        self.mean = 0.0
        self._squares = 0.0

    @property
    def deviation(self) -> float:
        """Standard deviation of all (biased); 0 of none."""
        return math.sqrt(self._squares / self.count) if self.count else 0.0

    def update(self, values: Sequence[float]) -> None:
        """Take in a batch."""
        if not values:
            return
        mean = math.fsum(values) / len(values)
        squares = math.fsum((value - mean) ** 2 for value in values)
        count = self.count + len(values)
        apart = mean - self.mean
        self._squares += squares + apart**2 * self.count * len(values) / count
        self.mean += apart * len(values) / count
        self.count = count

    def normalise(self, value: float) -> float:
        """``value`` in deviations from the mean; 0 while all have been equal."""
        if self.deviation < MIN_DEVIATION:
            return 0.0
        return (value - self.mean) / self.deviation

    def state(self) -> list[float]:
        """What ``load`` takes; reads back bit-equal from JSON."""
        return [self.count, self.mean, self._squares]

    def load(self, state: Sequence[float]) -> None:
        """Go on from a state."""
        count, self.mean, self._squares = state
        self.count = int(count)
