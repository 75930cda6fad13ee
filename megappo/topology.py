"""Rank arithmetic of the mesh: rank <-> (pipeline stage, data-parallel replica, tensor rank).

Pure integers; no process groups, no ``torch.distributed``. The order of ranks is
Megatron-Core's default (``tp-cp-ep-dp-pp``): tensor ranks are neighbours, pipeline stages
are furthest apart. Experts are spread over neighbouring ranks of a stage, across tensor ranks
and replicas alike; one expert is never cut (expert tensor parallel size 1).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Coordinates:
    """Position of a rank on the mesh, each 0-based."""

    pp: int
    dp: int
    tp: int


@dataclass(frozen=True)
class Topology:
    """A mesh of ``world_size`` ranks and its parallel sizes.

    Attributes:
        world_size: Number of ranks.
        tp: Tensor-parallel size.
        pp: Pipeline stages.
        ep: Expert-parallel size: ranks of a stage over which the experts are spread.
        vpp: Model chunks of each stage (virtual pipeline size); layers go round the stages
            this many times.

    Raises:
        ValueError: when sizes do not fit into each other, or one is below 1.
    """

    world_size: int
    tp: int = 1
    pp: int = 1
    ep: int = 1
    vpp: int = 1

    def __post_init__(self) -> None:
        if min(self.world_size, self.tp, self.pp, self.ep, self.vpp) < 1:
            raise ValueError(f"parallel sizes must be at least 1, got {self}")
        if self.world_size % (self.tp * self.pp):
            raise ValueError(
                f"megatron.world_size = {self.world_size} is not a multiple of "
                f"tensor_model_parallel_size x pipeline_model_parallel_size = "
                f"{self.tp} x {self.pp} = {self.tp * self.pp}"
            )
        if self.world_size // self.pp % self.ep:
            raise ValueError(
                f"megatron.expert_model_parallel_size = {self.ep} does not divide the "
                f"{self.world_size // self.pp} ranks of a pipeline stage (megatron.world_size / "
                f"pipeline_model_parallel_size = {self.world_size} / {self.pp})"
            )
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(
                f"megatron.virtual_pipeline_model_parallel_size = {self.vpp} needs "
                "pipeline_model_parallel_size > 1"
            )

    @property
    def dp(self) -> int:
        """Number of data-parallel replicas."""
        return self.world_size // (self.tp * self.pp)

    def coordinates(self, rank: int) -> Coordinates:
        """Position of ``rank``."""
        assert 0 <= rank < self.world_size, (rank, self)
        return Coordinates(
            pp=rank // (self.tp * self.dp), dp=rank // self.tp % self.dp, tp=rank % self.tp
        )

    def rank(self, pp: int, dp: int, tp: int) -> int:
        """Rank at a position."""
        return tp + self.tp * (dp + self.dp * pp)

    def replica_ranks(self, dp: int) -> list[int]:
        """All ranks of a replica, in rank order."""
        return [self.rank(p, dp, t) for p in range(self.pp) for t in range(self.tp)]

    def stage_ranks(self, pp: int, dp: int) -> list[int]:
        """The tensor-parallel ranks of one stage of one replica."""
        return [self.rank(pp, dp, t) for t in range(self.tp)]

    def tensor_ranks(self, pp: int, tp: int) -> list[int]:
        """The ranks that hold the same dense weights: one tensor rank of a stage's replicas."""
        return [self.rank(pp, d, tp) for d in range(self.dp)]

    def expert_ranks(self, pp: int, ep: int) -> list[int]:
        """The ranks of a stage that hold the ``ep``-th share of its experts."""
        first = self.rank(pp, 0, 0)
        return list(range(first + ep, first + self.tp * self.dp, self.ep))

    def layers(self, num_layers: int, pp: int, chunk: int = 0) -> range:
        """The model's layers that a chunk of a stage holds; the first chunks take what is over.

        Raises:
            ValueError: when there are more chunks than layers.
        """
        num_chunks = self.pp * self.vpp
        if num_layers < num_chunks:
            raise ValueError(
                f"megatron.pipeline_model_parallel_size x virtual_pipeline_model_parallel_size = "
                f"{self.pp} x {self.vpp} is more than the model's num_hidden_layers = {num_layers}"
            )
        each, over = divmod(num_layers, num_chunks)
        index = chunk * self.pp + pp
        start = index * each + min(index, over)
        return range(start, start + each + (index < over))

    def output_rank(self, dp: int) -> int:
        """The rank that answers for a replica: tensor rank 0 of its last stage."""
        return self.rank(self.pp - 1, dp, 0)

    def is_first_stage(self, rank: int) -> bool:
        """Whether ``rank`` embeds tokens."""
        return self.coordinates(rank).pp == 0

    def is_last_stage(self, rank: int) -> bool:
        """Whether ``rank`` computes logits, values and losses."""
        return self.coordinates(rank).pp == self.pp - 1
