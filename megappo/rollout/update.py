"""Writing new weights straight into a loaded vLLM model: destinations, then finishers.

Boxes of the layout algebra describe a parameter as it is while a checkpoint loads. After
loading, vLLM turns some layers into what their kernel wants (on a CPU, linears are packed and
the plain weight is dropped). ``begin`` gives one plain tensor per parameter to write into;
``finish`` runs the same conversion again. A kind of layer without a known finisher is refused
when the engine starts, never left silently stale.

It knows no plan, no process group and no request; ``VLLMEngine`` guards the time between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def _repack(module: Any) -> None:
    """Run the layer's own conversion after loading; a no-op where the plain weight is used."""
    module.quant_method.process_weights_after_loading(module)


def _keep(module: nn.Module) -> None:
    """The layer computes with the plain parameter."""


# Per kind of layer: the class of its quantisation method, or of the layer if it has none.
_FINISHERS: dict[str, Callable[[nn.Module], None]] = {
    "UnquantizedLinearMethod": _repack,
    "UnquantizedEmbeddingMethod": _repack,
    "RMSNorm": _keep,
    "LayerNorm": _keep,
}


def _kind(module: nn.Module) -> str:
    quant_method = getattr(module, "quant_method", None)
    return type(module if quant_method is None else quant_method).__name__


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
        self._slots: dict[str, tuple[nn.Module, str, tuple[int, ...]]] = {}
        seen: set[int] = set()
        for path, module in model.named_modules():
            own = dict(module.named_parameters(recurse=False))
            if not own:
                continue
            finisher = _FINISHERS.get(_kind(module))
            if finisher is None:
                raise ValueError(
                    f"weights of {path} cannot be updated: no finisher is known for a vLLM layer "
                    f"of kind {_kind(module)} (known: {', '.join(_FINISHERS)})"
                )
            self._finishers.append((module, finisher))
            load_time = recorded(module)
            for name, parameter in own.items():
                if id(parameter) in seen:  # tied to one listed before
                    continue
                seen.add(id(parameter))
                shape = tuple((load_time[name] if name in load_time else parameter).shape)
                self._slots[f"{path}.{name}"] = (module, name, shape)

    def load_time_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every parameter of this rank, by its name in ``named_parameters``."""
        return {name: shape for name, (_, _, shape) in self._slots.items()}

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
