"""Which optimizer step, replica and micro-batch each sample goes to.

Pure arithmetic on lengths, done once per rollout batch by the driver. The optimizer step
depends on the seed alone, never on the number of replicas or the token budget, so neither
changes the mathematics. Replicas are balanced by tokens, and so are the micro-batches of a
replica. All replicas get the same number of micro-batches, because each one is a collective
for all: a replica that has nothing left runs an empty one. Where balanced replicas need more
micro-batches than the tokens of the step would fill, those of all replicas are packed together
and then dealt out, if the replicas stay within a tolerance.

Does not know tokens, ranks' stores or advantages.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megappo.data.partition import even_bins, even_groups, few_bins, loads
from megappo.records import BatchPlan

_Ints = npt.NDArray[np.int64]

TOLERANCE = 1.05
"""Most tokens of a replica, to the mean, that are taken for one micro-batch less."""


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
        placed = _place_step(lengths[members], num_replicas, token_budget)
        replicas[members], micro_batches[members], counts[step] = placed
    return replicas, micro_batches, counts


def _place_step(lengths: _Ints, num_replicas: int, token_budget: int) -> tuple[_Ints, _Ints, int]:
    """Replica and micro-batch of each sample of a step, and the count of micro-batches."""
    replicas = even_bins(lengths, num_replicas)
    shares = [np.flatnonzero(replicas == replica) for replica in range(num_replicas)]
    fewest = max(1, -(-int(lengths.sum()) // (num_replicas * token_budget)))
    fits = [_fit(lengths[share], token_budget, fewest) for share in shares]
    count = max(used for _, used in fits)
    most = max(
        int(loads(lengths, replicas, num_replicas).max()),
        int(lengths.sum() * TOLERANCE / num_replicas),
    )
    for fewer in range(fewest, count):
        whole = _fit_whole(lengths, num_replicas, token_budget, fewer, most)
        if whole is not None:
            return *whole, fewer
    micro_batches = np.empty(len(lengths), np.int64)
    for share, (fit, _) in zip(shares, fits, strict=True):
        even = even_bins(lengths[share], count)
        within = loads(lengths[share], even, count).max() <= token_budget
        micro_batches[share] = even if within else fit
    return replicas, micro_batches, count


def _fit(lengths: _Ints, budget: int, fewest: int) -> tuple[_Ints, int]:
    """Micro-batch of each sample within the budget, and how many: ``fewest`` if even ones fit."""
    even = even_bins(lengths, fewest)
    if loads(lengths, even, fewest).max() <= budget:
        return even, fewest
    fit = few_bins(lengths, budget)
    return fit, int(fit.max()) + 1


def _fit_whole(
    lengths: _Ints, num_replicas: int, budget: int, count: int, most: int
) -> tuple[_Ints, _Ints] | None:
    """Replica and micro-batch of each sample, from micro-batches of all replicas together.

    None if ``count`` a replica do not hold the samples, or some replica's would exceed ``most``.
    """
    fit, used = _fit(lengths, budget, count * num_replicas)
    if used > count * num_replicas:
        return None
    sums = loads(lengths, fit, count * num_replicas)
    replica_of = even_groups(sums, num_replicas)
    if loads(sums, replica_of, num_replicas).max() > most:
        return None
    # Micro-batches of a replica are numbered in the order that they have among all.
    index_of = np.empty(len(sums), np.int64)
    index_of[np.argsort(replica_of, kind="stable")] = np.tile(np.arange(count), num_replicas)
    return replica_of[fit], index_of[fit]


def _check_budget(prompts: _Ints, responses: _Ints, token_budget: int) -> None:
    lengths = prompts + responses
    if len(lengths) and lengths.max() > token_budget:
        longest = int(lengths.argmax())
        raise ValueError(
            f"a sample of {lengths[longest]} tokens (prompt {prompts[longest]} + response "
            f"{responses[longest]}) does not fit train.max_tokens_per_gpu = {token_budget}; "
            "raise it to at least data.max_len"
        )
