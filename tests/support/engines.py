"""Small real engines for tests: settings, prompts, generation, and a look inside.

A prompt of 150 tokens spans a whole block of the KV cache, so that the prefix cache holds it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
from transformers import AutoModelForCausalLM

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


def transformers_log_probs(
    folder: Path, rollouts: Rollouts, temperature: float, **changes: Any
) -> torch.Tensor:
    """log-softmax(logits / T) of each response token, by transformers; 0 on prompts.

    ``changes`` are fields of the configuration that are not as in the folder.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **changes)
    parts = []
    offsets = rollouts.cu_seqlens.tolist()
    for start, end in zip(offsets, offsets[1:], strict=False):
        tokens = rollouts.tokens[start:end]
        with torch.no_grad():
            logits = model(tokens[None]).logits[0, :-1] / (temperature or 1.0)
        picked = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        parts.append(torch.cat([torch.zeros(1), picked]))
    return torch.cat(parts) * rollouts.action_mask


@contextmanager
def loaded_parameters() -> Iterator[dict[str, torch.Tensor]]:
    """The parameters of the engine that starts inside, as loaded, before vLLM converts them."""
    from vllm.model_executor.model_loader import base_loader, utils

    loaded: dict[str, torch.Tensor] = {}
    convert = utils.process_weights_after_loading

    def keep_and_convert(model: torch.nn.Module, *arguments: Any) -> None:
        loaded.update({n: p.detach().clone() for n, p in model.named_parameters()})
        convert(model, *arguments)

    with mock.patch.object(base_loader, "process_weights_after_loading", keep_and_convert):
        yield loaded


def model_of(engine: VLLMEngine) -> torch.nn.Module:
    """The model in vLLM on this rank."""
    executor: Any = engine._llm.model_executor
    model = executor.driver_worker.worker.model_runner.model
    assert isinstance(model, torch.nn.Module)
    return model


@torch.no_grad()
def layer_outputs(engine: VLLMEngine) -> dict[str, torch.Tensor]:
    """What every linear, head and expert layer of this rank makes of a fixed input, by name.

    This rank's share alone: nothing is reduced over the ranks of the engine.
    """
    outputs = {}
    for name, module in model_of(engine).named_modules():
        layer: Any = module
        match type(layer.quant_method).__name__ if hasattr(layer, "quant_method") else "":
            case "UnquantizedLinearMethod":
                width = engine.load_time_shapes()[f"{name}.weight"][1]
                x = _fixed_input(width, layer.params_dtype)
                outputs[name] = layer.quant_method.apply(layer, x, layer.bias)
            case "UnquantizedEmbeddingMethod":
                x = _fixed_input(layer.embedding_dim, layer.weight.dtype)
                outputs[name] = layer.quant_method.apply(layer, x)
            case "UnquantizedFusedMoEMethod":
                x = _fixed_input(layer.hidden_size, layer.w13_weight.dtype)
                experts = torch.arange(2 * len(x), dtype=torch.int32).view(-1, 2)
                outputs[name] = layer.quant_method.apply(
                    layer,
                    x,
                    torch.full(experts.shape, 0.5),
                    experts % layer.global_num_experts,
                    None,
                    None,
                )
    return {name: output.clone() for name, output in outputs.items()}


def _fixed_input(width: int, dtype: torch.dtype) -> torch.Tensor:
    """Five tokens, none like another."""
    return torch.linspace(-1, 1, 5 * width).view(5, width).sin().to(dtype)
