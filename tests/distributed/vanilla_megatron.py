"""Starts ``vanilla_load`` where there is no CUDA: a program that knows no megappo.

    python -m tests.distributed.vanilla_megatron SETTINGS.json

Patches torch where Megatron-Core names a CUDA device, before it is imported, and nothing else.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

import torch


def _cpu(*_: Any, **__: Any) -> torch.device:
    return torch.device("cpu")


def _unchanged(value: Any, *_: Any, **__: Any) -> Any:
    return value


if __name__ == "__main__":
    for owner, name, function in (
        (torch.cuda, "current_device", _cpu),
        (torch.Tensor, "cuda", _unchanged),
        (torch, "compile", _unchanged),  # Megatron-Core compiles functions while it loads
    ):
        setattr(owner, name, function)
    runpy.run_module("tests.distributed.vanilla_load", run_name="__main__")
    assert not [name for name in sys.modules if name.split(".")[0] == "megappo"]
