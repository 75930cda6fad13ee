"""What tests of model parity share: sequences, micro-batches of them, and whole logits.

The sequences are the same in every process, so ranks and the parent agree on them without
sending any. Nothing here knows a model family or a mesh.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megappo.records import PackedBatch

LENGTHS = (5, 9, 9, 17, 23)
VOCAB = 101


def sequences() -> list[torch.Tensor]:
    """Unequal random sequences, two neighbours of equal length among them."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(4, VOCAB, (n,), generator=generator) for n in LENGTHS]


def pack(parts: list[torch.Tensor]) -> PackedBatch:
    """One micro-batch; a dummy tail makes its length divisible, as sequence parallelism needs."""
    real = len(parts)
    if tail := -sum(map(len, parts)) % 4:
        parts = [*parts, torch.zeros(tail, dtype=torch.int64)]
    tokens = torch.cat(parts)
    return PackedBatch(
        tokens=tokens,
        cu_seqlens=torch.tensor([0, *map(len, parts)]).cumsum(0).int(),
        action_mask=torch.zeros(len(tokens), dtype=torch.bool),
        engine_log_probs=torch.zeros(len(tokens)),
        samples=torch.arange(real),
    )


def whole_logits(logits: torch.Tensor) -> torch.Tensor:
    """Logits of the whole padded vocabulary, from the tensor ranks' columns."""
    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(logits) for _ in range(group.size())]
    dist.all_gather(parts, logits.contiguous(), group=group)
    return torch.cat(parts, dim=-1)
