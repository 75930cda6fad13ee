"""Ctrl-C and SIGTERM: the first asks the run to stop at the next safe point, the second ends it.

The trainer asks ``requested`` between phases; this module knows nothing of phases.
"""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any


class StopSignal:
    """Context manager that turns SIGINT and SIGTERM into a question.

    ``received`` is the signal's number, or None. Handlers are restored at exit. Outside the
    main thread Python handles no signals: nothing is installed and nothing is ever requested.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._previous: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether the run was asked to stop."""
        return self.received is not None

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = number
        name = signal.Signals(number).name
        print(f"megappo: {name}: finishing the current phase, then saving", file=sys.stderr)
