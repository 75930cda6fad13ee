"""The batch plan: every sample once, budgets kept, equal counts (C36, C37, C32's share)."""

from __future__ import annotations

from dataclasses import fields
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megappo.data.packing import plan_batch
from megappo.records import BatchPlan


def plan(prompt_lens: list[int], response_lens: list[int], **changes: Any) -> BatchPlan:
    """A plan of samples with ids 100, 101, ... held by rank 0."""
    count = len(prompt_lens)
    arguments: dict[str, Any] = dict(
        key="rollout",
        sample_ids=range(100, 100 + count),
        prompt_lens=prompt_lens,
        response_lens=response_lens,
        holder_ranks=[0] * count,
        scores=[0.5] * count,
        train_batch_size=4,
        num_replicas=2,
        token_budget=64,
        seed=3,
    )
    return plan_batch(**(arguments | changes))


def loads(made: BatchPlan, num_replicas: int) -> np.ndarray:
    """Tokens of every micro-batch: [steps, replicas, most micro-batches]."""
    out = np.zeros((made.num_steps, num_replicas, int(made.num_micro_batches.max(initial=0))), int)
    lengths = made.prompt_lens + made.response_lens
    np.add.at(out, (made.steps, made.replicas, made.micro_batches), lengths)
    return out


samples = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20)), min_size=0, max_size=40)


@given(
    samples=samples,
    train_batch_size=st.integers(1, 16),
    num_replicas=st.integers(1, 5),
    token_budget=st.integers(40, 120),
    seed=st.integers(0, 5),
)
def test_every_sample_once_within_the_budget(
    samples: list[tuple[int, int]],
    train_batch_size: int,
    num_replicas: int,
    token_budget: int,
    seed: int,
) -> None:
    """Each sample has one place; no micro-batch is too long; its count bounds its indices."""
    prompt_lens, response_lens = [p for p, _ in samples], [r for _, r in samples]
    sizes = dict(train_batch_size=train_batch_size, seed=seed)
    made = plan(
        prompt_lens, response_lens, num_replicas=num_replicas, token_budget=token_budget, **sizes
    )
    count = len(samples)
    assert made.num_steps == -(-count // train_batch_size)
    full, rest = divmod(count, train_batch_size)
    assert np.bincount(made.steps).tolist() == [train_batch_size] * full + [rest] * (rest > 0)
    assert np.all((made.replicas >= 0) & (made.replicas < num_replicas))
    assert np.all(made.num_micro_batches >= 1)
    assert np.all(made.micro_batches >= 0)
    assert np.all(made.micro_batches < made.num_micro_batches[made.steps])
    per_batch = loads(made, num_replicas)
    assert per_batch.sum() == sum(prompt_lens) + sum(response_lens)
    assert per_batch.max(initial=0) <= token_budget
    per_replica = per_batch.sum(axis=2)
    longest = max((p + r for p, r in samples), default=0)
    assert np.all(per_replica.max(axis=1) - per_replica.min(axis=1) <= longest)
    # Some replica needs them all: with best fit decreasing no two of its bins fit into one.
    needed = -(-per_replica.max(axis=1) // token_budget)
    assert np.all(made.num_micro_batches <= np.maximum(1, 2 * needed))

    other = plan(prompt_lens, response_lens, num_replicas=1, token_budget=1000, **sizes)
    assert np.array_equal(made.steps, other.steps)


def test_same_arguments_same_plan() -> None:
    """The plan repeats exactly, and another seed gives another one."""
    lens = list(range(1, 21)), list(range(20, 0, -1))
    first, again, other = plan(*lens), plan(*lens), plan(*lens, seed=4)
    for column in fields(BatchPlan):
        assert np.array_equal(getattr(first, column.name), getattr(again, column.name))
    assert not np.array_equal(first.steps, other.steps)
    assert first.sample_ids.tolist() == list(range(100, 120))
    assert first.scores.dtype == np.float32 and first.steps.dtype == np.int64


@pytest.mark.parametrize(
    ("lengths", "budget", "num_replicas", "counts"),
    [
        ([8, 8, 8, 8, 2, 2, 2, 2], 8, 2, 3),
        ([8, 8, 8, 8], 8, 2, 2),
        ([8, 8, 8, 8, 2], 8, 2, 3),
        ([8], 8, 2, 1),
        ([8, 8, 8], 8, 2, 2),
        ([2, 2], 8, 4, 1),
        ([5, 5, 5, 5, 5], 8, 3, 2),
    ],
)
def test_c37_equal_counts(lengths: list[int], budget: int, num_replicas: int, counts: int) -> None:
    """Replicas agree on the count, also where one has a single sample or none."""
    made = plan(
        lengths,
        [0] * len(lengths),
        token_budget=budget,
        num_replicas=num_replicas,
        train_batch_size=100,
    )
    assert made.num_micro_batches.tolist() == [counts]
    per_batch = loads(made, num_replicas)
    assert per_batch.shape == (1, num_replicas, counts)
    assert per_batch.max() <= budget


def test_c37_tokens_are_balanced_over_replicas_and_micro_batches() -> None:
    """8, 8, 8, 8 and 2, 2, 2, 2 are shared out evenly, not in the order they came."""
    per_replica = loads(
        plan([8, 8, 8, 8, 2, 2, 2, 2], [0] * 8, train_batch_size=8, token_budget=8), 2
    ).sum(axis=2)
    assert per_replica.tolist() == [[20, 20]]
    even = loads(plan([6, 5, 4, 3, 2, 1], [0] * 6, train_batch_size=6, num_replicas=1), 1)
    assert even.tolist() == [[[21]]]
    split = loads(
        plan([6, 6, 4, 4], [0] * 4, train_batch_size=6, num_replicas=1, token_budget=16), 1
    )
    assert split.tolist() == [[[10, 10]]]


def test_few_bins_where_even_bins_do_not_fit() -> None:
    """Three of 4 and two of 6 fit two bins of 12 only unevenly ordered: 6+6 and 4+4+4."""
    made = plan([6, 6, 4, 4, 4], [0] * 5, num_replicas=1, train_batch_size=5, token_budget=12)
    assert made.num_micro_batches.tolist() == [2]
    assert loads(made, 1).tolist() == [[[12, 12]]]


@pytest.mark.parametrize(
    ("count", "train_batch_size", "num_replicas", "steps"),
    [(5, 4, 2, 2), (1, 4, 2, 1), (5, 5, 4, 1), (9, 4, 3, 3), (3, 8, 8, 1), (4, 1, 2, 4)],
)
def test_c36_partial_last_batch(
    count: int, train_batch_size: int, num_replicas: int, steps: int
) -> None:
    """A last step with fewer samples than replicas is planned, with one count for all."""
    made = plan(
        [3] * count, [2] * count, train_batch_size=train_batch_size, num_replicas=num_replicas
    )
    assert made.num_steps == steps
    assert made.num_micro_batches.tolist() == [1] * steps
    assert np.bincount(made.steps).sum() == count


@pytest.mark.parametrize("responses", [[0, 3, 2, 5], [0, 0, 0, 0], [1, 0, 0, 0], [0]])
def test_c32_empty_responses_are_planned(responses: list[int]) -> None:
    """A sample without a response has a place like any other."""
    made = plan([4] * len(responses), responses)
    assert made.response_lens.tolist() == responses
    assert loads(made, 2).sum() == 4 * len(responses) + sum(responses)


def test_no_samples() -> None:
    """A batch from which all was filtered has no steps."""
    made = plan([], [])
    assert made.num_steps == 0 and len(made.sample_ids) == 0


@pytest.mark.parametrize(
    ("prompt", "response", "budget"), [(12, 8, 16), (65, 0, 64), (1, 64, 64), (3, 3, 5)]
)
def test_a_sample_longer_than_the_budget(prompt: int, response: int, budget: int) -> None:
    """It is refused with both numbers and the key."""
    with pytest.raises(
        ValueError,
        match=rf"{prompt + response} tokens \(prompt {prompt} \+ response {response}\) does not "
        f"fit train.max_tokens_per_gpu = {budget}",
    ):
        plan([1, prompt, 1], [1, response, 1], token_budget=budget)


def test_wrong_batch_size() -> None:
    """A batch size below 1 is refused by key."""
    with pytest.raises(ValueError, match="train.batch_size = 0"):
        plan([1], [1], train_batch_size=0)


def heavy_tailed(kind: str, count: int, shape: float, longest: int, seed: int) -> list[int]:
    """Lengths of 1 to ``longest`` tokens, log-normal (of that deviation) or Pareto (exponent)."""
    generator = np.random.default_rng(seed)
    if kind == "lognormal":
        drawn = generator.lognormal(np.log(longest / 16), shape, count)
    else:
        drawn = (generator.pareto(shape, count) + 1) * longest / 40
    return [int(length) for length in np.clip(drawn.astype(int) + 1, 1, longest)]


distributions = st.one_of(
    st.tuples(st.just("lognormal"), st.floats(0.5, 1.5)),
    st.tuples(st.just("pareto"), st.floats(1.0, 2.5)),
)


@settings(max_examples=60)
@given(
    distribution=distributions,
    num_replicas=st.sampled_from([1, 2, 4, 8, 16]),
    budget_to_longest=st.sampled_from([1, 2, 4, 16]),
    samples_per_replica=st.integers(16, 256),
    seed=st.integers(0, 10**6),
)
def test_heavy_tails_are_balanced_and_fill_as_few_micro_batches_as_can_be(
    distribution: tuple[str, float],
    num_replicas: int,
    budget_to_longest: int,
    samples_per_replica: int,
    seed: int,
) -> None:
    """Tokens of a replica to the mean at most 1.05, with 16 samples a replica or more.

    Micro-batches are at least 95 % full, or no fewer would hold the tokens.
    """
    budget = 4096 * budget_to_longest
    count = num_replicas * samples_per_replica
    lengths = heavy_tailed(distribution[0], count, distribution[1], 4096, seed)
    made = plan(
        lengths,
        [0] * count,
        train_batch_size=count,
        num_replicas=num_replicas,
        token_budget=budget,
    )
    per_replica = loads(made, num_replicas).sum(axis=2)[0]
    assert per_replica.max() <= 1.05 * max(per_replica.mean(), max(lengths))
    micro_batches = int(made.num_micro_batches[0])
    fill = sum(lengths) / (micro_batches * num_replicas * budget)
    fewest = -(-sum(lengths) // (num_replicas * budget))
    assert fill >= 0.95 or micro_batches == fewest


@settings(max_examples=16)
@given(
    distribution=distributions,
    num_replicas=st.sampled_from([1, 2, 4, 8, 16]),
    budget_to_longest=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 10**6),
)
def test_twenty_budgets_of_tokens_a_replica_fill_95_percent(
    distribution: tuple[str, float], num_replicas: int, budget_to_longest: int, seed: int
) -> None:
    """Enough tokens that rounding up to whole micro-batches does not cost 5 %."""
    budget = 4096 * budget_to_longest
    wanted = 20 * num_replicas * budget
    drawn = np.array(
        heavy_tailed(distribution[0], 40 * wanted // 4096, distribution[1], 4096, seed)
    )
    count = int(np.searchsorted(np.cumsum(drawn), wanted)) + 1
    assert count < len(drawn)
    made = plan(
        drawn[:count].tolist(),
        [0] * count,
        train_batch_size=count,
        num_replicas=num_replicas,
        token_budget=budget,
    )
    per_replica = loads(made, num_replicas).sum(axis=2)[0]
    assert per_replica.max() <= 1.05 * per_replica.mean()
    assert per_replica.mean() >= 0.95 * made.num_micro_batches[0] * budget


@given(
    samples=samples,
    num_replicas=st.integers(1, 4),
    token_budget=st.integers(40, 100),
    seed=st.integers(0, 5),
    shuffle=st.randoms(use_true_random=False),
)
def test_every_field_stays_with_its_sample(
    samples: list[tuple[int, int]], num_replicas: int, token_budget: int, seed: int, shuffle: Random
) -> None:
    """Length, holder, score and place are found under the id that they were given with."""
    ids = shuffle.sample(range(1000), len(samples))
    fields = {
        sample: (prompt, response, shuffle.randrange(8), shuffle.randrange(100) / 4)
        for sample, (prompt, response) in zip(ids, samples, strict=True)
    }
    made = plan(
        [p for p, _ in samples],
        [r for _, r in samples],
        sample_ids=ids,
        holder_ranks=[fields[sample][2] for sample in ids],
        scores=[fields[sample][3] for sample in ids],
        num_replicas=num_replicas,
        token_budget=token_budget,
        seed=seed,
    )
    columns = (made.prompt_lens, made.response_lens, made.holder_ranks, made.scores)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    assert dict(zip(made.sample_ids.tolist(), rows, strict=True)) == fields
    lengths = {sample: f[0] + f[1] for sample, f in fields.items()}
    packed: dict[tuple[int, int, int], int] = {}
    for sample, *place in zip(
        made.sample_ids.tolist(),
        made.steps.tolist(),
        made.replicas.tolist(),
        made.micro_batches.tolist(),
        strict=True,
    ):
        step, replica, index = place
        packed[step, replica, index] = packed.get((step, replica, index), 0) + lengths[sample]
    assert max(packed.values(), default=0) <= token_budget


def test_a_micro_batch_less_where_replicas_are_packed_together() -> None:
    """Differencing gives 12 and 10, one too many for a budget of 11; 6+5 and 4+4+3 fit."""
    made = plan([4, 6, 4, 3, 5], [0] * 5, train_batch_size=5, num_replicas=2, token_budget=11)
    assert made.num_micro_batches.tolist() == [1]
    assert loads(made, 2).tolist() == [[[11], [11]]]


def test_a_large_batch_is_planned_quickly_and_filled_well() -> None:
    """16k samples of skewed lengths over 64 replicas: micro-batches are over 80 % full."""
    lengths = np.minimum(np.random.default_rng(0).lognormal(6, 1, 16384).astype(int) + 1, 8192)
    made = plan(
        lengths.tolist(),
        [0] * len(lengths),
        train_batch_size=4096,
        num_replicas=64,
        token_budget=16384,
    )
    fill = lengths.sum() / (made.num_micro_batches.sum() * 64 * 16384)
    assert fill > 0.8
