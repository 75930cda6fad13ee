"""The parts of an engine that need no vLLM: packing responses and the loop over steps."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from megappo.records import FinishReason, SampleRequest, SamplingParams
from megappo.rollout.engine import FinishedSample, draw, pack, response_ids


def sample(
    sample_id: int, prompt: Sequence[int], response: Sequence[int], reason: FinishReason = "stop"
) -> FinishedSample:
    """A response whose log-probs are recognisable."""
    log_probs = tuple(-(sample_id + i / 8) for i in range(len(response)))
    return FinishedSample(sample_id, tuple(prompt), tuple(response), log_probs, reason)


class Counter:
    """An engine whose response ``i`` is done after ``i`` steps: one token a step, none for 0."""

    def __init__(self) -> None:
        self.running: dict[int, SampleRequest] = {}
        self.steps = 0

    def add(self, requests: Sequence[SampleRequest], sampling: SamplingParams) -> None:
        """Queue requests."""
        self.running |= {request.sample_id: request for request in requests}

    def step(self) -> list[FinishedSample]:
        """Finish what is as old as its id, latest first."""
        done = [r for r in self.running.values() if r.sample_id <= self.steps]
        self.steps += 1
        for request in done:
            del self.running[request.sample_id]
        return [sample(r.sample_id, r.prompt_ids, (7,) * r.sample_id) for r in reversed(done)]

    def abort(self, sample_ids: Sequence[int]) -> list[FinishedSample]:
        """Nothing runs long enough to be stopped."""
        return []

    @property
    def num_unfinished(self) -> int:
        """Requests without a response."""
        return len(self.running)


def test_pack_lays_samples_end_to_end() -> None:
    """Tokens, offsets, mask and log-probs against numbers written by hand."""
    rollouts = pack([sample(4, (1, 2, 3), (9, 8)), sample(2, (5,), (6, 7, 8), "length")])
    assert rollouts.sample_ids.tolist() == [4, 2]
    assert rollouts.tokens.tolist() == [1, 2, 3, 9, 8, 5, 6, 7, 8]
    assert rollouts.cu_seqlens.tolist() == [0, 5, 9]
    assert rollouts.prompt_lens.tolist() == [3, 1]
    assert rollouts.action_mask.tolist() == [False] * 3 + [True] * 2 + [False] + [True] * 3
    assert rollouts.log_probs.tolist() == [0, 0, 0, -4, -4.125, 0, -2, -2.125, -2.25]
    assert rollouts.tokens.dtype == rollouts.sample_ids.dtype == torch.int64
    assert rollouts.cu_seqlens.dtype == rollouts.prompt_lens.dtype == torch.int64
    assert rollouts.action_mask.dtype == torch.bool
    assert rollouts.log_probs.dtype == torch.float32


@pytest.mark.parametrize(
    "lengths", [[0, 2, 3, 1], [2, 0, 3], [3, 0], [0, 0, 0, 0], [0], []], ids=str
)
def test_pack_keeps_empty_responses(lengths: list[int]) -> None:
    """One of several, the last, all, or no sample at all: offsets and mask stay right (C32)."""
    rollouts = pack([sample(i, (1, 2), (7,) * n) for i, n in enumerate(lengths)])
    assert rollouts.cu_seqlens.tolist() == [
        2 * i + sum(lengths[:i]) for i in range(len(lengths) + 1)
    ]
    assert int(rollouts.action_mask.sum()) == sum(lengths)
    assert rollouts.prompt_lens.tolist() == [2] * len(lengths)
    assert rollouts.log_probs.shape == rollouts.tokens.shape == rollouts.action_mask.shape


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2], [2], []], ids=str)
def test_draw_returns_samples_in_the_order_of_the_requests(order: list[int]) -> None:
    """Whatever finishes first, the result is in request order and nothing is left running."""
    engine = Counter()
    requests = [SampleRequest(i, (i + 1,), seed=0) for i in order]
    samples = draw(engine, requests, SamplingParams(1.0, 8, ()))
    assert [s.sample_id for s in samples] == order
    assert [len(s.token_ids) for s in samples] == order
    assert engine.num_unfinished == 0


@pytest.mark.parametrize(
    ("response", "reason", "expected"),
    [
        ((5, 6, 2), "stop", [5, 6]),
        ((2,), "stop", []),
        ((5, 6, 7), "length", [5, 6, 7]),
        ((5, 2, 6), "abort", [5, 2, 6]),
        ((), "abort", []),
    ],
)
def test_the_stop_token_is_no_text(
    response: Sequence[int], reason: FinishReason, expected: list[int]
) -> None:
    """The reward sees no token that ended a response, be it special to the tokenizer or not."""
    assert response_ids(sample(0, [1], response, reason)) == expected
