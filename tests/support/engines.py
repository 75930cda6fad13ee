"""Small real engines for tests: settings, prompts, and generation with defaults.

A prompt of 150 tokens spans a whole block of the KV cache, so that the prefix cache holds it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from megappo.records import GenerateRequest, Rollouts, SampleInfo, SampleRequest, SamplingParams
from megappo.rollout.engine import EngineSettings
from megappo.rollout.vllm_engine import VLLMEngine

NEW_TOKENS = 16
LONG = tuple(4 + (7 * i) % 90 for i in range(150))
PROMPTS = [(5, 6, 7), (8, 9), (30,), LONG, LONG, (40, 41, 42, 43, 44, 45), (50, 3, 60), LONG[:131]]
REQUESTS = tuple(SampleRequest(10 + i, p, seed=1000 + i) for i, p in enumerate(PROMPTS))


def start_engine(folder: Path, tp: int = 1, dtype: Literal["fp32", "bf16"] = "fp32") -> VLLMEngine:
    """An engine rank with an 8 MiB cache and a context of 200 tokens."""
    return VLLMEngine(
        EngineSettings(
            str(folder),
            tensor_parallel_size=tp,
            dtype=dtype,
            max_model_len=200,
            kv_cache_memory_bytes=8 << 20,
            max_num_seqs=16,
        )
    )


def generate(
    engine: VLLMEngine,
    requests: tuple[SampleRequest, ...] = REQUESTS,
    temperature: float = 0.7,
    stop: tuple[int, ...] = (),
    new: int = NEW_TOKENS,
) -> tuple[Rollouts, list[SampleInfo]]:
    """Generate without keeping anything in a store."""
    sampling = SamplingParams(temperature, new, stop)
    return engine.generate(GenerateRequest(requests, sampling, key=None))


def responses(rollouts: Rollouts) -> dict[int, list[int]]:
    """Response tokens by sample id."""
    parts = {}
    for i, sample_id in enumerate(rollouts.sample_ids.tolist()):
        start, end = rollouts.cu_seqlens[i : i + 2].tolist()
        span = slice(start + int(rollouts.prompt_lens[i]), end)
        assert rollouts.action_mask[span].all()
        parts[sample_id] = rollouts.tokens[span].tolist()
    return parts
