"""What is patched so that Megatron-Core runs on a CPU, symbol by symbol with its reason.

Used by ``import_hook`` only, and only where torch sees no CUDA device: on CUDA nothing here
is applied. Tested with the versions in ``import_hook.TESTED_VERSIONS``. It knows nothing
about models.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, cast

import torch

from megappo.device.fused_adam import FusedAdam

# Megatron-Core writes the device as a literal in these modules. Rewriting the constants while
# the module loads costs nothing per operation; a TorchFunctionMode costs a third of a step.
DEVICE_LITERALS = {
    "cuda": "cpu",
    "torch.cuda.FloatTensor": "torch.FloatTensor",
    "torch.cuda.HalfTensor": "torch.HalfTensor",
    "torch.cuda.BFloat16Tensor": "torch.BFloat16Tensor",
}
MODULES_WITH_DEVICE_LITERALS = frozenset(
    f"megatron.core.{name}"
    for name in (
        "tensor_parallel.data",
        "tensor_parallel.random",
        "transformer.utils",
        "transformer.moe.moe_utils",
        "optimizer.optimizer",
        "optimizer.distrib_optimizer",
        "optimizer.clip_grads",
        "optimizer.grad_scaler",
        "pipeline_parallel.schedules",
        "utils",
        "dist_checkpointing.exchange_utils",
        "dist_checkpointing.strategies.state_dict_saver",
    )
)
# Packages with CUDA kernels that Megatron-Core would prefer to its plain torch layers.
CUDA_ONLY_PACKAGES = ("transformer_engine", "apex")


def is_needed() -> bool:
    """Whether this machine has no CUDA device."""
    return not torch.cuda.is_available()


def _get_rng_state(*_: Any, **__: Any) -> torch.Tensor:
    return torch.default_generator.get_state()


def _set_rng_state(new_state: torch.Tensor, *_: Any, **__: Any) -> None:
    torch.default_generator.set_state(new_state)


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


def _current_device() -> torch.device:
    return torch.device("cpu")


def _synchronize(*_: Any, **__: Any) -> None:
    """Nothing to wait for: CPU operations are done when they return."""


def _stay_on_cpu(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return tensor


def patch_process() -> None:
    """Patch torch and hide CUDA-only packages, before ``megatron.core`` starts to load."""
    modules = cast(dict[str, ModuleType | None], sys.modules)  # None: not importable
    for package in CUDA_ONLY_PACKAGES:
        modules.setdefault(package, None)
    replacements: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
        # Buffers are created with device=torch.cuda.current_device().
        (torch.cuda, "current_device", _current_device),
        # Timers and the pipeline schedules synchronise.
        (torch.cuda, "synchronize", _synchronize),
        # The RNG tracker keeps one state per parallel region, in the device's generator.
        (torch.cuda, "get_rng_state", _get_rng_state),
        (torch.cuda, "manual_seed", _manual_seed),
        # Tied embeddings under pipeline parallelism and loaded checkpoints call .cuda().
        (torch.Tensor, "cuda", _stay_on_cpu),
    )
    for owner, name, function in replacements:
        setattr(owner, name, function)


def _patch_jit(module: ModuleType) -> None:
    """``jit_fuser`` is torch.compile, which pulls in inductor: 2 s and 70 MB per process."""
    module.disable_jit_fuser()


def _patch_random(module: ModuleType) -> None:
    """The tracker and activation recomputation reach into torch._C's CUDA generators."""
    vars(module).update(_get_cuda_rng_state=_get_rng_state, _set_cuda_rng_state=_set_rng_state)


def _patch_optimizer(module: ModuleType) -> None:
    """The fallback, torch's AdamW, has a checkpoint that Megatron-Core cannot load."""
    vars(module).update(Adam=FusedAdam, USING_PYTORCH_OPTIMIZER=False)


def _patch_distrib_optimizer(module: ModuleType) -> None:
    """State is laid out as FusedAdam's: ``step`` in the parameter group."""
    vars(module).update(Adam=FusedAdam, HAVE_APEX_OR_TE=True, USING_APEX_OPTIMIZER=True)


def _patch_moe_utils(module: ModuleType) -> None:
    """The router asks whether TransformerEngine's GEMM is None, but does not define it without."""
    vars(module).update(te_general_gemm=None)


def _splits_as_lists(
    dispatcher: Any, point: str, tokens_per_expert: torch.Tensor | None = None
) -> torch.Tensor | None:
    """What is left of the copies to the CPU where tensors are there already."""
    for name in ("input_splits", "output_splits"):
        splits = vars(dispatcher)[name]
        if isinstance(splits, torch.Tensor):
            vars(dispatcher)[name] = splits.tolist()
    return tokens_per_expert


def _patch_token_dispatcher(module: ModuleType) -> None:
    """The dispatcher copies token counts to the CPU on a CUDA stream of its own."""
    dispatcher = module.MoEAlltoAllTokenDispatcher
    dispatcher.cuda_dtoh_stream = object()  # were it None, a CUDA stream would be made
    dispatcher._maybe_dtoh_and_synchronize = _splits_as_lists


PATCH_AFTER_LOAD: dict[str, Callable[[ModuleType], None]] = {
    "megatron.core.jit": _patch_jit,
    "megatron.core.tensor_parallel.random": _patch_random,
    "megatron.core.optimizer": _patch_optimizer,
    "megatron.core.optimizer.distrib_optimizer": _patch_distrib_optimizer,
    "megatron.core.transformer.moe.moe_utils": _patch_moe_utils,
    "megatron.core.transformer.moe.token_dispatcher": _patch_token_dispatcher,
}


@contextlib.contextmanager
def quiet_import() -> Iterator[None]:
    """Silence what ``megatron.core`` says of missing CUDA packages and its own old imports."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
