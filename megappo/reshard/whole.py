"""Whole checkpoint tensors out of the local tensors of one rank that holds a model uncut.

The inverse of ``hf.LocalReader``: where a local tensor comes from (a distributed checkpoint,
say) is the caller's. One of them is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch

from megappo.reshard.hf import boxes_by_tensor, run_of_box
from megappo.weights.layout import Layout, box_index, unpadded
from megappo.weights.scratch import Scratch


class WholeTensors:
    """The canonical tensors of a layout of one rank.

    Args:
        layout: Where they are; rank 0 holds them all.
        part: A run of a local tensor's elements, by name, first element and number; may be used
            again for the next one.

    Attributes:
        names: Every canonical tensor, neighbours in the order of local tensors, so that reading
            in this order reads each local tensor once.
        source: The local tensor that each is a part of.
    """

    def __init__(self, layout: Layout, part: Callable[[str, int, int], torch.Tensor]) -> None:
        """Finds what lies where; reads nothing."""
        assert layout.world_size == 1
        self._layout = layout
        self._part = part
        self._scratch = Scratch()
        self._boxes: dict[str, list[int]] = {}
        self.source: dict[str, str] = {}
        by_tensor = boxes_by_tensor(layout, 0)
        for local_name, local in layout.local_ids(0).items():
            for box in by_tensor[local]:
                name = layout.canonical_names[layout.box_canonical[box]]
                self._boxes.setdefault(name, []).append(box)
                self.source[name] = local_name
        self.names = tuple(self._boxes)
        self._local_shapes = layout.local_shapes(0)
        self._id = {name: i for i, name in enumerate(layout.canonical_names)}
        self._ndim = {
            name: int(layout.local_ndim[layout.first_local[layout.box_tensor[boxes[0]]]])
            for name, boxes in self._boxes.items()
        }

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a canonical tensor."""
        return unpadded(self._layout.canonical_shapes[self._id[name]], self._ndim[name])

    def read(self, name: str) -> torch.Tensor:
        """A canonical tensor in the type of its local tensor, until the next call."""
        layout, shape, boxes = self._layout, self.shape(name), self._boxes[name]
        if len(boxes) == 1:
            run = run_of_box(layout, boxes[0])
            assert run is not None and run[1] == prod(shape), name
            return self._part(self.source[name], *run).view(shape)
        local_shape = self._local_shapes[self.source[name]]
        local = self._part(self.source[name], 0, prod(local_shape)).view(local_shape)
        whole = self._scratch.take(shape, local.dtype)
        for p in boxes:
            start, extent = layout.box_local_start[p], layout.box_extent[p]
            target = box_index(layout.box_canonical_start[p], extent, whole.dim())
            whole[target] = local[box_index(start, extent, local.dim())]
        return whole
