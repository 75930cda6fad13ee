"""Signals ask first, and interrupt the second time."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from megappo.trainer.stopping import StopSignal


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_asks_and_second_interrupts(number: int) -> None:
    """The handler is gone afterwards."""
    before = signal.getsignal(number)
    with StopSignal() as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested and stop.received == number
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_without_a_signal_nothing_is_asked() -> None:
    """A run that nobody stops is not stopped."""
    with StopSignal() as stop:
        assert stop.received is None


def test_outside_the_main_thread_nothing_is_installed() -> None:
    """A run in a thread of a notebook or a service goes its way."""

    def enter() -> bool:
        with StopSignal() as stop:
            return stop.requested

    before = signal.getsignal(signal.SIGTERM)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(enter).result() is False
    assert signal.getsignal(signal.SIGTERM) is before
