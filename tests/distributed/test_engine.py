"""One vLLM engine rank and several: sampling, log-probs, stops, refusals, independence.

Three forks in all: each runs its engines once and returns what it saw.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from megappo.records import Rollouts, SampleInfo, SampleRequest, SamplingParams
from megappo.rollout.engine import EngineUnusableError, FinishedSample, draw
from megappo.rollout.process import import_vllm
from megappo.rollout.vllm_engine import VLLMEngine
from tests.support.engines import (
    LONG,
    NEW_TOKENS,
    PROMPTS,
    REQUESTS,
    generate,
    responses,
    start_engine,
    transformers_log_probs,
)
from tests.support.models import EOS, make_llama, make_tokenizer
from tests.support.ranks import run_ranks

VOCAB = 101
STOP_IDS = [EOS, *range(10, 60)]  # what the folder calls end of sequence


@dataclass
class Seen:
    """What one engine rank did."""

    sampled: dict[float, tuple[Rollouts, list[SampleInfo]]] = field(default_factory=dict)
    reference: dict[float, torch.Tensor] = field(default_factory=dict)
    same_again: list[dict[int, list[int]]] = field(default_factory=list)
    other_seeds: dict[int, list[int]] = field(default_factory=dict)
    stopped: list[tuple[dict[int, list[int]], list[SampleInfo], int]] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    no_updates: list[str] = field(default_factory=list)
    aborted: list[FinishedSample] = field(default_factory=list)
    survivors: list[FinishedSample] = field(default_factory=list)
    random_states: list[tuple[torch.Tensor, object, object]] = field(default_factory=list)
    environment: list[dict[str, str | None]] = field(default_factory=list)
    texts: dict[int, str] = field(default_factory=dict)


def note_process(seen: Seen) -> None:
    """Remember the random generators and what vLLM's platform sets for its children."""
    python, numpy = random.getstate(), np.random.get_state(legacy=False)["state"]["key"].tolist()
    seen.random_states.append((torch.get_rng_state(), python, numpy))
    names = ("LD_PRELOAD", "LOCAL_WORLD_SIZE")
    seen.environment.append({name: os.environ.get(name) for name in names})


def refusal(engine: VLLMEngine, *requests: SampleRequest, new: int = NEW_TOKENS) -> str:
    """The one line with which the engine refuses requests, after a good one."""
    try:
        generate(engine, (SampleRequest(1, (5,), 0), *requests), new=new)
    except ValueError as error:
        assert engine.num_unfinished == 0
        return str(error)
    raise AssertionError("not refused")


def observe_one(rank: int, folder: Path) -> Seen:
    """Everything an engine of one rank is asked here."""
    seen = Seen()
    torch.manual_seed(3)
    note_process(seen)
    engine = start_engine(folder)
    for temperature in (0.7, 1.0, 1.5, 0.0):
        seen.sampled[temperature] = generate(engine, temperature=temperature)
    note_process(seen)
    for temperature, (rollouts, _) in seen.sampled.items():
        seen.reference[temperature] = transformers_log_probs(folder, rollouts, temperature)
    first, infos = seen.sampled[0.7]
    seen.texts = {info.sample_id: info.response for info in infos}
    seen.same_again = [
        responses(generate(engine)[0]),
        responses(generate(engine, REQUESTS[::-1])[0]),
        {k: v for r in REQUESTS for k, v in responses(generate(engine, (r,))[0]).items()},
    ]
    seen.other_seeds = responses(
        generate(
            engine, tuple(SampleRequest(r.sample_id, r.prompt_ids, r.seed + 1) for r in REQUESTS)
        )[0]
    )
    greedy = responses(seen.sampled[0.0][0])
    for position in (0, 1, 5):
        stop = greedy[REQUESTS[2].sample_id][position]
        rollouts, infos = generate(engine, temperature=0.0, stop=(stop, 100))
        seen.stopped.append((responses(rollouts), infos, stop))
    seen.refusals = [
        refusal(engine, SampleRequest(2, LONG, 0), new=51),
        refusal(engine, SampleRequest(2, (), 0)),
        refusal(engine, SampleRequest(2, (5, VOCAB), 0)),
        refusal(engine, SampleRequest(1, (5,), 0)),
    ]
    engine.add(REQUESTS, SamplingParams(0.7, NEW_TOKENS, ()))
    for _ in range(6):
        engine.step()
    seen.no_updates.append(complaint(ValueError, engine.begin_update))
    seen.aborted = engine.abort([REQUESTS[0].sample_id, REQUESTS[4].sample_id, 999])
    while engine.num_unfinished:
        seen.survivors += engine.step()
    assert draw(engine, [], SamplingParams(1.0, 4, ())) == []
    nothing, no_infos = generate(engine, ())  # an engine that has no share of a small batch
    assert nothing.tokens.numel() == 0 and no_infos == []
    engine.begin_update()
    with mock.patch.object(engine._llm, "reset_prefix_cache", return_value=False):
        seen.no_updates.append(complaint(EngineUnusableError, lambda: engine.finish_update(1)))
    seen.no_updates.append(complaint(EngineUnusableError, lambda: generate(engine)))
    assert engine.version == 0
    return seen


def complaint(kind: type[Exception], action: Callable[[], object]) -> str:
    """The message of the error that the action must raise."""
    try:
        action()
    except kind as error:
        return str(error)
    raise AssertionError("no error")


def observe_several(rank: int, folder: Path, tp: int) -> tuple[int, Rollouts]:
    """One of several engines on a mesh, each with its own requests."""
    engine = start_engine(folder, tp)
    number = rank // tp
    requests = REQUESTS[number : number + 2 + number]  # unlike counts: no lockstep across
    rollouts, infos = generate(engine, requests)
    assert {info.holder_rank for info in infos} == {engine.leader_rank}
    return engine.leader_rank, rollouts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a vocabulary that has to be padded."""
    return make_llama(tmp_path_factory.mktemp("llama"), vocab=VOCAB, seed=1, eos=STOP_IDS)


@pytest.fixture(scope="module")
def seen(folder: Path) -> Seen:
    """Observations of one engine rank."""
    import_vllm()
    result: Seen = run_ranks(1, observe_one, folder)[0]
    return result


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5, 0.0])
def test_log_probs_are_those_of_the_scaled_logits(seen: Seen, temperature: float) -> None:
    """Engine and transformers agree on log-softmax(logits / T) to 1e-3 (seen: 1e-5)."""
    rollouts, _ = seen.sampled[temperature]
    difference = (rollouts.log_probs - seen.reference[temperature]).abs().max()
    assert float(difference) < 1e-4
    assert float(rollouts.log_probs.sum()) < -1
    assert (rollouts.log_probs[~rollouts.action_mask] == 0).all()


def test_temperature_zero_is_greedy(seen: Seen) -> None:
    """Equal prompts with unlike seeds get one response, which sampling does not give them."""
    greedy, drawn = (responses(seen.sampled[t][0]) for t in (0.0, 1.0))
    assert greedy[13] == greedy[14]
    assert drawn[13] != drawn[14]


def test_seeds_reproduce_whatever_the_batch_and_the_cache(seen: Seen) -> None:
    """Again, in reverse order, and one request at a time: the same tokens; other seeds differ."""
    first = responses(seen.sampled[0.7][0])
    for again in seen.same_again:
        assert again == first
    assert all(seen.other_seeds[i] != tokens for i, tokens in first.items())


def test_results_come_in_request_order_with_lengths_and_text(seen: Seen) -> None:
    """Ids, lengths and prompts as asked; the text leaves special tokens out."""
    rollouts, infos = seen.sampled[0.7]
    tokenizer = make_tokenizer(VOCAB)
    assert [info.sample_id for info in infos] == [r.sample_id for r in REQUESTS]
    assert rollouts.prompt_lens.tolist() == [len(p) for p in PROMPTS]
    for info, tokens in zip(infos, responses(rollouts).values(), strict=True):
        assert (info.response_len, info.finish_reason, info.holder_rank) == (
            NEW_TOKENS,
            "length",
            0,
        )
        assert info.response == tokenizer.decode(tokens, skip_special_tokens=True)


def test_only_the_requested_ids_stop_and_the_stop_token_is_an_action(seen: Seen) -> None:
    """A response ends with the first stop id, kept; what the folder calls EOS stops nothing."""
    whole = responses(seen.sampled[0.0][0])
    assert all(len(tokens) == NEW_TOKENS for tokens in whole.values())
    assert any(set(tokens[:-1]) & set(STOP_IDS) for tokens in whole.values())
    for stopped, infos, stop in seen.stopped:
        for info in infos:
            tokens, full = stopped[info.sample_id], whole[info.sample_id]
            stops = [i for i, token in enumerate(full) if token in (stop, 100)]
            length = stops[0] + 1 if stops else NEW_TOKENS
            assert tokens == full[:length]
            assert info.response_len == length
            assert info.finish_reason == ("stop" if stops else "length")
        assert stop in stopped[REQUESTS[2].sample_id]


def test_requests_that_cannot_run_are_refused_in_one_line(seen: Seen) -> None:
    """Too long, empty, outside the vocabulary, twice: refused before anything is queued."""
    too_long, empty, foreign, twice = seen.refusals
    assert "150 tokens and rollout.max_new_tokens = 51 exceed" in too_long
    assert "data.max_len" in too_long
    assert "sample 2 has an empty prompt" in empty
    assert "token 101 is not in the model's vocabulary of 101" in foreign
    assert "sample 1 is asked for twice" in twice
    assert not any("\n" in line for line in seen.refusals)


def test_aborted_responses_are_returned_and_the_others_run_on(seen: Seen) -> None:
    """What was drawn comes back with its log-probs; unknown ids are ignored."""
    rollouts, _ = seen.sampled[0.7]
    whole = responses(rollouts)
    assert sorted(s.sample_id for s in seen.aborted) == [10, 14]
    for sample in seen.aborted:
        assert 0 < len(sample.token_ids) < NEW_TOKENS
        assert list(sample.token_ids) == whole[sample.sample_id][: len(sample.token_ids)]
        assert len(sample.log_probs) == len(sample.token_ids)
        assert sample.finish_reason == "abort"
    assert {s.sample_id: list(s.token_ids) for s in seen.survivors} == {
        i: tokens for i, tokens in whole.items() if i not in (10, 14)
    }


def test_weights_do_not_change_under_running_responses_nor_under_a_stale_cache(seen: Seen) -> None:
    """Running responses, or a prefix cache that does not reset (C13), stop an update."""
    running, stale, later = seen.no_updates
    assert "cannot change while 8 responses are running" in running
    assert stale == later
    assert "the prefix cache still holds weights of version 0" in stale


def test_the_process_is_left_as_it_was(seen: Seen) -> None:
    """Random generators and the environment for children are untouched by an engine."""
    before, after = seen.random_states
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    assert seen.environment[0] == seen.environment[1]


@pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_engines_on_one_mesh_are_independent_and_agree(folder: Path, seen: Seen, tp: int) -> None:
    """Four engines of one rank, two of two ranks: each draws as the single engine does."""
    alone, log_probs = responses(seen.sampled[0.7][0]), seen.sampled[0.7][0].log_probs
    ranks = run_ranks(4, observe_several, folder, tp)
    for rank, (leader, rollouts) in enumerate(ranks):
        number = rank // tp
        assert leader == number * tp
        assert list(responses(rollouts)) == [10 + number + i for i in range(2 + number)]
        assert responses(rollouts) == {i: alone[i] for i in responses(rollouts)}
        assert torch.equal(rollouts.log_probs, ranks[leader][1].log_probs)
    first = ranks[0][1].log_probs
    assert float((first - log_probs[: len(first)]).abs().max()) < 1e-5
