"""The parameters of a model in a Megatron-Core distributed checkpoint, one at a time.

A model on torch's meta device says which boxes of which stored tensors make up a parameter,
as Megatron-Core's own loading would; ``stored`` reads them. Knows no Hugging Face names.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import apply_factories

from megappo.checkpoint.sharded import leaves, sharded_state
from megappo.checkpoint.stored import StoredModel, View
from megappo.weights.hf_files import listing
from megappo.weights.scratch import Scratch


def stored_parameters(
    stored: StoredModel, modules: Sequence[Any], vocab_size: int
) -> StoredParameters:
    """The parameters of a model, which must be the stored one.

    Args:
        stored: the checkpoint.
        modules: its chunks on the meta device, not cut.
        vocab_size: rows that padded tensors must at least have.

    Raises:
        ValueError: listing what the checkpoint lacks, has too much, or has in another size.
    """
    views = _views(modules)
    sizes: dict[str, tuple[int, ...]] = {}
    for view in (view for parts in views.values() for view in parts):
        end = tuple(a + n for a, n in zip(view.offset, view.shape, strict=True))
        before = sizes.get(view.key, end)
        sizes[view.key] = tuple(max(pair) for pair in zip(before, end, strict=True))
    if absent := set(sizes) - set(stored.entries):
        raise ValueError(f"{stored.folder} lacks {len(absent)} tensors: {listing(absent)}")
    if odd := set(stored.entries) - set(sizes):
        raise ValueError(
            f"{stored.folder} holds {len(odd)} tensors that its configuration does not speak "
            f"of: {listing(odd)}"
        )
    padded = {view.key for parts in views.values() for view in parts if view.padded}
    for key, size in sizes.items():
        found = stored.entries[key][1]
        enough = key in padded and found[1:] == size[1:] and found[0] >= vocab_size
        if found != size and not enough:
            raise ValueError(
                f"{stored.folder}: {key} has size {found}, its configuration says {size}"
            )
    return StoredParameters(stored, modules, views)


class StoredParameters:
    """A model's parameters in a distributed checkpoint, by chunk number and Megatron's name.

    Attributes:
        shapes: shape of each parameter.
    """

    def __init__(
        self, stored: StoredModel, modules: Sequence[Any], views: dict[str, list[View]]
    ) -> None:
        self._stored = stored
        self._views = views
        self._last: str | None = None
        self._scratch = Scratch()
        self.shapes = {
            f"{chunk}.{name}": tuple(parameter.shape)
            for chunk, module in enumerate(modules)
            for name, parameter in module.named_parameters()
        }

    def dtype(self, name: str) -> torch.dtype:
        """Type in which a parameter is stored."""
        return self._stored.entries[self._views[name][0].key][0]

    def part(self, name: str, start: int, count: int) -> torch.Tensor:
        """A run of a parameter's elements, in the order of memory and in the stored type.

        Padding that is not stored is zero. Not to be written, and not to be kept: the next call
        may use the memory again.
        """
        for view in self._views[name]:
            if (view.start, prod(view.shape)) == (start, count):
                exact = self._stored.exact(view)
                if exact is not None:
                    return exact.reshape(-1)
        if self._last != name:
            self._last = None
            self._fill(name)
            self._last = name
        return self._scratch.tensor.view(-1)[start : start + count]

    def _fill(self, name: str) -> None:
        target = self._scratch.take(self.shapes[name], self.dtype(name))
        for view in self._views[name]:
            if view.padded:
                target[self._stored.entries[view.key][1][0] :] = 0
            self._stored.read(view, target.as_strided(view.shape, view.stride, view.start))


def _views(modules: Sequence[Any]) -> dict[str, list[View]]:
    """The boxes that each parameter consists of."""
    names = {
        parameter.untyped_storage()._cdata: f"{chunk}.{name}"
        for chunk, module in enumerate(modules)
        for name, parameter in module.named_parameters()
    }
    state = sharded_state(modules, None, is_loading=False)
    apply_factories(state)
    views: dict[str, list[View]] = {name: [] for name in names.values()}
    for shard in leaves(state):
        if isinstance(shard, ShardedTensor):
            data = shard.data
            extra = (1,) * shard.prepend_axis_num
            views[names[data.untyped_storage()._cdata]].append(
                View(
                    key=shard.key,
                    offset=tuple(shard.global_offset),
                    shape=(*extra, *data.shape),
                    start=data.storage_offset(),
                    stride=(*extra, *data.stride()),
                    padded=shard.allow_shape_mismatch,
                )
            )
    return views
