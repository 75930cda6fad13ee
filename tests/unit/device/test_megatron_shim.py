"""What the shim leaves behind in a process that has no CUDA device."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch

from megappo.device import megatron_shim, platform
from megappo.device.fused_adam import FusedAdam


@pytest.fixture(autouse=True)
def _without_cuda() -> None:
    """The shim is for machines without CUDA."""
    assert megatron_shim.is_needed()


def test_torch_answers_for_the_cpu() -> None:
    """The symbols that Megatron-Core calls are there, and stay on the CPU."""
    importlib.import_module("megatron.core")
    tensor = torch.ones(3)
    assert str(torch.cuda.current_device()) == "cpu"
    assert tensor.cuda() is tensor
    assert torch.ones(2, device=torch.cuda.current_device()).device.type == "cpu"
    torch.cuda.synchronize()
    torch.cuda.manual_seed(11)
    state = torch.cuda.get_rng_state()
    first = torch.rand(4)
    torch.set_rng_state(state)
    assert torch.equal(torch.rand(4), first)


def test_optimizer_keeps_its_state_as_fused_adam_does() -> None:
    """Both optimizer modules use our Adam and take it for apex's."""
    optimizer = importlib.import_module("megatron.core.optimizer")
    distributed = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    assert optimizer.Adam is FusedAdam and distributed.Adam is FusedAdam
    assert not optimizer.USING_PYTORCH_OPTIMIZER
    assert distributed.HAVE_APEX_OR_TE and distributed.USING_APEX_OPTIMIZER


def test_nothing_is_compiled() -> None:
    """``jit_fuser`` is the identity, and inductor was not loaded for it."""
    jit = importlib.import_module("megatron.core.jit")

    def function() -> None:
        """Nothing."""

    assert jit.jit_fuser(function) is function


def test_cuda_packages_are_hidden() -> None:
    """An installed TransformerEngine or apex is not importable in this process."""
    importlib.import_module("megatron.core")
    for package in megatron_shim.CUDA_ONLY_PACKAGES:
        assert sys.modules[package] is None
        with pytest.raises(ImportError):
            importlib.import_module(package)


def test_rng_tracker_gives_each_region_its_own_stream() -> None:
    """Two regions draw different numbers, each continues its own, the default is unmoved."""
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    tracker = random.CudaRNGStatesTracker()
    tracker.reset()
    tracker.add("a", 1)
    tracker.add("b", 2)
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    draws: dict[str, list[torch.Tensor]] = {}
    for name in ("a", "b", "a"):
        with tracker.fork(name):
            draws.setdefault(name, []).append(torch.rand(2))
    torch.manual_seed(1)
    assert torch.equal(torch.cat(draws["a"]), torch.cat((torch.rand(2), torch.rand(2))))
    assert not torch.equal(draws["a"][0], draws["b"][0])
    torch.manual_seed(3)
    with tracker.fork("b"):
        torch.rand(5)
    assert torch.equal(torch.rand(2), expected)


def test_expert_dispatch_needs_no_stream() -> None:
    """The router has no fused GEMM; the dispatcher keeps counts and makes no CUDA stream."""
    moe = "megatron.core.transformer.moe"
    assert importlib.import_module(f"{moe}.moe_utils").te_general_gemm is None
    module = importlib.import_module(f"{moe}.token_dispatcher")
    dispatcher = object.__new__(module.MoEAlltoAllTokenDispatcher)
    dispatcher.input_splits, dispatcher.output_splits = torch.tensor([2, 0, 3]), None
    counts = torch.tensor([1, 4])
    for point in ("before_permutation_1", "before_ep_alltoall", "before_finish"):
        assert dispatcher._maybe_dtoh_and_synchronize(point, counts) is counts
    assert dispatcher.input_splits == [2, 0, 3] and dispatcher.output_splits is None
    assert dispatcher.cuda_dtoh_stream is not None


def test_platform_is_cpu_and_gloo() -> None:
    """The platform layer agrees with torch."""
    assert not platform.is_cuda()
    assert platform.device() == torch.device("cpu")
    assert platform.backend() == "gloo"
    platform.set_device(3)
