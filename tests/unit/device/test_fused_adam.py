"""The stand-in for FusedAdam: arithmetic of torch's Adam, state layout of apex's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from megappo.device.fused_adam import FusedAdam


def make_params(seed: int = 0) -> list[torch.nn.Parameter]:
    """Three parameters of unlike shapes, one of which never gets a gradient."""
    generator = torch.Generator().manual_seed(seed)
    shapes: list[tuple[int, ...]] = [(5, 7), (3,), (2, 2, 2)]
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def set_gradients(params: list[torch.nn.Parameter], step: int) -> None:
    """The same gradients for every optimizer; the last parameter has none."""
    generator = torch.Generator().manual_seed(100 + step)
    for p in params[:-1]:
        p.grad = torch.randn(p.shape, generator=generator)


@pytest.mark.parametrize("adam_w_mode", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_equals_torch(adam_w_mode: bool, weight_decay: float) -> None:
    """Ten steps with a changing learning rate agree with AdamW and Adam to rounding."""
    options: dict[str, Any] = {
        "lr": 1e-2,
        "betas": (0.9, 0.95),
        "eps": 1e-8,
        "weight_decay": weight_decay,
    }
    ours, theirs = make_params(), make_params()
    optimizer = FusedAdam(ours, adam_w_mode=adam_w_mode, **options)
    oracle = (torch.optim.AdamW if adam_w_mode else torch.optim.Adam)(theirs, **options)
    for step in range(10):
        for each, params in ((optimizer, ours), (oracle, theirs)):
            each.param_groups[0]["lr"] = 1e-2 / (1 + step)
            set_gradients(params, step)
            each.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-6)
    assert torch.equal(ours[-1], make_params()[-1])


def test_state_is_laid_out_as_fused_adams() -> None:
    """``step`` is an int of the group; a parameter's state holds the two moments alone."""
    params = make_params()
    optimizer = FusedAdam(params)
    assert "step" not in optimizer.param_groups[0]
    for step in range(3):
        set_gradients(params, step)
        optimizer.step()
    assert optimizer.param_groups[0]["step"] == 3
    assert set(optimizer.state[params[0]]) == {"exp_avg", "exp_avg_sq"}
    assert params[-1] not in optimizer.state or not optimizer.state[params[-1]]


def test_state_round_trips() -> None:
    """Three steps, save, load into a fresh optimizer, three steps = six steps, bit for bit."""
    straight = make_params()
    optimizer = FusedAdam(straight, lr=1e-2)
    resumed: list[torch.nn.Parameter] = []
    other: FusedAdam | None = None
    for step in range(6):
        if step == 3:
            resumed = [torch.nn.Parameter(p.detach().clone()) for p in straight]
            other = FusedAdam(resumed, lr=1e-2)
            other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        set_gradients(straight, step)
        optimizer.step()
        if other is not None:
            set_gradients(resumed, step)
            other.step()
    for a, b in zip(straight, resumed, strict=True):
        assert torch.equal(a, b)


def test_empty_group_does_not_step() -> None:
    """A parameter group without gradients takes no part, as FusedAdam's does not."""
    a, b = make_params()[:2]
    optimizer = FusedAdam([{"params": [a]}, {"params": [b]}])
    a.grad = torch.ones_like(a)
    optimizer.step()
    assert [g.get("step") for g in optimizer.param_groups] == [1, None]
