"""Which device this process computes on and how ranks talk: CUDA with NCCL, or CPU with gloo."""

from __future__ import annotations

import importlib.util
from typing import Literal

import torch

Implementation = Literal["local", "transformer_engine"]
"""Layers of plain torch, or of TransformerEngine."""


def is_cuda() -> bool:
    """Whether torch sees a CUDA device."""
    return torch.cuda.is_available()


def has_transformer_engine() -> bool:
    """Whether layers can be TransformerEngine's: it needs CUDA, and its package."""
    return is_cuda() and importlib.util.find_spec("transformer_engine") is not None


def layer_implementation(asked: Implementation | None) -> Implementation:
    """What layers are made of: as asked; by default TransformerEngine's where they can be.

    Raises:
        ValueError: TransformerEngine is asked for and cannot be had.
    """
    if asked == "transformer_engine" and not has_transformer_engine():
        lacks = "the package transformer_engine" if is_cuda() else "a CUDA device"
        raise ValueError(
            f"megatron.transformer_impl = transformer_engine needs {lacks}, which this machine "
            "lacks; give local, or null for whatever is there"
        )
    return asked or ("transformer_engine" if has_transformer_engine() else "local")


def device() -> torch.device:
    """The device that parameters and batches live on."""
    return torch.device("cuda", torch.cuda.current_device()) if is_cuda() else torch.device("cpu")


def set_device(local_rank: int) -> None:
    """Bind this process to the GPU of its local rank; nothing to do on CPU."""
    if is_cuda():
        torch.cuda.set_device(local_rank)


def backend() -> Literal["nccl", "gloo"]:
    """The ``torch.distributed`` backend of process groups that carry device tensors."""
    return "nccl" if is_cuda() else "gloo"
