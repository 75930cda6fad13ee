"""Random ragged batches for the tests of the PPO mathematics."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import settings
from hypothesis import strategies as st

# The machine that runs the tests may be busy: no deadline. The same examples every time.
few_examples = settings(deadline=None, max_examples=40, derandomize=True)


@dataclass(frozen=True)
class Ragged:
    """Sequences end to end: lengths, offsets, a mask with gaps, and a generator for numbers."""

    lengths: list[int]
    cu_seqlens: torch.Tensor
    action_mask: torch.Tensor
    generator: torch.Generator

    @property
    def num_sequences(self) -> int:
        """Number of sequences, empty ones included."""
        return len(self.lengths)

    def normal(self) -> torch.Tensor:
        """One normally distributed float32 number per token."""
        return torch.randn(len(self.action_mask), generator=self.generator)

    def poisoned(self, per_token: torch.Tensor) -> torch.Tensor:
        """A copy that holds NaN wherever the token is no action."""
        return torch.where(self.action_mask, per_token, torch.nan)

    def sequences(self) -> list[range]:
        """Positions of each sequence's tokens."""
        offsets = self.cu_seqlens.tolist()
        return [range(a, b) for a, b in zip(offsets[:-1], offsets[1:], strict=True)]

    def actions(self) -> list[list[int]]:
        """Positions of each sequence's action tokens."""
        return [[t for t in tokens if self.action_mask[t]] for tokens in self.sequences()]


def make_ragged(masks: list[list[int]], seed: int = 0) -> Ragged:
    """A batch with the given action masks, one list per sequence."""
    lengths = [len(mask) for mask in masks]
    flat = [bool(entry) for mask in masks for entry in mask]
    return Ragged(
        lengths=lengths,
        cu_seqlens=torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32),
        action_mask=torch.tensor(flat, dtype=torch.bool),
        generator=torch.Generator().manual_seed(seed),
    )


ragged_batches = st.builds(
    make_ragged,
    st.lists(st.lists(st.sampled_from([0, 1, 1]), min_size=0, max_size=12), min_size=1, max_size=6),
    st.integers(0, 2**31),
)
