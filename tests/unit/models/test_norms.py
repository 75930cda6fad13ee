"""RMSNorm equals transformers' bit for bit and carries the sequence-parallel mark."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from megappo.models.norms import RMSNorm


def config(dtype: torch.dtype, sequence_parallel: bool = False) -> TransformerConfig:
    """A configuration of this parameter type."""
    return TransformerConfig(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=4,
        params_dtype=dtype,
        tensor_model_parallel_size=2 if sequence_parallel else 1,
        sequence_parallel=sequence_parallel,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("eps", [1e-6, 1e-3])
def test_equals_transformers(dtype: torch.dtype, eps: float) -> None:
    """Same operations in the same order, large and small inputs, outputs and gradients."""
    generator = torch.Generator().manual_seed(0)
    ours, theirs = RMSNorm(config(dtype), 32, eps), LlamaRMSNorm(32, eps).to(dtype)
    weight = torch.randn(32, generator=generator).to(dtype)
    ours.weight.data.copy_(weight)
    theirs.weight.data.copy_(weight)
    for scale in (1e-4, 1.0, 50.0):
        x = (scale * torch.randn(6, 1, 32, generator=generator)).to(dtype)
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        assert torch.equal(ours(a), theirs(b))
        ours(a).sum().backward()
        theirs(b).sum().backward()
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_weight_is_marked(sequence_parallel: bool) -> None:
    """Megatron sums the gradients of marked weights over tensor ranks."""
    norm = RMSNorm(config(torch.float32, sequence_parallel), 32, 1e-6)
    assert vars(norm.weight)["sequence_parallel"] is sequence_parallel
    assert torch.equal(norm.weight, torch.ones(32))
