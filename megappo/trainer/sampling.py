"""Generation from the driver's side: spread requests over the engines, collect what they say.

Tokens stay on the engine ranks; what comes back is lengths, texts and where the tokens are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megappo.records import GenerateRequest, Prompt, SampleInfo, SampleRequest, SamplingParams
from megappo.runtime.groups import RankGroup


@dataclass(frozen=True)
class RolloutBatch:
    """Samples of one batch of prompts, in order: sample ``i`` answers ``prompts[i // n]``.

    ``key`` names the tokens in the engine ranks' stores (None: they were not kept).
    """

    key: str | None
    prompts: tuple[Prompt, ...]
    n_samples_per_prompt: int
    samples: tuple[SampleInfo, ...]

    def answers(self) -> Iterator[tuple[Prompt, SampleInfo]]:
        """Every sample, in order, behind the prompt that it answers."""
        for index, info in enumerate(self.samples):
            yield self.prompts[index // self.n_samples_per_prompt], info


def sample_seeds(entropy: Sequence[int], count: int) -> list[int]:
    """``count`` seeds that depend on ``entropy`` alone: the run's seed, the use and the step."""
    words = np.random.SeedSequence(entropy).generate_state(count, np.uint64)
    return [int(word >> np.uint64(1)) for word in words]  # engines take a signed 64-bit seed


def generate(
    engines: RankGroup,
    prompts: Sequence[Prompt],
    n_samples_per_prompt: int,
    sampling: SamplingParams,
    *,
    seeds: Sequence[int],
    key: str | None,
) -> RolloutBatch:
    """Draw ``n_samples_per_prompt`` responses to every prompt.

    The samples of a prompt stay on one engine, which then computes its prefix once.
    """
    requests = [
        SampleRequest(index, prompts[index // n_samples_per_prompt].token_ids, seed)
        for index, seed in enumerate(seeds)
    ]
    bounds = np.linspace(0, len(prompts), engines.num_replicas + 1).astype(int)
    bounds = bounds * n_samples_per_prompt
    arguments = [
        GenerateRequest(tuple(requests[start:end]), sampling, key)
        for start, end in zip(bounds[:-1], bounds[1:], strict=True)
    ]
    samples = [info for infos in engines.call("generate", arguments) for info in infos]
    samples.sort(key=lambda info: info.sample_id)
    assert [info.sample_id for info in samples] == list(range(len(requests)))
    return RolloutBatch(key, tuple(prompts), n_samples_per_prompt, tuple(samples))
