"""How far log-probs move when a model computes in bf16, or its linear layers in emulated FP8.

    python -m benchmarks.precision

prints one JSON line for every depth and precision: the mean and the largest difference to the
log-probs of the same tokens in fp32, and the spread (standard deviation) of these, on a random
Llama. FP8 is emulated in float32 (``megappo.models.fp8_emulation``): the figures are those of
rounding to FP8, and say nothing of the bits of any GPU.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch

from benchmarks.gloo_ranks import run_ranks
from megappo.models import parallel
from megappo.models.build import build_model
from megappo.models.forward import forward_packed
from megappo.models.fp8 import Fp8
from megappo.records import PackedBatch
from megappo.topology import Topology
from megappo.weights.shape import ModelShape

# Type of the parameters, FP8 in the linear layers.
CASES: dict[str, tuple[torch.dtype, Fp8 | None]] = {
    "fp32": (torch.float32, None),
    "bf16": (torch.bfloat16, None),
    "tensorwise": (torch.float32, Fp8(recipe="tensorwise")),
    "tensorwise, first and last layer left alone": (
        torch.float32,
        Fp8(recipe="tensorwise", layers_at_start=1, layers_at_end=1),
    ),
    "delayed": (torch.float32, Fp8(recipe="delayed")),
    "blockwise": (torch.float32, Fp8(recipe="blockwise")),
}
VOCAB, HIDDEN, FFN, HEADS = 4096, 256, 768, 4
SEQUENCES, LENGTH = 8, 128


def main() -> None:
    """Measures every case and prints its line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 4, 8, 16, 32])
    parser.add_argument("--seed", type=int, default=0, help="of weights and tokens")
    options = parser.parse_args()
    for layers in options.layers:
        [lines] = run_ranks(1, measure, layers, options.seed)
        for line in lines:
            print(json.dumps({"layers": layers, **line}), flush=True)


def measure(rank: int, layers: int, seed: int) -> list[dict[str, Any]]:
    """The lines of one depth."""
    parallel.initialize(Topology(1), seed)
    generator = torch.Generator().manual_seed(seed)
    before, tokens = (
        torch.randint(VOCAB, (SEQUENCES, LENGTH), generator=generator) for _ in range(2)
    )
    log_probs = {name: _log_probs(layers, seed, name, before, tokens) for name in CASES}
    plain = log_probs.pop("fp32")
    return [
        {
            "case": name,
            "mean": round(float((found - plain).abs().mean()), 5),
            "max": round(float((found - plain).abs().max()), 4),
            "spread": round(float(plain.std()), 3),
        }
        for name, found in log_probs.items()
    ]


def _log_probs(
    layers: int, seed: int, case: str, before: torch.Tensor, tokens: torch.Tensor
) -> torch.Tensor:
    """Log-probs of all tokens but each sequence's first, float32 [sequences, length - 1].

    Delayed scaling has seen other tokens, ``before``, in a training pass.
    """
    dtype, fp8 = CASES[case]
    [model] = build_model(
        _shape(layers),
        Topology(1),
        head="lm",
        dtype=dtype,
        sequence_parallel=False,
        recompute=None,
        fp8=fp8,
    )
    _draw_weights(model, layers, seed)
    if fp8 is not None and fp8.recipe == "delayed":
        forward_packed(model, _pack(before))
    with torch.no_grad():
        logits = forward_packed(model, _pack(tokens)).float()
    log_probs = logits[:, :VOCAB].log_softmax(-1).view(SEQUENCES, LENGTH, VOCAB)
    return log_probs[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]


def _draw_weights(model: torch.nn.Module, layers: int, seed: int) -> None:
    """Gaussian, of unit gain; what is added to the residual stream adds up to one layer's part."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                continue  # a norm, all ones
            noise = torch.randn(parameter.shape, generator=generator)
            gain = 1.0 if "embedding" in name else parameter.shape[1] ** -0.5
            if "linear_proj" in name or "linear_fc2" in name:
                gain *= (2 * layers) ** -0.5
            if "output_layer" in name:
                gain *= 2
            parameter.copy_(noise * gain)


def _pack(tokens: torch.Tensor) -> PackedBatch:
    flat = tokens.flatten()
    return PackedBatch(
        tokens=flat,
        cu_seqlens=torch.arange(0, len(flat) + 1, LENGTH, dtype=torch.int32),
        action_mask=torch.zeros(len(flat), dtype=torch.bool),
        engine_log_probs=torch.zeros(len(flat)),
        samples=torch.arange(len(tokens)),
    )


def _shape(layers: int) -> ModelShape:
    return ModelShape(
        family="llama",
        num_layers=layers,
        hidden_size=HIDDEN,
        ffn_hidden_size=FFN,
        num_heads=HEADS,
        num_kv_heads=HEADS,
        head_dim=HIDDEN // HEADS,
        vocab_size=VOCAB,
        tied=False,
        norm_eps=1e-6,
        rope_theta=1e4,
        rope_scaling=None,
        max_position_embeddings=LENGTH,
    )


if __name__ == "__main__":
    main()
