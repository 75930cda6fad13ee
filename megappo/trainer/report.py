"""Collects what the phases of one step report and names it; the arithmetic is ``metrics/``'s.

The bridge between the records of the mesh and the names that users know from OpenRLHF.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from megappo.mesh.settings import ExperienceMetrics, UpdateMetrics
from megappo.metrics.aggregate import (
    eval_metrics,
    experience_metrics,
    rollout_metrics,
    throughput,
    update_metrics,
)
from megappo.metrics.samples import SampleRow, write_samples
from megappo.metrics.timers import StepTimer
from megappo.rewards.protocol import Score
from megappo.trainer.sampling import RolloutBatch
from megappo.trainer.scoring import ScoredBatch

TrainedRole = Literal["actor", "critic"]
ACTOR: TrainedRole = "actor"
CRITIC: TrainedRole = "critic"
SAMPLES = "samples"


class StepReport:
    """Metrics of one step, in the making.

    Args:
        step: number of the step, from 1.
        on_phase: called with the name of every phase that starts.

    Attributes:
        values: metrics so far, by name, without timings.
    """

    def __init__(self, step: int, on_phase: Callable[[str], None] | None = None) -> None:
        self.step = step
        self.values: dict[str, float] = {}
        self._timer = StepTimer(on_phase)
        self._updates: dict[TrainedRole, list[dict[str, float | None]]] = {ACTOR: [], CRITIC: []}
        self._throughput: Callable[[dict[str, float]], dict[str, float]] = lambda timing: {}

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Times the block as a phase."""
        return self._timer.phase(name)

    def add_updates(self, actor: UpdateMetrics | None, critic: UpdateMetrics | None) -> None:
        """Note one optimizer step of each role; None where a role took none."""
        for role, update in ((ACTOR, actor), (CRITIC, critic)):
            if update is not None:
                self._updates[role].append(asdict(update))

    def finish(self, scored: ScoredBatch, experience: ExperienceMetrics, kl_coef: float) -> None:
        """Add what the rollouts and the experience say."""
        rollouts = scored.rollouts
        self.values |= rollout_metrics(
            rollouts.samples,
            [score.reward for score in scored.rewards],
            [score.named for score in scored.rewards],
            [index // rollouts.n_samples_per_prompt for index in range(len(rollouts.samples))],
        )
        self.values |= experience_metrics(asdict(experience)) | {"train/kl_coef": kl_coef}
        for role, updates in self._updates.items():
            self.values |= update_metrics(role, updates)
        self._throughput = lambda timing: throughput(rollouts.samples, timing)

    def metrics(self) -> dict[str, float]:
        """All metrics of the step, timings included."""
        timing = self._timer.metrics()
        return self.values | timing | self._throughput(timing)


def evaluation_values(rollouts: RolloutBatch, scores: tuple[Score, ...]) -> dict[str, float]:
    """Metrics of an evaluation."""
    return eval_metrics(
        rollouts.samples, [score.reward for score in scores], [score.named for score in scores]
    )


def keep_samples(output_dir: Path, step: int, scored: ScoredBatch) -> None:
    """Write the step's responses to ``samples/step_N.jsonl``."""
    rollouts = scored.rollouts
    rows = [
        SampleRow(
            prompt_id=prompt.prompt_id,
            prompt=prompt.text,
            response=info.response,
            label=prompt.label,
            reward=score.reward,
            finish_reason=info.finish_reason,
            prompt_len=info.prompt_len,
            response_len=info.response_len,
            named=score.named,
        )
        for (prompt, info), score in zip(rollouts.answers(), scored.rewards, strict=True)
    ]
    write_samples(output_dir / SAMPLES, step, rows)
