"""What surrounds the loop: resume, signals, logs, samples, evaluation, checkpoints, export.

A ``Session`` lives for one ``fit``. It holds the run's position and says when to do what;
the trainer says how the phases of PPO go.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console

from megappo.checkpoint.run_state import RunState, write_run_state
from megappo.metrics.memory import write_memory_table
from megappo.metrics.samples import forget_samples
from megappo.records import Prompt, StepMetrics
from megappo.trainer.report import SAMPLES, StepReport, keep_samples
from megappo.trainer.resume import changed_keys, checkpoint_store, resume_point
from megappo.trainer.run_log import RunLog, open_run_log
from megappo.trainer.scoring import ScoredBatch
from megappo.trainer.stopping import StopSignal

if TYPE_CHECKING:
    from megappo.trainer.ppo_trainer import PPOTrainer

logger = logging.getLogger(__name__)


class Session:
    """Position and surroundings of one ``fit``.

    Args:
        trainer: whose run it is.
        consumed_samples: prompts to skip; 0 when a checkpoint is resumed.
        max_steps_per_episode: most steps per episode, or None.

    Attributes:
        step: PPO steps done.
        stop: whether a signal asked to stop.
        metrics: metrics of the last step.

    Raises:
        ValueError: ``consumed_samples`` is given with a checkpoint, or lies outside the run.
    """

    def __init__(
        self, trainer: PPOTrainer, consumed_samples: int, max_steps_per_episode: int | None
    ) -> None:
        args = trainer.args
        self._trainer = trainer
        self._args = args
        self._output = Path(args.output_dir).resolve()  # ranks may have another working folder
        self._store = checkpoint_store(args)
        self.stop = StopSignal()
        self.metrics: dict[str, float] = {}
        point = resume_point(args)
        self._checkpoint = None if point is None else point.folder
        self._changed = [] if point is None else changed_keys(point.state, args)
        state = None if point is None else point.state
        if state is not None and consumed_samples:
            raise ValueError(
                f"consumed_samples = {consumed_samples} was given, but {self._checkpoint} says "
                f"{state.consumed_samples}: leave it 0 to resume, or set ckpt.load_enable to false"
            )
        self.step = state.step if state else 0
        self._consumed = state.consumed_samples if state else consumed_samples
        self._saved_step = self.step if state else None
        self._wandb_run_id = state.wandb_run_id if state else None
        if state is not None:
            trainer.kl.load_state_dict({"kl_coef": state.kl_coef})
            trainer.rewards.load(state.reward_moments)
        self._stream = trainer.inputs.stream(
            args, consumed=self._consumed, max_steps_per_episode=max_steps_per_episode
        )
        limit = args.train.max_steps
        steps = self.step + self._stream.num_steps_left
        self.total_steps = steps if limit is None else min(steps, limit)

    def __enter__(self) -> Session:
        with ExitStack() as stack:
            stack.enter_context(self.stop)
            self._output.mkdir(parents=True, exist_ok=True)
            self._show_memory()
            if self._checkpoint is not None:
                self._restore(self._checkpoint)
            forget_samples(self._output / SAMPLES, self.step)
            self._log: RunLog = open_run_log(
                self._args,
                total_steps=self.total_steps,
                resumed_at=None if self._checkpoint is None else self.step,
                wandb_run_id=self._wandb_run_id,
            )
            stack.callback(self._log.logger.close)
            self._exit = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._exit.close()

    def batches(self) -> Iterator[tuple[StepReport, list[Prompt]]]:
        """The steps that are left: the report of each (it knows its number) and its prompts."""
        while self.step < self.total_steps and not self.stop.requested:
            prompts = next(self._stream, None)
            if prompts is None:
                return
            yield StepReport(self.step + 1, self._log.show_phase), prompts

    def evaluate_before_first_step(self) -> None:
        """Evaluate the policy that the run starts from; a resumed run did it before."""
        if self._checkpoint is None:
            values = self._trainer.evaluate()
            if values:
                self._log.logger.log(StepMetrics(0, values))

    def finish_step(self, report: StepReport, scored: ScoredBatch) -> None:
        """Count the step, keep its samples, evaluate and save where due, log."""
        self.step = report.step
        self._consumed = self._stream.consumed
        keep_samples(self._output, self.step, scored)
        last = self.step == self.total_steps
        every = self._args.eval.steps
        if not self.stop.requested and (last or (every > 0 and self.step % every == 0)):
            with report.phase("evaluation"):
                report.values |= self._trainer.evaluate()
        every = self._args.ckpt.save_steps
        if self.stop.requested or (every > 0 and self.step % every == 0):
            with report.phase("save_checkpoint"):
                self.save()
        self.metrics = report.metrics()
        self._log.logger.log(StepMetrics(self.step, self.metrics))

    def finish(self) -> None:
        """Save what a signal interrupted, or export the final policy."""
        if not self.stop.requested:
            self._trainer.actor.broadcast("export_hf", str(self._output / "hf"))
        elif self._saved_step != self.step:
            self.save()

    def save(self) -> None:
        """Write a checkpoint of the run as it stands after the last whole step."""
        folder = self._store.begin(self.step).resolve()
        trainer = self._trainer
        for group in (trainer.actor, trainer.critic):
            if group is not None:
                group.broadcast("save", str(folder / group.target))
        (folder / "rng").mkdir()
        trainer.actor.broadcast("save_random_state", str(folder / "rng"))
        state = RunState(
            step=self.step,
            consumed_samples=self._consumed,
            kl_coef=trainer.kl.value,
            reward_moments=trainer.rewards.state(),
            wandb_run_id=self._log.wandb_run_id,
            config=dataclasses.asdict(self._args),
        )
        write_run_state(folder, state)
        self._store.commit(self.step)
        self._saved_step = self.step

    def _show_memory(self) -> None:
        """What the roles take on every rank, into the logs and onto the terminal."""
        [ranks, *_] = self._trainer.actor.broadcast("memory")
        table = write_memory_table(ranks, self._output / "logs")
        if self._args.logger.console:
            Console().print(table)

    def _restore(self, folder: Path) -> None:
        trainer = self._trainer
        for group in (trainer.actor, trainer.critic):
            if group is not None:
                group.broadcast("load", str((folder / group.target).resolve()))
        same = trainer.actor.broadcast("load_random_state", str((folder / "rng").resolve()))
        logger.warning(
            "resumed from %s: actor%s with optimizers, step %d, %d prompts consumed%s%s",
            folder,
            "" if trainer.critic is None else " and critic",
            self.step,
            self._consumed,
            "" if all(same) else "; random state is fresh (another number of ranks)",
            ""
            if not self._changed
            else f"; {', '.join(self._changed)} differ from the saved "
            "run's (learning rates, betas and schedules go on as saved)",
        )
