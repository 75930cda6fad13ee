"""Rank arithmetic of the 3D mesh: rank <-> (pipeline stage, data-parallel replica, tensor rank).

Pure integers; no process groups, no ``torch.distributed``. The order of ranks is
Megatron-Core's default (``tp-cp-ep-dp-pp``): tensor ranks are neighbours, pipeline stages
are furthest apart.
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
    """A mesh of ``world_size`` ranks with tensor- and pipeline-parallel sizes.

    Raises:
        ValueError: when ``tp * pp`` does not divide ``world_size`` or a size is below 1.
    """

    world_size: int
    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        if min(self.world_size, self.tp, self.pp) < 1:
            raise ValueError(f"parallel sizes must be at least 1, got {self}")
        if self.world_size % (self.tp * self.pp):
            raise ValueError(
                f"megatron.world_size = {self.world_size} is not a multiple of "
                f"tensor_model_parallel_size x pipeline_model_parallel_size = "
                f"{self.tp} x {self.pp} = {self.tp * self.pp}"
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

    def output_rank(self, dp: int) -> int:
        """The rank that answers for a replica: tensor rank 0 of its last stage."""
        return self.rank(self.pp - 1, dp, 0)

    def is_first_stage(self, rank: int) -> bool:
        """Whether ``rank`` embeds tokens."""
        return self.coordinates(rank).pp == 0

    def is_last_stage(self, rank: int) -> bool:
        """Whether ``rank`` computes logits, values and losses."""
        return self.coordinates(rank).pp == self.pp - 1
