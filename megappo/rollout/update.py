"""Writing new weights straight into a loaded vLLM model: destinations, then finishers.

Boxes of the layout algebra describe a parameter as it is while a checkpoint loads. After
loading, vLLM turns some layers into what their kernel wants (on a CPU, linears are packed and
the plain weight is dropped). ``begin`` gives one plain tensor per parameter to write into;
``finish`` runs the same conversion again. A kind of layer without a known finisher is refused
when the engine starts, never left silently stale.

It knows no plan, no process group and no request; ``VLLMEngine`` guards the time between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from megappo.weights.hf_files import listing

Shape = tuple[int, ...]
# Backends of vLLM's unquantised experts whose conversion is known. TRITON was not run: it is
# the one backend on CUDA that computes with the plain weights, by vLLM's source.
EXPERT_BACKENDS = ("CPU", "TRITON")


def _repack(module: Any) -> None:
    """Run the layer's own conversion after loading; a no-op where the plain weight is used."""
    module.quant_method.process_weights_after_loading(module)


def _keep(module: nn.Module) -> None:
    """The layer computes with the plain parameter."""


def _repack_experts(module: Any) -> None:
    """Run the conversion of the experts' kernel; a no-op where the plain weight is used.

    The layer's own conversion reaches the kernel only the first time that it is called.
    """
    kernel = module.quant_method.moe_kernel
    kernel.fused_experts.process_weights_after_loading(module)


# Per kind of layer: the class of its quantisation method, or of the layer if it has none.
_FINISHERS: dict[str, Callable[[nn.Module], None]] = {
    "UnquantizedLinearMethod": _repack,
    "UnquantizedEmbeddingMethod": _repack,
    "UnquantizedFusedMoEMethod": _repack_experts,
    "RMSNorm": _keep,
    "LayerNorm": _keep,
}


def _kind(module: nn.Module) -> str:
    quant_method = getattr(module, "quant_method", None)
    return type(module if quant_method is None else quant_method).__name__


def _finisher(path: str, module: nn.Module) -> Callable[[nn.Module], None]:
    """How the weights of a layer become what its kernel reads.

    Raises:
        ValueError: nobody knows.
    """
    kind = _kind(module)
    finisher = _FINISHERS.get(kind)
    if finisher is None:
        raise ValueError(
            f"weights of {path} cannot be updated: no finisher is known for a vLLM layer "
            f"of kind {kind} (known: {', '.join(_FINISHERS)})"
        )
    if finisher is _repack_experts:
        method: Any = module.quant_method
        backend = method.unquantized_backend.name
        if backend not in EXPERT_BACKENDS:
            raise ValueError(
                f"weights of {path} cannot be updated: no finisher is known for vLLM's expert "
                f"backend {backend} (known: {', '.join(EXPERT_BACKENDS)})"
            )
    return finisher


class WeightUpdate:
    """The parameters of one engine rank, as they are at load time."""

    def __init__(
        self,
        model: nn.Module,
        recorded: Callable[[nn.Module], dict[str, torch.Tensor]],
        dtype: torch.dtype,
    ) -> None:
        """List the parameters and their finishers.

        Args:
            model: the loaded vLLM model.
            recorded: per layer, the parameters that vLLM recorded before it loaded weights, as
                tensors on the meta device.
            dtype: type of the parameters at load time.

        Raises:
            ValueError: a layer with parameters is of a kind that has no finisher here.
        """
        self._dtype = dtype
        self._finishers: list[tuple[nn.Module, Callable[[nn.Module], None]]] = []
        self._slots: dict[str, tuple[nn.Module, str, Shape]] = {}
        seen: set[int] = set()
        for path, module in model.named_modules():
            own = dict(module.named_parameters(recurse=False))
            if not own:
                continue
            self._finishers.append((module, _finisher(path, module)))
            load_time = recorded(module)
            for name, parameter in own.items():
                if id(parameter) in seen:  # tied to one listed before
                    continue
                seen.add(id(parameter))
                shape = tuple((load_time[name] if name in load_time else parameter).shape)
                self._slots[f"{path}.{name}"] = (module, name, shape)

    def load_time_shapes(self) -> dict[str, Shape]:
        """Shape of every parameter of this rank, by its name in ``named_parameters``."""
        return {name: shape for name, (_, _, shape) in self._slots.items()}

    def require(self, planned: Mapping[str, Shape]) -> None:
        """Compare what a plan writes on this rank with what there is to write.

        Raises:
            ValueError: listing what is on one side only, and what differs in shape.
        """
        loaded = self.load_time_shapes()
        reshaped = [
            f"{name} ({loaded[name]} in the engine, {planned[name]} planned)"
            for name in loaded.keys() & planned.keys()
            if loaded[name] != planned[name]
        ]
        differences = [
            f"{len(found)} {what}: {listing(found)}"
            for what, found in (
                ("only in the engine", loaded.keys() - planned.keys()),
                ("only in the plan", planned.keys() - loaded.keys()),
                ("of another shape", reshaped),
            )
            if found
        ]
        if differences:
            raise ValueError(
                "the engine's parameters are not those that the weights plan writes; "
                + "; ".join(differences)
            )

    def begin(self) -> dict[str, torch.Tensor]:
        """Plain tensors of the load-time shapes, to be written whole before ``finish``.

        A live parameter is given itself, so the model computes nonsense until ``finish``.
        Packed copies are dropped first: the old and the new weights are never both whole.
        """
        for module, _ in self._finishers:
            module.__dict__.pop("cpu_linear", None)
        destinations = {}
        for name, (module, attribute, shape) in self._slots.items():
            live: nn.Parameter = getattr(module, attribute)
            if tuple(live.shape) != shape:
                data = torch.empty(shape, dtype=self._dtype, device=live.device)
                module.register_parameter(attribute, nn.Parameter(data, requires_grad=False))
            elif live.dtype != self._dtype:  # some CPU kernels widen the bias
                live.data = torch.empty(shape, dtype=self._dtype, device=live.device)
            destinations[name] = getattr(module, attribute).data
        return destinations

    def finish(self) -> None:
        """Turn what was written into what the kernels read, layer by layer."""
        with torch.no_grad():
            for module, finisher in self._finishers:
                finisher(module)
