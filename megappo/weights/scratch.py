"""Memory that one tensor after another is put into, so that none is allocated for each.

Fresh memory costs more than a copy: the kernel clears every page of it first.
"""

from __future__ import annotations

from math import prod

import torch


class Scratch:
    """Memory as large as the largest tensor so far.

    Attributes:
        tensor: The current tensor.
    """

    def __init__(self) -> None:
        """Starts with none."""
        self._memory = torch.empty(0, dtype=torch.uint8)
        self.tensor = self._memory

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor; ends the use of the one before."""
        num_bytes = prod(shape) * dtype.itemsize
        if num_bytes > len(self._memory):
            self.tensor = self._memory = torch.empty(0, dtype=torch.uint8)
            self._memory = torch.empty(num_bytes, dtype=torch.uint8)
        self.tensor = self._memory[:num_bytes].view(dtype).view(shape)
        return self.tensor
