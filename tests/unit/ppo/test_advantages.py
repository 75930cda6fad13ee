"""Token rewards, GAE and returns: the field's cases, and slow loops on random batches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megappo.ppo.advantages import discounted_returns, gae, token_rewards
from tests.unit.ppo.ragged import Ragged, few_examples, make_ragged, ragged_batches


def _mask(*entries: int) -> torch.Tensor:
    return torch.tensor(entries, dtype=torch.bool)


def _slow_gae(
    rewards: list[float], values: list[float], gamma: float, lambd: float
) -> tuple[list[float], list[float]]:
    """Textbook recursion over the actions of one sequence, last to first, in Python floats."""
    advantages: list[float] = []
    following_value = following_advantage = 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        delta = reward + gamma * following_value - value
        following_advantage = delta + gamma * lambd * following_advantage
        following_value = value
        advantages.append(following_advantage)
    advantages.reverse()
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ((1, 1, 1, 0), [0, 0, 1, 0]),
        ((1, 1, 1, 1), [0, 0, 0, 1]),
        ((0, 1, 1, 1), [0, 0, 0, 1]),
        ((0, 1, 0, 1, 0, 0), [0, 0, 0, 1, 0, 0]),
        ((1,), [1]),
    ],
)
def test_c21_score_sits_on_the_last_action_token(
    mask: tuple[int, ...], expected: list[int]
) -> None:
    """C21: after EOS nothing, at full length the last token; the sum is the score."""
    action_mask = _mask(*mask)
    cu_seqlens = torch.tensor([0, len(mask)])
    rewards = token_rewards(
        torch.tensor([1.0]), torch.zeros(len(mask)), action_mask, cu_seqlens, 0.1
    )
    assert rewards.tolist() == expected
    assert (rewards * action_mask).sum() == 1


@pytest.mark.parametrize("tail", [0.0, 7.0, torch.nan])
@pytest.mark.parametrize("tokens", [[5, 6, 7], [5, 6, 2]])
def test_c19_what_follows_the_response_never_enters(tokens: list[int], tail: float) -> None:
    """C19: tokens beyond the length enter nothing, with an EOS or without one."""
    num = len(tokens)
    mask = _mask(*[1] * num, 0, 0)
    kl = torch.tensor([0.1, 0.2, 0.3, tail, tail])
    values = torch.tensor([0.5, 0.4, 0.3, tail, tail])
    rewards = token_rewards(torch.tensor([1.0]), kl, mask, torch.tensor([0, 5]), 0.1)
    assert rewards.tolist() == pytest.approx([-0.01, -0.02, 0.97, 0, 0])
    advantages, returns = gae(rewards, values, mask, torch.tensor([0, 5]), 1.0, 0.95)
    alone, alone_returns = gae(
        rewards[:num], values[:num], mask[:num], torch.tensor([0, num]), 1.0, 0.95
    )
    assert advantages.tolist() == [*alone.tolist(), 0, 0]
    assert returns.tolist() == [*alone_returns.tolist(), 0, 0]


def test_c20_each_answer_keeps_its_own_score_when_pad_is_eos() -> None:
    """C20: the ids decide nothing; two answers of unequal length carry their own scores."""
    batch = make_ragged([[0, 1, 1], [0, 1, 1, 1, 1]])
    rewards = token_rewards(
        torch.tensor([0.25, -0.5]), None, batch.action_mask, batch.cu_seqlens, 0.0
    )
    assert rewards.tolist() == [0, 0, 0.25, 0, 0, 0, 0, -0.5]


def test_c22_gae_by_hand() -> None:
    """C22: values on tokens that are no actions do not leak."""
    advantages, returns = gae(
        torch.tensor([0.0, 0, 1, 0, 0]),
        torch.tensor([0.5, 0.4, 0.3, 9, 9]),
        _mask(1, 1, 1, 0, 0),
        torch.tensor([0, 5]),
        gamma=1.0,
        lambd=0.95,
    )
    assert advantages.tolist() == pytest.approx([0.43675, 0.565, 0.7, 0, 0], abs=1e-6)
    assert returns.tolist() == pytest.approx([0.93675, 0.965, 1, 0, 0], abs=1e-6)


@pytest.mark.parametrize(
    ("mask", "values", "expected"),
    [
        ((1, 1, 0, 1), [0.2, 0.2, 7, 0.2], [0.61, 0.70, 0, 0.80]),
        ((1, 1, 0, 1), [0.2, 0.2, torch.nan, 0.2], [0.61, 0.70, 0, 0.80]),
        ((0, 1, 1, 0, 0, 1, 0), [7, 0.2, 0.2, 7, -7, 0.2, 7], [0, 0.61, 0.70, 0, 0, 0.80, 0]),
        ((1, 0, 0, 0, 1), [0.2, 1, 2, 3, 0.2], [0.70, 0, 0, 0, 0.80]),
        ((0, 0, 1, 0), [5, 5, 0.2, 5], [0, 0, 0.80, 0]),
    ],
)
def test_c22_gae_steps_over_gaps(
    mask: tuple[int, ...], values: list[float], expected: list[float]
) -> None:
    """C22: tokens written by an environment take no step and no discount."""
    cu_seqlens = torch.tensor([0, len(mask)])
    rewards = token_rewards(torch.ones(1), None, _mask(*mask), cu_seqlens, 0.0)
    advantages, _ = gae(rewards, torch.tensor(values), _mask(*mask), cu_seqlens, 0.9, 1.0)
    assert advantages.tolist() == pytest.approx(expected, abs=1e-6)


@few_examples
@given(ragged_batches, st.floats(0, 0.5))
def test_token_rewards_agree_with_a_loop(batch: Ragged, kl_coef: float) -> None:
    """Score and KL, sequence by sequence; NaN off the actions is never read."""
    scores = torch.randn(batch.num_sequences, generator=batch.generator)
    kl = batch.normal()
    rewards = token_rewards(
        scores, batch.poisoned(kl), batch.action_mask, batch.cu_seqlens, kl_coef
    ).tolist()
    expected = [0.0] * len(rewards)
    for score, actions in zip(scores.tolist(), batch.actions(), strict=True):
        for t in actions:
            expected[t] = -kl_coef * kl[t].item() + (score if t == actions[-1] else 0.0)
    assert rewards == pytest.approx(expected, abs=1e-6)


@few_examples
@given(ragged_batches, st.floats(0, 1), st.floats(0, 1))
def test_gae_agrees_with_a_loop(batch: Ragged, gamma: float, lambd: float) -> None:
    """The textbook recursion on the actions of each sequence; nothing crosses sequences."""
    rewards, values = batch.normal(), batch.normal()
    advantages, returns = gae(
        batch.poisoned(rewards),
        batch.poisoned(values),
        batch.action_mask,
        batch.cu_seqlens,
        gamma,
        lambd,
    )
    expected, expected_returns = [0.0] * len(rewards), [0.0] * len(rewards)
    for actions in batch.actions():
        pair = _slow_gae(rewards[actions].tolist(), values[actions].tolist(), gamma, lambd)
        for t, advantage, target in zip(actions, *pair, strict=True):
            expected[t], expected_returns[t] = advantage, target
    assert advantages.tolist() == pytest.approx(expected, abs=2e-5)
    assert returns.tolist() == pytest.approx(expected_returns, abs=2e-5)


@few_examples
@given(ragged_batches, st.floats(0, 1))
def test_discounted_returns_agree_with_a_sum(batch: Ragged, gamma: float) -> None:
    """The sum of gamma^k r over the actions that follow."""
    rewards = batch.normal()
    result = discounted_returns(
        batch.poisoned(rewards), batch.action_mask, batch.cu_seqlens, gamma
    ).tolist()
    expected = [0.0] * len(result)
    for actions in batch.actions():
        for first, t in enumerate(actions):
            later = rewards[actions[first:]].tolist()
            expected[t] = sum(gamma**k * reward for k, reward in enumerate(later))
    assert result == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize("length", [1, 2, 3, 31, 32, 33, 1000])
def test_long_sequences_agree_with_a_loop(length: int) -> None:
    """Lengths around powers of two, where the doubling scan changes its number of passes."""
    batch = make_ragged([[1] * length, [0, 1], [1] * (length // 2)], seed=length)
    rewards, values = batch.normal(), batch.normal()
    advantages, _ = gae(rewards, values, batch.action_mask, batch.cu_seqlens, 0.999, 0.99)
    for actions in batch.actions():
        expected, _ = _slow_gae(rewards[actions].tolist(), values[actions].tolist(), 0.999, 0.99)
        assert advantages[actions].tolist() == pytest.approx(expected, abs=1e-4)


def test_a_sequence_gets_the_same_bits_in_any_batch() -> None:
    """Alone, or packed behind a longer one: the cut into micro-batches changes nothing."""
    batch = make_ragged([[0, *[1] * 200], [0, 1, 1, 0, 1, 1, 1]], seed=3)
    rewards, values = batch.normal(), batch.normal()
    packed, _ = gae(rewards, values, batch.action_mask, batch.cu_seqlens, 0.99, 0.95)
    rows = slice(201, 208)
    offsets = torch.tensor([0, 7])
    alone, _ = gae(rewards[rows], values[rows], batch.action_mask[rows], offsets, 0.99, 0.95)
    assert torch.equal(packed[rows], alone)


def test_gae_with_lambda_one_is_return_minus_value() -> None:
    """The two estimators meet: advantages at lambda 1 are discounted returns minus values."""
    batch = make_ragged([[0, 1, 1, 1], [0, 1, 0, 1, 1, 0]], seed=1)
    rewards, values = batch.normal(), batch.normal()
    advantages, returns = gae(rewards, values, batch.action_mask, batch.cu_seqlens, 0.9, 1.0)
    sums = discounted_returns(rewards, batch.action_mask, batch.cu_seqlens, 0.9)
    assert torch.allclose(returns, sums, atol=1e-6)
    assert torch.allclose(advantages, torch.where(batch.action_mask, sums - values, 0.0), atol=1e-6)


@pytest.mark.parametrize(
    ("masks", "summed"),
    [
        ([[0, 0], [0, 1, 1], [0, 1], [1]], 9.0),
        ([[0, 0], [0], [0, 0, 0], [0]], 0.0),
        ([[], [1, 1], [], [0, 1]], 6.0),
        ([[1, 0], [0, 0], [1, 1], []], 4.0),
    ],
)
def test_c32_empty_responses_give_nothing(masks: list[list[int]], summed: float) -> None:
    """C32: zero tokens for 1 of 4, for all 4, and mixed: no error, no NaN, no reward."""
    batch = make_ragged(masks)
    scores = torch.tensor([1.0, 2.0, 3.0, 4.0])
    rewards = token_rewards(
        scores, torch.zeros(len(batch.action_mask)), batch.action_mask, batch.cu_seqlens, 0.1
    )
    assert rewards.sum().item() == summed
    for result in gae(rewards, batch.normal(), batch.action_mask, batch.cu_seqlens, 0.9, 0.9):
        assert result.isfinite().all() and not result[~batch.action_mask].any()
    sums = discounted_returns(rewards, batch.action_mask, batch.cu_seqlens, 0.9)
    assert sums.isfinite().all() and not sums[~batch.action_mask].any()


def test_a_dummy_tail_needs_no_score() -> None:
    """Dummies that fill up a micro-batch come last and have no score of their own."""
    batch = make_ragged([[0, 1, 1], [0, 0, 0, 0]])
    rewards = token_rewards(
        torch.tensor([2.0]), batch.normal(), batch.action_mask, batch.cu_seqlens, 0.0
    )
    assert rewards.tolist() == [0, 0, 2, 0, 0, 0, 0]
