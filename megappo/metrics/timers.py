"""Seconds per phase of one step.

Knows neither the phases nor who logs them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class StepTimer:
    """Times the phases of one step; make a new one at the start of every step."""

    def __init__(
        self,
        on_phase: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Start the step's clock.

        Args:
            on_phase: called with the name of every phase that starts (live display).
            clock: seconds, never going back.
        """
        self._on_phase = on_phase
        self._clock = clock
        self._start = clock()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block to a phase, also when the block raises."""
        if self._on_phase is not None:
            self._on_phase(name)
        start = self._clock()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._clock() - start

    def metrics(self) -> dict[str, float]:
        """``timing/<phase>`` in order of first use, and ``timing/step_total`` up to now."""
        values = {f"timing/{name}": seconds for name, seconds in self._seconds.items()}
        values["timing/step_total"] = self._clock() - self._start
        return values
