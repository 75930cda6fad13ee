"""How fast attention over packed sequences is on CPU, beside torch's own on a padded batch.

    python -m benchmarks.attention --sequences 8 --length 512

prints one JSON line. Forward and backward pass of one layer's core, in turns in one process:
``megappo.models.attention`` on sequences end to end, and ``scaled_dot_product_attention`` on
[sequences, length], as a trainer with padding calls it. First with equal lengths, where there
is nothing to pad and both do the same work, then with lengths spread evenly up to ``--length``
(``spread_``). Seconds are those of the CPU, medians over ``--runs``; a ratio is the median of
those of each turn, ours to padded.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from torch.nn import functional

from megappo.models.attention import PackedAttention

Way = Callable[[], tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class Heads:
    """Sizes of a layer's attention."""

    query: int
    key_value: int
    dim: int


def packed(heads: Heads, lengths: Sequence[int], tensors: Sequence[torch.Tensor]) -> Way:
    """Ours, on query, key, value and output gradient [T, heads, dim]."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=heads.query * heads.dim,
        num_attention_heads=heads.query,
        cuda_graph_scope=[],
    )
    core = PackedAttention(config, layer_number=1)
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)
    *leaves, upstream = tensors
    q, k, v = (x.detach().requires_grad_() for x in leaves)

    def run() -> tuple[torch.Tensor, ...]:
        output = core(q, k, v, None, packed_seq_params=params)
        return (output, *torch.autograd.grad(output, (q, k, v), upstream.flatten(1)))

    return run


def padded(tensors: Sequence[torch.Tensor]) -> Way:
    """torch's, on query, key, value and output gradient [S, L, heads, dim]."""
    *leaves, upstream = tensors
    q, k, v = (x.detach().requires_grad_() for x in leaves)

    def run() -> tuple[torch.Tensor, ...]:
        transposed = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        output = functional.scaled_dot_product_attention(
            transposed[0], transposed[1], transposed[2], is_causal=True, enable_gqa=True
        )
        output = output.transpose(1, 2).flatten(2)
        return (output, *torch.autograd.grad(output, (q, k, v), upstream.flatten(2)))

    return run


def compare(heads: Heads, lengths: Sequence[int], runs: int) -> tuple[float, float, float]:
    """CPU seconds of ours and of padded, and the median of their ratios.

    Raises:
        AssertionError: they differ by more than 1e-5.
    """
    real = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    batch = [
        torch.randn(*real.shape, n, heads.dim) * real[..., None, None]
        for n in (heads.query, heads.key_value, heads.key_value, heads.query)
    ]
    ways = [packed(heads, lengths, [x[real] for x in batch]), padded(batch)]
    for ours, theirs in zip(*(way() for way in ways), strict=True):
        torch.testing.assert_close(ours, theirs[real].view_as(ours), rtol=0, atol=1e-5)
    times: list[list[float]] = [[], []]
    for turn in range(runs):
        for index in (0, 1) if turn % 2 else (1, 0):
            begin = time.process_time()
            ways[index]()
            times[index].append(time.process_time() - begin)
    ratio = median(ours / theirs for ours, theirs in zip(*times, strict=True))
    return median(times[0]), median(times[1]), ratio


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--runs", type=int, default=20)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    heads = Heads(args.heads, args.kv_heads, args.head_dim)
    count, length = args.sequences, args.length
    line: dict[str, object] = {
        name: vars(args)[name]
        for name in ("sequences", "length", "heads", "kv_heads", "head_dim", "runs")
    }
    spread = [-(-length * (i + 1) // count) for i in range(count)]
    for prefix, lengths in (("", [length] * count), ("spread_", spread)):
        ours, theirs, ratio = compare(heads, lengths, args.runs)
        line[f"{prefix}seconds"] = round(ours, 5)
        line[f"{prefix}padded_seconds"] = round(theirs, 5)
        line[f"{prefix}ratio"] = round(ratio, 3)
    print(json.dumps(line))


if __name__ == "__main__":
    main()
