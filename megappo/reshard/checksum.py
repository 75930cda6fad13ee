"""Checksums of what was sent and what arrived: equal bits in equal order, or not.

Each copy of a plan is summed at both ends: the raw bits of its elements, in the type that
they arrive in, each times its place in the copy, modulo 2**64. A copy's sum is weighted with
a number of its own, added at the source and subtracted at the destination, so that over all
ranks a canonical tensor comes to zero exactly when nothing was changed, lost or swapped (but
for coincidences of about one in 2**63). Knows no process group.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from megappo.reshard.messages import Tensors
from megappo.weights.layout import Ints, box_index, split_box
from megappo.weights.plan import Plan

# Elements summed at a time: bounds the temporary memory, of 24 bytes per element.
CHUNK = 1024**2
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
SPREAD = 0x9E3779B97F4A7C15


def checksums(
    plan: Plan,
    rank: int,
    source: Tensors,
    destination: Tensors,
    types: Sequence[torch.dtype],
    device: torch.device,
) -> torch.Tensor:
    """This rank's part of the sum of every canonical tensor: int64 [C].

    Args:
        plan: What was carried out.
        rank: This rank.
        source: Its tensors by their index in the source layout.
        destination: Likewise in the destination layout.
        types: Dtype of every destination tensor, by index.
        device: Where the tensors are.
    """
    sums = torch.zeros(len(plan.destination.canonical_names), dtype=torch.int64, device=device)
    for copy in np.flatnonzero(plan.source_rank == rank):
        tensor = source[int(plan.source_local[copy])]
        dtype = types[plan.destination_local[copy]]
        part = _bits_sum(tensor, plan.source_start[copy], plan.extent[copy], dtype)
        sums[plan.canonical[copy]] += part * _weight(int(copy))
    for copy in np.flatnonzero(plan.destination_rank == rank):
        tensor = destination[int(plan.destination_local[copy])]
        part = _bits_sum(tensor, plan.destination_start[copy], plan.extent[copy], tensor.dtype)
        sums[plan.canonical[copy]] -= part * _weight(int(copy))
    return sums


def _weight(copy: int) -> int:
    """An odd number of the copy's own, as a signed 64-bit integer."""
    value = (2 * copy + 1) * SPREAD % 2**64
    return value - 2**64 if value >= 2**63 else value


def _bits_sum(tensor: torch.Tensor, start: Ints, extent: Ints, dtype: torch.dtype) -> torch.Tensor:
    """Sum of bits times places (from 1) over a box, as a 64-bit integer that wraps around."""
    result = torch.zeros((), dtype=torch.int64, device=tensor.device)
    place = 1
    for offset, part in zip(*split_box(extent, CHUNK), strict=True):
        box = tensor[box_index(start + offset, part, tensor.dim())]
        bits = box.to(dtype).reshape(-1).view(BITS[dtype.itemsize]).to(torch.int64)
        result += (bits * torch.arange(place, place + len(bits), device=tensor.device)).sum()
        place += len(bits)
    return result
