"""What an inference engine is: settings, the stepwise protocol, and ``generate`` as a loop over it.

The engine draws responses and tells the log-probability of each token it drew. It knows no
rewards, no trainer and no weights plan; it does not know how many engines there are. Every
rank of an engine's tensor-parallel group makes the same calls in the same order, and nothing
is decided by a clock, so that all of them draw the same tokens.

Place in the flow: the host of a mesh rank hands a ``GenerateRequest`` to its engine and keeps
the ``Rollouts``; the ``SampleInfo`` list goes back to the driver.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from megappo.records import FinishReason, Rollouts, SampleRequest, SamplingParams


@dataclass(frozen=True)
class EngineSettings:
    """How one engine is built; the same on every rank.

    Attributes:
        model_dir: Hugging Face folder (config, tokenizer, first weights).
        tensor_parallel_size: ranks of one engine; neighbours in the default process group.
        dtype: type of weights and KV cache.
        max_model_len: longest prompt plus response, in tokens.
        kv_cache_memory_bytes: KV cache of one rank.
        max_num_seqs: most sequences in flight.
        enable_prefix_caching: reuse the KV cache of shared prompt prefixes.
        enforce_eager: no CUDA graphs and no compilation (always so on a CPU).
        seed: of the engine; each request brings its own.
    """

    model_dir: str
    tensor_parallel_size: int = 1
    dtype: Literal["fp32", "bf16"] = "bf16"
    max_model_len: int = 2048
    kv_cache_memory_bytes: int = 256 * 1024 * 1024
    max_num_seqs: int = 256
    enable_prefix_caching: bool = True
    enforce_eager: bool = True
    seed: int = 0


@dataclass(frozen=True)
class FinishedSample:
    """One response, complete or aborted.

    Attributes:
        sample_id: of the request.
        prompt_ids: the prompt, as requested.
        token_ids: the response, the stop token included if one ended it.
        log_probs: one per response token, at the sampling temperature (at temperature 0, of
            the unscaled logits).
        finish_reason: "stop" (a stop token), "length" (max_new_tokens) or "abort".
    """

    sample_id: int
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish_reason: FinishReason


class Engine(Protocol):
    """A stepwise engine."""

    def add(self, requests: Sequence[SampleRequest], sampling: SamplingParams) -> None:
        """Queue requests.

        Raises:
            ValueError: a prompt is empty, or with ``max_new_tokens`` exceeds the context.
            EngineUnusableError: the weights are between two versions.
        """

    def step(self) -> list[FinishedSample]:
        """Advance every running response by one token; return those that ended, in any order."""

    def abort(self, sample_ids: Sequence[int]) -> list[FinishedSample]:
        """Stop these responses and return what they had drawn; ids that ended are ignored."""

    @property
    def num_unfinished(self) -> int:
        """Responses queued or running."""


class EngineUnusableError(RuntimeError):
    """The engine holds no whole version of the weights; the message says why."""


def draw(
    engine: Engine, requests: Sequence[SampleRequest], sampling: SamplingParams
) -> list[FinishedSample]:
    """Run the requests to their end; the result is in their order."""
    engine.add(requests, sampling)
    finished: dict[int, FinishedSample] = {}
    while engine.num_unfinished:
        finished.update((sample.sample_id, sample) for sample in engine.step())
    return [finished[request.sample_id] for request in requests]


def response_ids(sample: FinishedSample) -> list[int]:
    """The tokens of the response's text: a stop token is none, special or not."""
    ended = sample.finish_reason == "stop"
    return list(sample.token_ids[:-1] if ended else sample.token_ids)


def pack(samples: Sequence[FinishedSample]) -> Rollouts:
    """Lay the samples end to end, in the order given; empty responses are kept."""
    prompt_lens = [len(sample.prompt_ids) for sample in samples]
    lens = [len(sample.prompt_ids) + len(sample.token_ids) for sample in samples]
    tokens: list[int] = []
    action_mask: list[bool] = []
    log_probs: list[float] = []
    for sample in samples:
        num_prompt = len(sample.prompt_ids)
        tokens += sample.prompt_ids + sample.token_ids
        action_mask += [False] * num_prompt + [True] * len(sample.token_ids)
        log_probs += (0.0,) * num_prompt + sample.log_probs
    cu_seqlens = torch.zeros(len(samples) + 1, dtype=torch.int64)
    torch.cumsum(torch.tensor(lens, dtype=torch.int64), 0, out=cu_seqlens[1:])
    return Rollouts(
        sample_ids=torch.tensor([sample.sample_id for sample in samples], dtype=torch.int64),
        tokens=torch.tensor(tokens, dtype=torch.int64),
        cu_seqlens=cu_seqlens,
        prompt_lens=torch.tensor(prompt_lens, dtype=torch.int64),
        action_mask=torch.tensor(action_mask, dtype=torch.bool),
        log_probs=torch.tensor(log_probs, dtype=torch.float32),
    )
