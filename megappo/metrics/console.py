"""The run on the terminal: one line per step, and below them what is going on now.

On a terminal a live bar shows the step, the phase that runs and the time left; elsewhere
(a log file) only the lines appear. Knows the names of the metrics it shows, and no others.
"""

from __future__ import annotations

from collections import deque
from datetime import timedelta

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from megappo.records import StepMetrics

_SHOWN = {
    "reward": "train/reward",
    "kl": "train/kl",
    "length": "train/response_length",
    "policy loss": "train/policy_loss",
    "critic loss": "train/critic_loss",
    "eval reward": "eval/reward_mean",
    "eval length": "eval/response_length_mean",
}
_RECENT_STEPS = 10


class Console:
    """Metric sink for people. ``metrics.step`` counts the steps that are done."""

    def __init__(
        self, num_steps: int, first_step: int = 0, console: RichConsole | None = None
    ) -> None:
        """Start the display.

        Args:
            num_steps: steps of the whole run.
            first_step: steps done before this start (resume).
            console: where to write; None is standard output.
        """
        self._num_steps = num_steps
        self._seconds: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._console = console or RichConsole()
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[phase]}"),
            TextColumn("left {task.fields[left]}"),
            console=self._console,
            disable=not self._console.is_terminal,
            transient=True,
        )
        self._task = self._progress.add_task(
            "run", total=num_steps, completed=first_step, phase="starting", left="?"
        )
        self._progress.start()

    def show_phase(self, name: str) -> None:
        """Show which phase runs now."""
        self._progress.update(self._task, phase=name.replace("_", " "))

    def log(self, metrics: StepMetrics) -> None:
        """Write the step's line and move the bar."""
        values = metrics.values
        if "timing/step_total" in values:
            self._seconds.append(values["timing/step_total"])
        left = self._time_left(metrics.step)
        self._progress.update(self._task, completed=metrics.step, left=left)
        parts = [f"step {metrics.step}/{self._num_steps}"]
        parts += [f"{label} {values[key]:.4g}" for label, key in _SHOWN.items() if key in values]
        if phases := _phases(values):
            parts += [phases, f"left {left}"]
        self._console.print(" | ".join(parts), markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Take the bar away; the lines stay."""
        self._progress.stop()

    def _time_left(self, step: int) -> str:
        if not self._seconds:
            return "?"
        mean = sum(self._seconds) / len(self._seconds)
        return str(timedelta(seconds=round(mean * (self._num_steps - step))))


def _phases(values: dict[str, float]) -> str:
    """``generation 2.1 s, update 3.0 s``: the timed phases of a step."""
    seconds = {
        name.removeprefix("timing/").replace("_", " "): value
        for name, value in values.items()
        if name.startswith("timing/") and not name.endswith(("per_second", "step_total"))
    }
    return ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items())
