"""One rank of the mesh: its roles, its rollouts, and the phases of a PPO step on them.

The driver calls the phases on all ranks together, in this order: ``load_batch``,
``compute_log_probs`` and ``compute_values``, ``make_experience``, ``update`` for every
optimizer step and role, ``release_batch``. What a phase leaves on this rank (micro-batches,
log-probs, values, experience) stays here; only small records go back, the same on every rank.
A rank knows neither the engine nor the driver: rollouts appear in its ``store``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from megappo.device.platform import device, layer_implementation
from megappo.mesh import losses
from megappo.mesh.collectives import from_last_stage, is_last_stage, largest, summed
from megappo.mesh.exchange import load_micro_batches
from megappo.mesh.experience import NUM_SUMS, make_experience, to_metrics
from megappo.mesh.losses import LossTotals
from megappo.mesh.memory import role_memory, role_tensors
from megappo.mesh.offload import Offload, Swap
from megappo.mesh.reading import RewardReader
from megappo.mesh.role import Role
from megappo.mesh.schedule import Read, accumulate_gradients, evaluate
from megappo.mesh.scoring import dummy_batch, last_tokens, score_batches
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
from megappo.models.fp8 import TOKEN_MULTIPLE
from megappo.records import (
    BatchPlan,
    Experience,
    PackedBatch,
    RoleMemory,
    Rollouts,
    ScoreRequest,
)
from megappo.reshard.hf import export_hf
from megappo.topology import Topology


class MeshRank:
    """The roles of one rank and the rollout batch that is being trained on.

    The default process group must exist and span the mesh. One mesh per process.

    Args:
        rank: this rank.
        topology: the mesh.
        settings: what all roles share.
        token_group: the group that rollouts reach the mesh's ranks in, which are its first
            ranks; the default group if None.

    Attributes:
        store: rollouts that this rank holds, by the key of their request.
        roles: the models, by name.
        steps: micro-batches of the loaded batch, ``[step][i]``.
        experience: the same for experience, on last-stage ranks after ``make_experience``.
    """

    def __init__(
        self,
        rank: int,
        topology: Topology,
        settings: MeshSettings,
        token_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.rank = rank
        self.topology = topology
        self.settings = settings
        self.store: dict[str, Rollouts] = {}
        self.roles: dict[str, Role] = {}
        self._readers: dict[str, RewardReader] = {}
        self._offloads: dict[str, Offload] = {}
        self._swaps: dict[str, Swap] = {}
        self._hosts: dict[str, str] = {}  # the role in whose place one is
        self._memory: list[RoleMemory] = []
        self._token_group = token_group
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
        if settings.in_place_of is not None:
            assert settings.hf_dir == self.roles[settings.in_place_of].settings.hf_dir
            self._hosts[settings.name] = settings.in_place_of
            self._swaps[settings.name] = Swap(self.use(settings.in_place_of).tensors)
            self._memory.append(RoleMemory(settings.name, 0, 0, 0, 0))
            return
        self.rest()
        role = Role(self.rank, self.topology, self.settings, settings)
        self.roles[settings.name] = role
        self._memory.append(role_memory(role))
        if settings.offload:
            self._offloads[settings.name] = Offload(partial(role_tensors, role))
        if settings.reads != "tokens":
            self._readers[settings.name] = RewardReader(
                settings.hf_dir,
                vocab_size=role.shape.vocab_size,
                max_len=role.shape.max_position_embeddings,
                chat=settings.reads == "chat",
            )

    def use(self, name: str) -> Role:
        """A role with its tensors on the device; others that may leave it have left."""
        for other, offload in self._offloads.items():
            if other != name:
                offload.leave()
        if name in self._offloads:
            self._offloads[name].come_back()
        return self.roles[name]

    def rest(self) -> None:
        """Have all roles that may leave the device leave it: an engine is at work."""
        for offload in self._offloads.values():
            offload.leave()

    def score(self, request: ScoreRequest) -> list[list[float]]:
        """What every reward model says of this replica's samples.

        Returns:
            A list per model, in the order in which they were added, with a score per sample;
            the same on every rank of the replica.

        Raises:
            RewardError: a model cannot read a sample.
        """
        return [self._scores(role, request) for role in self._readers]

    def _scores(self, role: str, request: ScoreRequest) -> list[float]:
        sequences = self._readers[role](request.samples)
        multiple = self._multiple
        batches = score_batches(
            sequences, token_budget=request.token_budget, multiple=multiple, device=device()
        )
        # Experts meet tokens of all replicas, so that each runs as many micro-batches.
        count = torch.tensor(len(batches), device=device())
        most = int(largest(count))
        if most == 0:
            return []
        batches += [dummy_batch(multiple, device())] * (most - len(batches))
        found = evaluate(self.use(role).chunks, batches, last_tokens)
        scores = torch.zeros(len(sequences), device=device())
        if is_last_stage():
            for batch, values in zip(batches, found, strict=True):
                scores[batch.samples] = values
        told: list[float] = from_last_stage(scores).tolist()
        return told

    @property
    def _multiple(self) -> int:
        """What the length of a micro-batch is rounded up to a multiple of."""
        multiple = self.topology.tp if self.settings.sequence_parallel else 1
        made_of = layer_implementation(self.settings.implementation)
        if self.settings.fp8 is not None and made_of == "transformer_engine":
            multiple *= TOKEN_MULTIPLE
        return multiple

    def load_batch(self, plan: BatchPlan) -> None:
        """Fetch the tokens that this rank needs, rank to rank, and lay out its micro-batches.

        Raises:
            ValueError: a rank does not hold what the plan says.
        """
        self._forget()
        self._plan = plan
        self.steps = load_micro_batches(
            plan,
            self.store.get(plan.key),
            self.topology,
            self.rank,
            multiple=self._multiple,
            device=device(),
            group=self._token_group,
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
        host = self._hosts.get(role, role)
        with contextlib.ExitStack() as stack:
            if role in self._swaps:
                tensors = self.use(host).tensors
                stack.enter_context(self._swaps[role].in_place_of(tensors))
            self._log_probs[role] = self._evaluate(host, self.roles[host].log_probs)

    def compute_values(self, role: str) -> None:
        """Values of all tokens' states under a role, kept on last-stage ranks."""
        self._values = self._evaluate(role, self.roles[role].values)

    def _evaluate(self, role: str, read: Read) -> list[torch.Tensor]:
        batches = [batch for step in self.steps for batch in step]
        return evaluate(self.use(role).chunks, batches, read)

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
        target = self.use(role)
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
        target = self.use(role)
        assert target.settings.loss is not None, role
        grad_norm = target.step()
        return losses.to_metrics(totals, target.settings.loss, grad_norm, target.lr)

    def release_batch(self) -> None:
        """Forget the rollout batch: tokens, micro-batches, experience."""
        if self._plan is not None:
            self.store.pop(self._plan.key, None)
        self._forget()

    def memory(self) -> list[list[RoleMemory]]:
        """What every role takes on every rank of the mesh, the same on all of them.

        Of roles that may leave the device, what they take while they are on it.
        """
        everywhere: list[list[RoleMemory]] = [[]] * self.topology.world_size
        dist.all_gather_object(everywhere, self._memory)
        return everywhere

    def named_weights(self, role: str) -> Mapping[str, torch.Tensor]:
        """This rank's live parameters by the local names of ``roles[role].layout``."""
        return self.use(role).tensors

    def export_hf(self, role: str, out_dir: Path) -> None:
        """Write a role as a Hugging Face folder; all ranks call it together.

        Tokenizer and configuration are copied from the folder that the role came from.

        Raises:
            ValueError: the folders are not usable.
            OSError: a file cannot be written.
        """
        source = self.use(role)
        export_hf(
            source.layout, source.shape, self.rank, source.tensors, out_dir, source.settings.hf_dir
        )
