"""Where metrics go: a JSON-lines file, TensorBoard, Weights & Biases; and the one that feeds all.

A step's metrics arrive whole, as :class:`~megappo.records.StepMetrics`, after the step. On
resume every sink is told the step it resumes after, and what an interrupted run logged
beyond that step disappears. Sinks know nothing of what the names mean; the console, which
does, is in ``console.py``.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from torch.utils.tensorboard import SummaryWriter

from megappo.config.schema import WandbConfig
from megappo.records import StepMetrics


class MetricSink(Protocol):
    """Takes the metrics of one step after another."""

    def log(self, metrics: StepMetrics) -> None:
        """Record one step's metrics; a step may be logged more than once (evaluation)."""
        ...

    def close(self) -> None:
        """Write out what is left and let go of files and connections."""
        ...


class MetricLogger:
    """Gives every step's metrics to all sinks; a context manager that closes them."""

    def __init__(self, sinks: Sequence[MetricSink]) -> None:
        """Take over the sinks."""
        self._sinks = tuple(sinks)

    def log(self, metrics: StepMetrics) -> None:
        """Give the metrics to every sink, in order."""
        for sink in self._sinks:
            sink.log(metrics)

    def close(self) -> None:
        """Close every sink, also when one of them fails; its error is raised at the end."""
        sinks, self._sinks = self._sinks, ()
        with ExitStack() as stack:
            for sink in reversed(sinks):
                stack.callback(sink.close)

    def __enter__(self) -> MetricLogger:
        """The logger itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the sinks."""
        self.close()


class Jsonl:
    """One JSON object per line: ``step`` and the metrics. NaN and infinities become null."""

    def __init__(self, path: str | Path, resume_step: int | None = None) -> None:
        """Open the file.

        Args:
            path: of the file; its folder is made.
            resume_step: keep what was logged up to this step; None starts an empty file.
        """
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        kept = [] if resume_step is None else _lines_until(self._path, resume_step)
        partial = self._path.with_name(self._path.name + ".partial")
        partial.write_text("".join(kept), encoding="utf-8")
        os.replace(partial, self._path)
        self._file = self._path.open("a", encoding="utf-8")

    def log(self, metrics: StepMetrics) -> None:
        """Append a line and flush it."""
        values = {k: v if math.isfinite(v) else None for k, v in metrics.values.items()}
        self._file.write(json.dumps({"step": metrics.step, **values}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard:
    """Scalars in a TensorBoard folder."""

    def __init__(self, folder: str | Path, resume_step: int | None = None) -> None:
        """Open a new event file in the folder; TensorBoard hides older ones past the step."""
        purge = 0 if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(log_dir=str(folder), purge_step=purge)

    def log(self, metrics: StepMetrics) -> None:
        """Write the scalars and flush them."""
        for name, value in metrics.values.items():
            self._writer.add_scalar(name, value, metrics.step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class Wandb:
    """A Weights & Biases run.

    Attributes:
        run_id: id of the run, to be kept in the checkpoint and given back on resume.
    """

    def __init__(
        self,
        config: WandbConfig,
        folder: str | Path,
        run_config: Mapping[str, Any],
        run_id: str | None = None,
    ) -> None:
        """Start a run, or go on with one.

        Args:
            config: project, names and mode.
            folder: where W&B keeps its own ``wandb/`` folder; it is made.
            run_config: the run's configuration, shown by W&B.
            run_id: of the run to go on with; None starts a new one.

        Raises:
            ValueError: if W&B cannot be used: not installed, no key, no connection.
        """
        try:
            import wandb
        except ImportError as error:
            raise ValueError(
                "logger.wandb.project is set, but wandb is not installed (pip install wandb)"
            ) from error
        Path(folder).mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(
                project=config.project,
                entity=config.org,
                group=config.group,
                name=config.run_name,
                mode=config.mode,
                dir=str(folder),
                config=dict(run_config),
                id=run_id,
                resume="allow" if run_id is not None else None,
                # Capturing the terminal would fight with the live display.
                settings=wandb.Settings(console="off", silent=True),
            )
        except wandb.Error as error:
            raise ValueError(
                f"W&B run {config.project!r} cannot start: {' '.join(str(error).split())} "
                "(set logger.wandb.mode: offline to run without a connection)"
            ) from error
        # W&B's own step counter cannot go back; ours does when a run resumes.
        self._run.define_metric("*", step_metric="global_step")
        self.run_id: str = self._run.id

    def log(self, metrics: StepMetrics) -> None:
        """Hand the metrics to W&B, which sends them in the background."""
        # W&B drops rows whose own step goes back; offline, a resumed run counts from 0 again.
        row = max(self._run.step, metrics.step)
        self._run.log({**metrics.values, "global_step": metrics.step}, step=row, commit=True)

    def close(self) -> None:
        """Finish the run; waits for what has not been sent."""
        self._run.finish()


def _lines_until(path: Path, step: int) -> list[str]:
    """Whole lines of steps up to ``step``; a line that a crash cut off is left out."""
    if not path.is_file():
        return []
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        try:
            fields = json.loads(line)
        except ValueError:
            continue
        if line.endswith("\n") and isinstance(fields, dict) and fields.get("step", step) <= step:
            kept.append(line)
    return kept
