"""FP8 rounding against tables made from the formats' bits, scales and gradients by hand."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest
import torch

from megappo.models.fp8 import AMAX_HISTORY_LEN, Fp8
from megappo.models.fp8_emulation import (
    Fp8Multiply,
    block_scales,
    round_to_fp8,
    scale_of,
)
from megappo.topology import Topology

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def magnitudes(fp8_type: torch.dtype) -> npt.NDArray[np.float64]:
    """All finite numbers of a type from 0 up, in the order of their codes, by its bits."""
    exponent_bits, mantissa_bits = (4, 3) if fp8_type == E4M3 else (5, 2)
    bias = 2 ** (exponent_bits - 1) - 1
    steps = 2**mantissa_bits
    values = []
    for code in range(128):
        exponent, mantissa = divmod(code, steps)
        if exponent == 0:
            values.append(mantissa / steps * 2.0 ** (1 - bias))
        else:
            values.append((1 + mantissa / steps) * 2.0 ** (exponent - bias))
    # E4M3 gives up one code to NaN; E5M2 keeps its last exponent for infinity and NaN.
    return np.array(values[:-1] if fp8_type == E4M3 else values[:-4])


def nearest(values: npt.NDArray[np.float64], fp8_type: torch.dtype) -> npt.NDArray[np.float64]:
    """The nearest numbers of a type, the even code of two; the largest one for what is larger."""
    table = magnitudes(fp8_type)
    size = np.abs(values)
    below = np.clip(np.searchsorted(table, size, side="right") - 1, 0, len(table) - 2)
    down, up = size - table[below], table[below + 1] - size
    code = np.where((down < up) | ((down == up) & (below % 2 == 0)), below, below + 1)
    signed: npt.NDArray[np.float64] = np.copysign(table[code], values)
    return signed


def test_the_tables_are_the_formats() -> None:
    """Known corners: smallest and largest numbers of both types."""
    e4m3, e5m2 = magnitudes(E4M3), magnitudes(E5M2)
    assert (e4m3[1], e4m3[8], e4m3[-1]) == (2.0**-9, 2.0**-6, 448)
    assert (e5m2[1], e5m2[4], e5m2[-1]) == (2.0**-16, 2.0**-14, 57344)


@pytest.mark.parametrize("fp8_type", [E4M3, E5M2])
@pytest.mark.parametrize("scale", [1.0, 0.37, 96.0])
def test_rounding_is_to_the_nearest(fp8_type: torch.dtype, scale: float) -> None:
    """Every number of the type, the middle between any two, and random ones of every size."""
    table = magnitudes(fp8_type)
    generator = np.random.default_rng(0)
    spread = generator.standard_normal(5000) * 2.0 ** generator.integers(-20, 18, 5000)
    wanted = np.concatenate([table, (table[1:] + table[:-1]) / 2, spread, [1e9, -1e9]])
    given = torch.tensor(np.concatenate([wanted, -wanted]) / scale, dtype=torch.float32)
    factor = torch.tensor(scale)
    expected = nearest((given * factor).double().numpy(), fp8_type)
    found = round_to_fp8(given, fp8_type, factor)
    assert found.dtype == torch.float32
    assert torch.equal(found, torch.tensor(expected, dtype=torch.float32) / factor)


def test_what_is_not_finite_is_not_hidden() -> None:
    """Infinity and NaN come out as they went in, under every recipe's scale."""
    bad = torch.tensor([[1.0, float("inf"), float("nan"), -float("inf")]])
    for scale in (torch.tensor(2.0), block_scales(bad, E4M3, 1)):
        found = round_to_fp8(bad, E4M3, scale)[0]
        assert found[1] == float("inf") and found[2].isnan() and found[3] == -float("inf")


def test_scales_by_hand() -> None:
    """The largest magnitude becomes the largest number; zeros and tiny tensors have a scale."""
    amax = torch.tensor([2.0, 448.0, 0.0, 1e-40])
    expected = torch.tensor([224.0, 1.0, 1.0, torch.finfo(torch.float32).max])
    assert torch.equal(scale_of(amax, E4M3), expected)
    assert scale_of(torch.tensor(7.0), E5M2) == 8192


@pytest.mark.parametrize(
    ("amax", "scale"), [(448, 1), (449, 0.5), (3, 128), (3.5, 128), (0.1, 4096)]
)
def test_block_scales_by_hand(amax: float, scale: float) -> None:
    """Powers of two, so that the largest magnitude of the block does not exceed 448."""
    assert block_scales(torch.tensor([[0.0, -amax]]), E4M3, 1).unique().tolist() == [scale]


@pytest.mark.parametrize("rows", [1, 128])
@pytest.mark.parametrize("shape", [(256, 256), (130, 300), (3, 7)])
def test_block_scales_block_by_block(shape: tuple[int, int], rows: int) -> None:
    """Against a plain loop over blocks, the smaller ones at the edges too."""
    generator = torch.Generator().manual_seed(1)
    tensor = torch.randn(shape, generator=generator) * torch.arange(1, shape[1] + 1)
    found = block_scales(tensor[:, None], E4M3, rows)[:, 0]
    for top in range(0, shape[0], rows):
        for left in range(0, shape[1], 128):
            box = (slice(top, top + rows), slice(left, left + 128))
            largest = float(tensor[box].abs().max())
            [scale] = found[box].unique().tolist()
            assert 224 < largest * scale <= 448 and np.log2(scale) % 1 == 0


class Recorder:
    """A plain product that keeps its operands."""

    def __call__(self, input: torch.Tensor, weight: torch.Tensor, **unused: Any) -> torch.Tensor:
        """``input`` times ``weight``."""
        self.input, self.weight = input.detach(), weight.detach()
        return input @ weight.t()


def layer(fp8: Fp8) -> tuple[Recorder, Fp8Multiply]:
    """The emulation of one layer, and what it multiplies with."""
    plain = Recorder()
    return plain, Fp8Multiply(plain, fp8, torch.device("cpu"))


ALONE: dict[str, Any] = {"sequence_parallel": False, "tp_group": None}


@pytest.mark.parametrize("form", ["hybrid", "e4m3"])
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise"])
def test_gradients_are_products_of_rounded_operands(
    form: Literal["hybrid", "e4m3"], recipe: Literal["tensorwise", "delayed", "blockwise"]
) -> None:
    """Both products of the backward pass use the operands that the forward pass used."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(5, 1, 200, generator=generator, requires_grad=True)
    w = torch.randn(150, 200, generator=generator, requires_grad=True)
    dy = torch.randn(5, 1, 150, generator=generator) * 1e-4

    def rounded(tensor: torch.Tensor, fp8_type: torch.dtype, rows: int) -> torch.Tensor:
        if recipe == "blockwise":
            scale = block_scales(tensor, fp8_type, rows)
        else:  # the first pass of delayed scaling knows no other tensor
            scale = torch.tensor(torch.finfo(fp8_type).max) / tensor.abs().max()
        return round_to_fp8(tensor, fp8_type, scale)

    plain, multiply = layer(Fp8(form, recipe))
    y = multiply(input=x, weight=w, **ALONE)
    y.backward(dy)
    qx, qw = rounded(x, E4M3, 1), rounded(w, E4M3, 128)
    qdy = rounded(dy, E5M2 if form == "hybrid" else E4M3, 1)
    assert torch.equal(plain.input, qx) and torch.equal(plain.weight, qw)
    assert not torch.equal(qx, x) and not torch.equal(qw, w) and not torch.equal(qdy, dy)
    torch.testing.assert_close(y, qx @ qw.t())
    torch.testing.assert_close(x.grad, qdy @ qw)
    torch.testing.assert_close(w.grad, qdy.flatten(0, 1).t() @ qx.flatten(0, 1))


def test_delayed_scaling_looks_back() -> None:
    """Scales of several steps by hand: the largest of those before, saturating what is larger."""
    plain, multiply = layer(Fp8("hybrid", "delayed"))
    weight = torch.ones(1, 1, requires_grad=True)

    def step(value: float) -> float:
        x = torch.full((1, 1), value)
        multiply(input=x, weight=weight, **ALONE).backward(torch.full((1, 1), value / 8))
        return float(plain.input)

    # The history is empty at first; then 4 is cut to the largest seen, 1; then it is known.
    assert [step(value) for value in (1.0, 4.0, 2.0)] == [1.0, 1.0, 2.0]
    assert multiply.amax_history[0, :4].tolist() == [2, 4, 1, 0]
    assert multiply.amax_history[1, :4].tolist() == [1, 1, 1, 0]
    assert multiply.amax_history[2, :4].tolist() == [2 / 8, 4 / 8, 1 / 8, 0]
    with torch.no_grad():  # a pass that only looks leaves no trace
        multiply(input=torch.full((1, 1), 50.0), weight=weight, **ALONE)
    assert float(plain.input) == 4 and multiply.amax_history[0, 0] == 2
    for _ in range(AMAX_HISTORY_LEN - 2):
        step(2.0)
    assert step(8.0) == 4  # the 4 is the oldest of the history by now
    assert step(8.0) == 8


def test_a_frozen_layer_and_no_tokens() -> None:
    """The reference's history stays empty; an expert without tokens is no error."""
    for recipe in ("tensorwise", "delayed", "blockwise"):
        plain, multiply = layer(Fp8("hybrid", recipe))
        multiply(input=torch.ones(2, 3), weight=torch.ones(4, 3), **ALONE)
        assert not multiply.amax_history.any()
        weight = torch.ones(4, 3, requires_grad=True)
        multiply(input=torch.ones(0, 3), weight=weight, **ALONE).sum().backward()
        assert plain.input.shape == (0, 3)
        assert weight.grad is not None and not weight.grad.any()


def test_bf16_stays_bf16() -> None:
    """Operands have the model's type, within a rounding of the FP8 numbers."""
    plain, multiply = layer(Fp8())
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    multiply(input=x.bfloat16(), weight=x.bfloat16(), **ALONE)
    assert plain.input.dtype == plain.weight.dtype == torch.bfloat16
    exact = round_to_fp8(x.bfloat16().float(), E4M3, 448 / x.bfloat16().float().abs().max())
    torch.testing.assert_close(plain.input.float(), exact, rtol=2**-8, atol=0)


def test_layers_that_are_left_alone() -> None:
    """Counted from both ends of the whole model."""
    fp8 = Fp8(layers_at_start=1, layers_at_end=2)
    assert [fp8.covers(layer, 5) for layer in range(5)] == [False, True, True, False, False]
    assert all(Fp8().covers(layer, 5) for layer in range(5))


@pytest.mark.parametrize(
    ("fp8", "recompute", "words"),
    [
        (Fp8(recipe="mxfp8"), None, "megatron.fp8_recipe = mxfp8"),
        (Fp8(recipe="delayed"), "full", "megatron.recompute_granularity = full"),
        (Fp8(layers_at_start=3), None, "megatron.num_layers_at_start_in_bf16 = 3"),
        (Fp8(layers_at_end=3), None, "megatron.num_layers_at_end_in_bf16 = 3"),
    ],
)
def test_what_cannot_be_done_is_refused(
    fp8: Fp8, recompute: Literal["full"] | None, words: str
) -> None:
    """One line that names the key; TransformerEngine can do what the emulation cannot."""
    topology = Topology(2, pp=2)
    with pytest.raises(ValueError) as error:
        fp8.check(5, topology, recompute=recompute, emulated=True)
    assert words in str(error.value) and "\n" not in str(error.value)
    if not fp8.layers_at_start + fp8.layers_at_end:
        fp8.check(5, topology, recompute=recompute, emulated=False)
    Fp8("e4m3", "delayed", 2, 2).check(5, topology, recompute="selective", emulated=True)
