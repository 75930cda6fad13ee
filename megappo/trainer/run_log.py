"""Opens the metric sinks that the configuration asks for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from megappo.config.schema import Config
from megappo.metrics.console import Console
from megappo.metrics.sinks import Jsonl, MetricLogger, MetricSink, TensorBoard, Wandb

METRICS_FILE = "metrics.jsonl"


@dataclasses.dataclass(frozen=True)
class RunLog:
    """The sinks of a run.

    ``show_phase`` is told what the run does now (None without a console); ``wandb_run_id``
    is None where W&B is off.
    """

    logger: MetricLogger
    show_phase: Callable[[str], None] | None
    wandb_run_id: str | None


def open_run_log(
    args: Config, *, total_steps: int, resumed_at: int | None, wandb_run_id: str | None
) -> RunLog:
    """Open them, going on after step ``resumed_at`` where one is given.

    Raises:
        ValueError: a sink cannot be opened.
    """
    output = Path(args.output_dir)
    sinks: list[MetricSink] = [Jsonl(output / METRICS_FILE, resumed_at)]
    if args.logger.tensorboard_dir is not None:
        sinks.append(TensorBoard(args.logger.tensorboard_dir, resumed_at))
    run_id = None
    if args.logger.wandb.project is not None:
        wandb = Wandb(args.logger.wandb, output, dataclasses.asdict(args), wandb_run_id)
        sinks.append(wandb)
        run_id = wandb.run_id
    show_phase = None
    if args.logger.console:
        console = Console(total_steps, resumed_at or 0)
        sinks.append(console)
        show_phase = console.show_phase
    return RunLog(MetricLogger(sinks), show_phase, run_id)
