"""Which optimizer step, replica and micro-batch each sample goes to.

Pure arithmetic on lengths, done once per rollout batch by the driver. The optimizer step
depends on the seed alone, never on the number of replicas or the token budget, so neither
changes the mathematics. Replicas are balanced by tokens with the longest-processing-time
rule (longest sample first, to the least loaded), and so are the micro-batches of a replica.
All replicas get the same number of micro-batches, because each one is a collective for all:
a replica that has nothing left runs an empty one.

Does not know tokens, ranks' stores or advantages.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megappo.records import BatchPlan

_Ints = npt.NDArray[np.int64]


def plan_batch(
    *,
    key: str,
    sample_ids: Sequence[int] | _Ints,
    prompt_lens: Sequence[int] | _Ints,
    response_lens: Sequence[int] | _Ints,
    holder_ranks: Sequence[int] | _Ints,
    scores: Sequence[float] | npt.NDArray[np.float32],
    train_batch_size: int,
    num_replicas: int,
    token_budget: int,
    seed: int,
) -> BatchPlan:
    """Plan one rollout batch of N samples; the same arguments give the same plan.

    Args:
        key: store key of the rollouts.
        sample_ids: [N], unique.
        prompt_lens: [N], tokens.
        response_lens: [N], tokens; 0 for an empty response, which is planned like any other.
        holder_ranks: [N], mesh rank that holds each sample's tokens.
        scores: [N].
        train_batch_size: samples per optimizer step over all replicas; the last step takes
            what is left.
        num_replicas: data-parallel size.
        token_budget: most tokens in a micro-batch.
        seed: of the assignment to optimizer steps; differs from batch to batch.

    Raises:
        ValueError: if a sample alone is longer than the budget, or a size is below 1.
    """
    if train_batch_size < 1:
        raise ValueError(f"train.batch_size = {train_batch_size}, wanted at least 1")
    prompts = np.asarray(prompt_lens, np.int64)
    responses = np.asarray(response_lens, np.int64)
    lengths = prompts + responses
    num_samples = len(lengths)
    _check_budget(prompts, responses, token_budget)

    steps = _assign_steps(num_samples, train_batch_size, seed)
    replicas, micro_batches, counts = _place(lengths, steps, num_replicas, token_budget)
    plan = BatchPlan(
        key=key,
        sample_ids=np.asarray(sample_ids, np.int64),
        prompt_lens=prompts,
        response_lens=responses,
        holder_ranks=np.asarray(holder_ranks, np.int64),
        scores=np.asarray(scores, np.float32),
        steps=steps,
        replicas=replicas,
        micro_batches=micro_batches,
        num_micro_batches=counts,
    )
    columns = (plan.sample_ids, plan.holder_ranks, plan.scores, responses)
    assert all(len(column) == num_samples for column in columns), "columns differ in length"
    assert len(np.unique(plan.sample_ids)) == num_samples, "sample ids repeat"
    return plan


def _assign_steps(num_samples: int, train_batch_size: int, seed: int) -> _Ints:
    """Optimizer step of each sample, drawn from the seed and the counts alone."""
    order = np.random.default_rng(seed).permutation(num_samples)
    steps = np.empty(num_samples, np.int64)
    steps[order] = np.arange(num_samples) // train_batch_size
    return steps


def _place(
    lengths: _Ints, steps: _Ints, num_replicas: int, token_budget: int
) -> tuple[_Ints, _Ints, _Ints]:
    """Replica [N] and micro-batch [N] of each sample, and micro-batches of each step."""
    replicas = np.empty(len(lengths), np.int64)
    micro_batches = np.empty(len(lengths), np.int64)
    counts = np.empty(int(steps.max(initial=-1)) + 1, np.int64)
    for step in range(len(counts)):
        members = np.flatnonzero(steps == step)
        replicas[members] = _balance(lengths[members], num_replicas)
        shares = [members[replicas[members] == replica] for replica in range(num_replicas)]
        fits = [_first_fit(lengths[share], token_budget) for share in shares]
        counts[step] = max(int(fit.max(initial=0)) + 1 for fit in fits)
        for share, fit in zip(shares, fits, strict=True):
            micro_batches[share] = _fill(lengths[share], int(counts[step]), token_budget, fit)
    return replicas, micro_batches, counts


def _check_budget(prompts: _Ints, responses: _Ints, token_budget: int) -> None:
    lengths = prompts + responses
    if len(lengths) and lengths.max() > token_budget:
        longest = int(lengths.argmax())
        raise ValueError(
            f"a sample of {lengths[longest]} tokens (prompt {prompts[longest]} + response "
            f"{responses[longest]}) does not fit train.max_tokens_per_gpu = {token_budget}; "
            "raise it to at least data.max_len"
        )


def _balance(lengths: _Ints, num_bins: int) -> _Ints:
    """Bin of each sample: longest first, each to the bin with the fewest tokens so far."""
    bins = np.empty(len(lengths), np.int64)
    heap = [(0, 0, index) for index in range(num_bins)]  # tokens, samples, bin
    for item in np.argsort(-lengths, kind="stable"):
        tokens, samples, index = heap[0]
        bins[item] = index
        heapq.heapreplace(heap, (tokens + int(lengths[item]), samples + 1, index))
    return bins


def _first_fit(lengths: _Ints, budget: int) -> _Ints:
    """Bin of each sample: longest first, each to the first bin that has room for it."""
    bins = np.empty(len(lengths), np.int64)
    room: list[int] = []
    for item in np.argsort(-lengths, kind="stable"):
        length = int(lengths[item])
        index = next((i for i, free in enumerate(room) if free >= length), len(room))
        if index == len(room):
            room.append(budget)
        room[index] -= length
        bins[item] = index
    return bins


def _fill(lengths: _Ints, num_bins: int, budget: int, fit: _Ints) -> _Ints:
    """Even bins within the budget; ``fit``, which keeps it with no more bins, where they do not."""
    even = _balance(lengths, num_bins)
    loads = np.bincount(even, weights=lengths, minlength=num_bins)
    return even if loads.max(initial=0) <= budget else fit
