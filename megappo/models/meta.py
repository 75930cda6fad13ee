"""A model without memory: Megatron's modules with parameters on torch's meta device.

They know every parameter's name, shape and place in a distributed checkpoint, which is what
the checkpoint tools need of a model that may be larger than this machine. Weights and
forward passes need ``build``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch.overrides import TorchFunctionMode

from megappo.models.build import Head, build_model
from megappo.models.heads import ValueHead
from megappo.topology import Topology
from megappo.weights.shape import ModelShape


def build_on_meta(
    shape: ModelShape, topology: Topology, *, head: Head, dtype: torch.dtype
) -> list[GPTModel]:
    """``build_model`` with all parameters on the meta device."""
    with _OnMeta(), torch.device("meta"):
        return build_model(
            shape, topology, head=head, dtype=dtype, sequence_parallel=False, recompute=None
        )


def fresh_value_head(model: GPTModel, seed: int = 0) -> torch.Tensor:
    """The weight [1, hidden_size] that a fresh value head of this model starts with."""
    return ValueHead(model.config, seed).weight.detach()


class _OnMeta(TorchFunctionMode):
    """Sends every explicit device to meta; Megatron's layers name theirs."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        meta = torch.device("meta")
        keywords = dict(kwargs or {})
        if keywords.get("device") is not None:
            keywords["device"] = meta
        return func(*(meta if isinstance(a, torch.device) else a for a in args), **keywords)
