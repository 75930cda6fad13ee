"""Seconds per phase."""

from __future__ import annotations

import pytest

from megappo.metrics.timers import StepTimer


class Clock:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        """At 100 seconds."""
        self.now = 100.0

    def __call__(self) -> float:
        """The time."""
        return self.now


def test_phases_add_up() -> None:
    """Repeated phases add up; the total counts the time between phases too."""
    clock, seen = Clock(), list[str]()
    timer = StepTimer(on_phase=seen.append, clock=clock)
    for name, seconds in [("generation", 2.0), ("update", 1.0), ("generation", 0.5)]:
        with timer.phase(name):
            clock.now += seconds
        clock.now += 0.25
    assert timer.metrics() == {
        "timing/generation": 2.5,
        "timing/update": 1.0,
        "timing/step_total": 4.25,
    }
    assert seen == ["generation", "update", "generation"]


def test_a_phase_that_fails_is_timed() -> None:
    """The time of a block that raises is kept."""
    clock = Clock()
    timer = StepTimer(clock=clock)
    with pytest.raises(RuntimeError), timer.phase("update"):
        clock.now += 3.0
        raise RuntimeError
    assert timer.metrics()["timing/update"] == 3.0


def test_real_clock() -> None:
    """Without a clock of ours, time passes."""
    timer = StepTimer()
    with timer.phase("x"):
        sum(range(1000))
    values = timer.metrics()
    assert 0 < values["timing/x"] <= values["timing/step_total"] < 60
