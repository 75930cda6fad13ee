"""Which device this process computes on and how ranks talk: CUDA with NCCL, or CPU with gloo."""

from __future__ import annotations

from typing import Literal

import torch


def is_cuda() -> bool:
    """Whether torch sees a CUDA device."""
    return torch.cuda.is_available()


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
