"""Writes a model that was never in memory as a Megatron-Core distributed checkpoint.

The model is on torch's meta device; Megatron-Core says under which key every shard of every
parameter belongs, and a callback says what is in a parameter when its turn comes. So memory
holds one parameter at a time. Knows no Hugging Face names: the callback does.
"""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import apply_factories
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megappo.checkpoint.sharded import leaves, save_strategy, sharded_state
from megappo.weights.whole_folder import write_at

ALIGNMENT = 64
# A run of a parameter's elements in memory order: by its name behind the chunk's number, the
# first element and their number. On the CPU, in the parameter's type, until the next call.
Content = Callable[[str, int, int], torch.Tensor]


def write_model(
    folder: Path, modules: Sequence[Any], content: Content, on_bytes: Callable[[int], None]
) -> None:
    """Write a model into ``folder``, which exists and is empty. All ranks call it.

    Every rank holds the whole model on the meta device and writes an equal share of it.

    Args:
        folder: of the checkpoint.
        modules: the model's chunks on the meta device.
        content: called for the parameters of this rank's share.
        on_bytes: called with the size of every tensor written.
    """
    state = sharded_state(modules, None, is_loading=False)
    apply_factories(state)
    _share_out([s for s in leaves(state) if isinstance(s, ShardedTensor)])
    names = {
        parameter.untyped_storage()._cdata: f"{chunk}.{name}"
        for chunk, module in enumerate(modules)
        for name, parameter in module.named_parameters()
    }
    resolver = _Resolver(names, content, on_bytes)
    strategy = save_strategy(_StreamingWriter(folder), lambda: _new_planner(resolver))
    try:
        dist_checkpointing.save(state, str(folder), sharded_strategy=strategy)
    except CheckpointException as error:  # no Exception, by torch's choice
        reason = next(iter(error.failures.values()))[0]
        raise OSError(f"{folder} cannot be written: {reason}") from error
    except RuntimeError as error:  # torch.save's word for a full disk
        if "stream" not in str(error).lower():
            raise
        raise OSError(f"{folder} cannot be written: {error}") from error


def _share_out(shards: Sequence[ShardedTensor]) -> None:
    """Make this rank the one that writes its share, a run of neighbours, and no other."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    total = sum(shard.data.nbytes for shard in shards)
    before = 0
    for shard in shards:
        owner = before * ranks // max(total, 1)
        shard.replica_id = 0 if owner == rank else 1
        before += shard.data.nbytes


def _new_planner(resolve: _Resolver) -> MCoreSavePlanner:
    """Megatron-Core's planner, which asks ``resolve`` for what it writes."""
    planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    planner.resolve_data = functools.partial(resolve, planner.lookup_object)
    return planner


class _Resolver:
    """Replaces a meta tensor by what is in it, when its turn to be written comes."""

    def __init__(
        self, names: dict[int, str], content: Content, on_bytes: Callable[[int], None]
    ) -> None:
        self._names = names
        self._content = content
        self._on_bytes = on_bytes

    def __call__(
        self, look_up: Callable[[MetadataIndex], Any], item: WriteItem
    ) -> torch.Tensor | io.BytesIO:
        data = look_up(item.index)
        if isinstance(data, io.BytesIO):
            return data
        assert isinstance(data, torch.Tensor)
        name = self._names[data.untyped_storage()._cdata]
        assert data.is_contiguous()
        content = self._content(name, int(data.storage_offset()), data.numel())
        assert content.dtype == data.dtype, name
        self._on_bytes(data.nbytes)
        return _exact(content.view(data.shape))


def _exact(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory behind a storage of just this size: torch saves whole storages."""
    as_bytes = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return torch.from_numpy(as_bytes).view(tensor.dtype).view(tensor.shape)


class _Stream:
    """What torch needs of a file to save to."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self.size = 0

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        write_at(self._handle, view, self.size)
        self.size += len(view)
        return len(view)

    def flush(self) -> None:
        """Nothing is kept back."""


class _StreamingWriter(FileSystemWriter):
    """Torch's writer, one file per rank, which keeps no tensor that it has written."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), sync_files=True)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name = f"{plan.storage_data.prefix}0.distcp"
        results = []
        checksums = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)  # half the time; nothing ever reads them
        try:
            with open(os.path.join(self.path, name), "wb", buffering=0) as file:
                stream = _Stream(file.fileno())
                for item in plan.items:
                    # Torch aligns the numbers in an item; so they are aligned in the file.
                    stream.write(bytes(-stream.size % ALIGNMENT))
                    start = stream.size
                    data = planner.resolve_data(item)
                    if isinstance(data, io.BytesIO):
                        stream.write(data.getbuffer())
                    else:
                        torch.save(data, cast(IO[bytes], stream))
                    length = stream.size - start
                    place = _StorageInfo(name, start, length)
                    results.append(WriteResult(item.index, length, place))
                os.fsync(file.fileno())
        finally:
            torch.serialization.set_crc32_options(checksums)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future
