"""What log-probs and entropies of a large vocabulary cost, in time and memory.

    python -m benchmarks.log_probs --tokens 4096 --vocab 128k --chunk-tokens 1024

prints one JSON line. Forward and backward pass from bf16 logits to their gradient, in turns,
each in children forked after the imports and after the logits were made:

- megappo's, in chunks of tokens, on ``--tp`` gloo ranks that hold their columns of the logits;
- ``full_``: a plain float32 softmax of all logits in torch, on one rank (``--no-full`` leaves
  it out).

Seconds are medians over ``--runs``, CPU seconds those of all ranks. Memory is the peak of
anonymous memory beyond the logits, worst rank. ``gradient_mb`` of it is the logits' gradient,
which is a result; ``chunk_mb`` is one chunk in float32, ``full_mb`` all logits of a rank.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from statistics import median

import torch
import torch.distributed as dist

from benchmarks.child import Usage, Watch, measured
from benchmarks.gloo_ranks import run_ranks
from megappo.models.log_probs import log_probs_and_entropy

TEMPERATURE = 0.7
FEW = 64


def tokens_of(text: str) -> int:
    """A number, in thousands of 1,024 where it ends in k."""
    return int(text[:-1]) * 1024 if text.endswith("k") else int(text)


def ours(
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab: int,
    chunk_tokens: int,
    group: dist.ProcessGroup | None,
) -> tuple[torch.Tensor, ...]:
    """Log-probs, entropies [T] and the gradient of a sum of both, [T, V]."""
    leaf = logits.detach().requires_grad_()
    log_probs, entropy = log_probs_and_entropy(
        leaf,
        labels,
        temperature=TEMPERATURE,
        vocab_size=vocab,
        tp_group=group,
        tp_rank=0 if group is None else group.rank(),
        chunk_tokens=chunk_tokens,
        with_entropy=True,
    )
    assert entropy is not None
    (gradient,) = torch.autograd.grad(log_probs.sum() + 0.5 * entropy.sum(), leaf)
    return log_probs, entropy, gradient


def full(logits: torch.Tensor, labels: torch.Tensor, vocab: int) -> tuple[torch.Tensor, ...]:
    """The same by torch's softmax in float32."""
    leaf = logits.detach().requires_grad_()
    log_softmax = torch.log_softmax(leaf[:, :vocab].float() / TEMPERATURE, dim=-1)
    log_probs = log_softmax.gather(1, labels[:, None]).squeeze(1)
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    (gradient,) = torch.autograd.grad(log_probs.sum() + 0.5 * entropy.sum(), leaf)
    return log_probs, entropy, gradient


def on_rank(
    rank: int, columns: Sequence[torch.Tensor], labels: torch.Tensor, vocab: int, chunk: int
) -> Usage:
    """One rank's usage; a first pass over few tokens sets up threads and connections."""
    group = dist.group.WORLD if len(columns) > 1 else None
    ours(columns[rank][:FEW], labels[:FEW], vocab, chunk, group)
    dist.barrier()
    with Watch() as watch:
        kept = ours(columns[rank], labels, vocab, chunk, group)
    del kept
    return watch.usage


def check(logits: torch.Tensor, labels: torch.Tensor, vocab: int, chunk: int) -> None:
    """Both agree on a few tokens, values to 2e-5 (log-probs of a dozen, in float32)."""
    few = logits[:FEW], labels[:FEW], vocab
    found, expected = ours(*few, chunk, None), full(*few)
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=2**-7, atol=2e-5)


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.log_probs", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--tokens", type=tokens_of, default=4096)
    parser.add_argument("--vocab", type=tokens_of, default="128k")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--chunk-tokens", type=int, default=1024)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--no-full", action="store_true", help="without the full softmax")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    width = -(-args.vocab // args.tp)
    # Drawn in place: memory that a temporary leaves to the allocator would not count.
    columns = [torch.empty(args.tokens, width, dtype=torch.bfloat16) for _ in range(args.tp)]
    for column in columns:
        column.normal_(0, 3)
    labels = torch.randint(args.vocab, (args.tokens,))
    measured(
        check, torch.cat([c[:FEW] for c in columns], dim=1), labels, args.vocab, args.chunk_tokens
    )
    runs: list[list[Usage]] = []
    full_runs: list[Usage] = []
    for _ in range(args.runs):
        runs.append(run_ranks(args.tp, on_rank, columns, labels, args.vocab, args.chunk_tokens))
        if not args.no_full:
            full_runs.append(measured(_full_of_columns, columns, labels, args.vocab))
    elements = args.tokens * width
    line: dict[str, object] = {
        "tokens": args.tokens,
        "vocab": args.vocab,
        "tp": args.tp,
        "chunk_tokens": args.chunk_tokens,
        "seconds": round(median(max(u.seconds for u in run) for run in runs), 3),
        "cpu_seconds": round(median(sum(u.cpu_seconds for u in run) for run in runs), 3),
        "peak_mb": round(max(u.peak_anonymous_bytes for run in runs for u in run) / 1e6, 1),
        "gradient_mb": round(2 * elements / 1e6, 1),
        "chunk_mb": round(4 * min(args.chunk_tokens, args.tokens) * width / 1e6, 1),
        "full_mb": round(4 * elements / 1e6, 1),
    }
    if full_runs:
        line["full_seconds"] = round(median(u.seconds for u in full_runs), 3)
        line["full_cpu_seconds"] = round(median(u.cpu_seconds for u in full_runs), 3)
        line["full_peak_mb"] = round(max(u.peak_anonymous_bytes for u in full_runs) / 1e6, 1)
    print(json.dumps(line))


def _full_of_columns(
    columns: Sequence[torch.Tensor], labels: torch.Tensor, vocab: int
) -> tuple[torch.Tensor, ...]:
    return full(columns[0] if len(columns) == 1 else torch.cat(list(columns), 1), labels, vocab)


if __name__ == "__main__":
    main()
