"""One rank of the mesh: its roles, its rollouts, and the phases of a PPO step on them.

The driver calls the phases on all ranks together, in this order: ``load_batch``,
``compute_log_probs`` and ``compute_values``, ``make_experience``, ``update`` for every
optimizer step and role, ``release_batch``. What a phase leaves on this rank (micro-batches,
log-probs, values, experience) stays here; only small records go back, the same on every rank.
A rank knows neither the engine nor the driver: rollouts appear in its ``store``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from megappo.device.platform import device
from megappo.mesh import losses
from megappo.mesh.collectives import from_last_stage, is_last_stage, largest, summed
from megappo.mesh.exchange import load_micro_batches
from megappo.mesh.experience import NUM_SUMS, make_experience, to_metrics
from megappo.mesh.losses import LossTotals
from megappo.mesh.role import Role
from megappo.mesh.schedule import Read, accumulate_gradients, evaluate
from megappo.mesh.settings import (
    ACTOR,
    REF,
    ExperienceMetrics,
    ExperienceSettings,
    MeshSettings,
    RoleSettings,
    UpdateMetrics,
)
from megappo.models import parallel
from megappo.records import BatchPlan, Experience, PackedBatch, Rollouts
from megappo.reshard.hf import export_hf
from megappo.topology import Topology


class MeshRank:
    """The roles of one rank and the rollout batch that is being trained on.

    The default process group must exist and span the mesh. One mesh per process.

    Args:
        rank: this rank.
        topology: the mesh.
        settings: what all roles share.

    Attributes:
        store: what this rank's engine wrote, by the key of its request.
        roles: the models, by name.
        steps: micro-batches of the loaded batch, ``[step][i]``.
        experience: the same for experience, on last-stage ranks after ``make_experience``.
    """

    def __init__(self, rank: int, topology: Topology, settings: MeshSettings) -> None:
        self.rank = rank
        self.topology = topology
        self.settings = settings
        self.store: dict[str, Rollouts] = {}
        self.roles: dict[str, Role] = {}
        parallel.initialize(topology, settings.seed)
        self._forget()

    def _forget(self) -> None:
        self._plan: BatchPlan | None = None
        self.steps: list[list[PackedBatch]] = []
        self._action_tokens: list[int] = []
        self._log_probs: dict[str, list[torch.Tensor]] = {}
        self._values: list[torch.Tensor] | None = None
        self.experience: list[list[Experience]] = []

    def add_role(self, settings: RoleSettings) -> None:
        """Build a role and read its weights; a trainable one gets its optimizer.

        Raises:
            ValueError: the folder is not a usable checkpoint, or the mesh cannot cut it.
        """
        assert settings.name not in self.roles, settings.name
        self.roles[settings.name] = Role(self.rank, self.topology, self.settings, settings)

    def load_batch(self, plan: BatchPlan) -> None:
        """Fetch the tokens that this rank needs, rank to rank, and lay out its micro-batches.

        Raises:
            ValueError: a rank does not hold what the plan says.
        """
        self._forget()
        self._plan = plan
        tp = self.topology.tp
        self.steps = load_micro_batches(
            plan,
            self.store.get(plan.key),
            self.topology,
            self.rank,
            multiple=tp if self.settings.sequence_parallel else 1,
            device=device(),
        )
        counts = [sum(int(b.action_mask.sum()) for b in step) for step in self.steps]
        totals = torch.tensor(counts, dtype=torch.int64, device=device())
        if is_last_stage():
            summed(totals)
        self._action_tokens = from_last_stage(totals).tolist()

    def compute_log_probs(self, role: str) -> None:
        """Log-probs of all tokens under a role, kept on last-stage ranks.

        The actor's, computed before the first update, are the *old* log-probs of all epochs.
        """
        self._log_probs[role] = self._evaluate(role, self.roles[role].log_probs)

    def compute_values(self, role: str) -> None:
        """Values of all tokens' states under a role, kept on last-stage ranks."""
        self._values = self._evaluate(role, self.roles[role].values)

    def _evaluate(self, role: str, read: Read) -> list[torch.Tensor]:
        batches = [batch for step in self.steps for batch in step]
        return evaluate(self.roles[role].chunks, batches, read)

    def make_experience(self, settings: ExperienceSettings) -> ExperienceMetrics:
        """Advantages and returns from what was computed on this batch, and their statistics.

        Uses the actor's log-probs, the reference's if ``compute_log_probs("ref")`` was called,
        and the values if ``compute_values`` was. Whitening statistics are global.
        """
        assert self._plan is not None, "load_batch comes first"
        sums = torch.zeros(NUM_SUMS, dtype=torch.float64, device=device())
        maximum = torch.zeros(1, dtype=torch.float64, device=device())
        if is_last_stage():
            flat, sums, maximum = make_experience(
                [batch for step in self.steps for batch in step],
                self._log_probs[ACTOR],
                self._log_probs.get(REF),
                self._values,
                self._plan.scores,
                settings,
                summed,
            )
            summed(sums)
            largest(maximum)
            parts = iter(flat)
            self.experience = [[next(parts) for _ in step] for step in self.steps]
        has_values = self._values is not None
        return to_metrics(from_last_stage(sums), from_last_stage(maximum), has_values)

    def update(self, role: str, step_index: int) -> UpdateMetrics:
        """One optimizer step of a trainable role on one mini-batch of the plan.

        A step without a single action token on any replica is skipped.
        """
        tokens = self._action_tokens[step_index]
        if tokens == 0:
            return UpdateMetrics(skipped=True, num_action_tokens=0)
        totals = self.accumulate(role, step_index)
        return self.apply(role, totals)

    def accumulate(self, role: str, step_index: int) -> LossTotals:
        """First half of ``update``: leave the step's gradient in the role's buffers.

        The gradient is that of the mean over the step's action tokens, on all replicas.

        Returns:
            The loss statistics over all replicas, the same on every rank.
        """
        target = self.roles[role]
        batches = self.steps[step_index]

        def loss(output: torch.Tensor, index: int) -> tuple[torch.Tensor, LossTotals]:
            return target.loss(output, batches[index], self.experience[step_index][index])

        target.zero_gradients()
        totals = LossTotals.of(accumulate_gradients(target.chunks, batches, loss), device())
        if is_last_stage():
            summed(totals.sums)
            largest(totals.maximum)
        from_last_stage(totals.sums)
        from_last_stage(totals.maximum)
        return totals

    def apply(self, role: str, totals: LossTotals) -> UpdateMetrics:
        """Second half of ``update``: clip the gradient and step the optimizer."""
        target = self.roles[role]
        assert target.settings.loss is not None, role
        grad_norm = target.step()
        return losses.to_metrics(totals, target.settings.loss, grad_norm, target.lr)

    def release_batch(self) -> None:
        """Forget the rollout batch: tokens, micro-batches, experience."""
        if self._plan is not None:
            self.store.pop(self._plan.key, None)
        self._forget()

    def named_weights(self, role: str) -> Mapping[str, torch.Tensor]:
        """This rank's live parameters by the local names of ``roles[role].layout``."""
        return self.roles[role].tensors

    def export_hf(self, role: str, out_dir: Path) -> None:
        """Write a role as a Hugging Face folder; all ranks call it together.

        Tokenizer and configuration are copied from the folder that the role came from.

        Raises:
            ValueError: the folders are not usable.
            OSError: a file cannot be written.
        """
        source = self.roles[role]
        export_hf(
            source.layout, source.shape, self.rank, source.tensors, out_dir, source.settings.hf_dir
        )
