"""Destinations and finishers on small modules shaped like vLLM's layers.

The real layers are exercised in ``tests/distributed``; here are the rules that no model at
hand shows: refusals, a widened bias, an update that stops half-way.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import nn

from megappo.rollout.update import WeightUpdate


class UnquantizedLinearMethod:
    """Packs a plain weight away, as vLLM's method of that name does on a CPU."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Keep the product as a closure, drop the weight, widen the bias."""
        packed = layer.weight.detach().clone()
        layer.cpu_linear = lambda x: x.to(packed.dtype) @ packed.t()
        layer.weight = nn.Parameter(torch.empty(0, dtype=packed.dtype), requires_grad=False)
        if layer.bias is not None:
            layer.bias.data = layer.bias.to(torch.float32)


class UnquantizedEmbeddingMethod:
    """Packs a copy and keeps the plain weight, as vLLM's method of that name does on a CPU."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Keep the product as a closure."""
        packed = layer.weight.detach().clone()
        layer.cpu_linear = lambda x: x @ packed.t()


class ExpertKernel:
    """Packs both stacks over their plain values, the first padded to 4 rows."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Packing is negation; another parameter object each time, as in vLLM."""
        first = nn.functional.pad(layer.w13_weight.data, (0, 0, 0, 1))
        layer.w13_weight = nn.Parameter(-first, requires_grad=False)
        layer.w2_weight = nn.Parameter(-layer.w2_weight.data, requires_grad=False)


class Kernel:
    """What vLLM keeps around an expert kernel."""

    def __init__(self) -> None:
        self.fused_experts = ExpertKernel()


class UnquantizedFusedMoEMethod:
    """Packs when it is called first and never again, as vLLM's method of that name does."""

    def __init__(self, backend: str = "CPU") -> None:
        self.unquantized_backend = Backend[backend]
        self.moe_kernel: Kernel | None = None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Make the kernel, which packs."""
        if self.moe_kernel is None:
            self.moe_kernel = Kernel()
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)


class Backend(Enum):
    """Some of vLLM's expert backends."""

    CPU = "CPU"
    TRITON = "TRITON"
    FLASHINFER_CUTLASS = "FlashInfer CUTLASS"


class Experts(nn.Module):
    """Two stacks of two experts."""

    def __init__(self) -> None:
        super().__init__()
        self.w13_weight = nn.Parameter(torch.ones(2, 3, 5), requires_grad=False)
        self.w2_weight = nn.Parameter(torch.ones(2, 5, 4), requires_grad=False)


class Fp8MoEMethod:
    """A conversion that megappo does not know."""


class RMSNorm(nn.Module):
    """A layer without a conversion."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3), requires_grad=False)


class Model(nn.Module):
    """Embedding, packed linear, norm, experts, and a head that is the embedding's weight."""

    def __init__(self, *, bias: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 8, bias=False, dtype=torch.bfloat16)
        self.linear = nn.Linear(3, 4, bias=bias, dtype=torch.bfloat16)
        self.norm = RMSNorm().to(torch.bfloat16)
        self.experts = Experts().to(torch.bfloat16)
        self.head = nn.Linear(3, 8, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embed.weight
        methods = {
            "embed": UnquantizedEmbeddingMethod(),
            "linear": UnquantizedLinearMethod(),
            "head": UnquantizedEmbeddingMethod(),
            "experts": UnquantizedFusedMoEMethod(),
        }
        for name, method in methods.items():
            cast(Any, self.get_submodule(name)).quant_method = method


def loaded(*, bias: bool = False) -> tuple[Model, WeightUpdate]:
    """A model as an engine finds it: recorded before loading, converted after."""
    model = Model(bias=bias)
    recorded = {
        module: {
            name: parameter.to("meta")
            for name, parameter in module.named_parameters(recurse=False)
            if name != "bias"  # vLLM records none
        }
        for module in model.modules()
    }
    for module in (model.embed, model.linear, model.head, model.experts):
        cast(Any, module).quant_method.process_weights_after_loading(module)
    return model, WeightUpdate(model, recorded.__getitem__, torch.bfloat16)


def test_shapes_are_those_of_load_time_and_tied_weights_count_once() -> None:
    """A packed weight is listed whole; a head tied to the embedding is not listed."""
    model, update = loaded(bias=True)
    assert model.linear.weight.numel() == 0
    assert update.load_time_shapes() == {
        "embed.weight": (8, 3),
        "linear.weight": (4, 3),
        "linear.bias": (4,),
        "norm.weight": (3,),
        "experts.w13_weight": (2, 3, 5),
        "experts.w2_weight": (2, 5, 4),
    }


@pytest.mark.parametrize("bias", [False, True])
def test_written_weights_reach_every_converted_copy(bias: bool) -> None:
    """After ``finish`` the packed linear, the tied head's packed copy and the norm are new."""
    model, update = loaded(bias=bias)
    for value in (2.0, 3.0):
        destinations = update.begin()
        assert {name: tuple(t.shape) for name, t in destinations.items()} == (
            update.load_time_shapes()
        )
        assert {t.dtype for t in destinations.values()} == {torch.bfloat16}
        assert not hasattr(model.linear, "cpu_linear") and not hasattr(model.head, "cpu_linear")
        for tensor in destinations.values():
            tensor.fill_(value)
        update.finish()
        x = torch.ones(1, 3, dtype=torch.bfloat16)
        assert cast(Any, model.linear).cpu_linear(x).tolist() == [[3 * value] * 4]
        assert cast(Any, model.head).cpu_linear(x).tolist() == [[3 * value] * 8]
        assert model.norm.weight.tolist() == [value] * 3
        packed = model.experts.w13_weight
        assert packed.shape == (2, 4, 5) and (packed[:, :3] == -value).all()
        assert (model.experts.w2_weight == -value).all()
        assert model.linear.weight.numel() == 0
        if bias:
            assert model.linear.bias.dtype == torch.float32
            assert model.linear.bias.tolist() == [value] * 4


@pytest.mark.parametrize("stopped", ["while writing", "while converting"])
def test_begin_may_follow_a_begin(stopped: str) -> None:
    """An update that stopped half-way is started again and written whole."""
    model, update = loaded(bias=True)
    if stopped == "while writing":
        update.begin()["linear.weight"].fill_(5.0)
    else:
        update.begin()
        method = cast(Any, model.experts).quant_method
        with mock.patch.object(method, "moe_kernel", None), pytest.raises(AttributeError):
            update.finish()
    for tensor in update.begin().values():
        tensor.fill_(4.0)
    update.finish()
    x = torch.ones(1, 3, dtype=torch.bfloat16)
    assert cast(Any, model.linear).cpu_linear(x).tolist() == [[12.0] * 4]
    assert (model.experts.w2_weight == -4.0).all()


@pytest.mark.parametrize("kind", ["quantisation method", "layer"])
def test_an_unknown_kind_of_layer_is_refused_by_name(kind: str) -> None:
    """Neither an unknown conversion nor an unknown layer with parameters is left stale."""
    model = Model()
    if kind == "layer":
        model.activation = nn.PReLU()
        expected = "weights of activation .* kind PReLU"
    else:
        cast(Any, model.linear).quant_method = Fp8MoEMethod()
        expected = "weights of linear .* kind Fp8MoEMethod"
    with pytest.raises(ValueError, match=expected):
        WeightUpdate(model, lambda module: {}, torch.bfloat16)


def test_experts_of_a_backend_that_reorders_weights_are_refused_by_name() -> None:
    """Whether a backend keeps or packs plain weights is known of CPU and TRITON alone."""
    model = Model()
    experts = cast(Any, model.experts)
    experts.quant_method = UnquantizedFusedMoEMethod("TRITON")
    WeightUpdate(model, lambda module: {}, torch.bfloat16)
    experts.quant_method = UnquantizedFusedMoEMethod("FLASHINFER_CUTLASS")
    with pytest.raises(ValueError, match="experts cannot .* backend FLASHINFER_CUTLASS .*TRITON"):
        WeightUpdate(model, lambda module: {}, torch.bfloat16)


def test_a_plan_of_other_parameters_is_refused_with_the_difference_both_ways() -> None:
    """Ten names a side, the number of the rest, and both shapes; nothing when they agree."""
    _, update = loaded()
    update.require(update.load_time_shapes())
    planned = update.load_time_shapes() | {f"extra.{i:02}": (1,) for i in range(12)}
    del planned["norm.weight"]
    planned["linear.weight"] = (4, 2)
    with pytest.raises(ValueError) as caught:
        update.require(planned)
    message = str(caught.value)
    assert "1 only in the engine: norm.weight;" in message
    assert "12 only in the plan: extra.00, " in message
    assert "extra.09 and 2 more;" in message and "extra.10" not in message
    assert "1 of another shape: linear.weight ((4, 3) in the engine, (4, 2) planned)" in message
    assert "\n" not in message
