"""Weights from and to Hugging Face folders, by the same layouts and planner as everything else.

``import_hf`` copies the slices that a rank needs from safetensors into its live tensors;
``export_hf`` sends whole tensors to rank 0, a bucket at a time, and rank 0 writes them. No
rank other than 0 sees more than its own shards, and rank 0 never more than a bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError

from megappo.config.errors import OtherRankError
from megappo.reshard.executor import STAGING_BYTES, Executor
from megappo.weights.canonical import canonical_tensors, files_layout
from megappo.weights.families import FAMILIES, VALUE_HEAD
from megappo.weights.hf_files import (
    SHARD_BYTES,
    CheckpointReader,
    CheckpointWriter,
    Entry,
    listing,
)
from megappo.weights.layout import Layout, box_index, split_box, unpadded
from megappo.weights.plan import plan
from megappo.weights.scratch import Scratch
from megappo.weights.shape import ModelShape

Result = TypeVar("Result")
READ_ELEMENTS = 16 * 1024**2
BUCKET_BYTES = 1024**3
# Tensors of checkpoint files that are no weights of the model: buffers that old versions of
# transformers saved, and an output head that a tied or a value model does not use.
UNUSED = ("rotary_emb.inv_freq", "lm_head.weight")


class LocalReader:
    """A rank's tensors out of a checkpoint folder, one by one, reading only what it holds.

    Args:
        reader: Checkpoint folder.
        layout: Where the model's weights are.
        rank: The rank in the layout.

    Raises:
        ValueError: when the folder lacks a tensor (a value head may be absent), has one that
            the model does not know, or has one of another shape.
    """

    def __init__(self, reader: CheckpointReader, layout: Layout, rank: int) -> None:
        """Compares names and shapes with the headers of the files; reads no weight."""
        _check_files(reader, layout)
        self._reader = reader
        self._layout = layout
        self._ids = layout.local_ids(rank)
        self.shapes = layout.local_shapes(rank)
        self._ndims = {
            name: len(reader.shape(name)) for name in layout.canonical_names if name in reader.names
        }
        self._boxes = boxes_by_tensor(layout, rank)
        self._zeros: dict[int, list[int]] = {}
        for row in np.flatnonzero(layout.local_rank[layout.zero_local] == rank).tolist():
            self._zeros.setdefault(int(layout.zero_local[row]), []).append(row)
        self._scratch = Scratch()
        self._last: tuple[str, torch.dtype] | None = None

    def has(self, name: str) -> bool:
        """Whether the folder has a local tensor; it may lack a value head only."""
        boxes = self._boxes.get(self._ids[name], [])
        return all(self._canonical(b) in self._ndims for b in boxes)

    @torch.no_grad()
    def fill(self, name: str, target: torch.Tensor) -> None:
        """Writes a local tensor into ``target``, cast from the file's type to its own."""
        layout, local = self._layout, self._ids[name]
        for b in self._boxes.get(local, []):
            canonical = self._canonical(b)
            ndim = self._ndims[canonical]
            for offset, extent in zip(*split_box(layout.box_extent[b], READ_ELEMENTS), strict=True):
                box = target[box_index(layout.box_local_start[b] + offset, extent, target.dim())]
                start = unpadded(layout.box_canonical_start[b] + offset, ndim)
                part = self._reader.read(canonical, start, unpadded(extent, ndim))
                box.copy_(part.view(box.shape))
        for z in self._zeros.get(local, []):
            target[box_index(layout.zero_start[z], layout.zero_extent[z], target.dim())].zero_()

    def part(self, name: str, dtype: torch.dtype, start: int, count: int) -> torch.Tensor:
        """A run of a local tensor's elements, in the order of memory.

        The file's own memory where the run is a whole tensor there, else memory that the next
        call may use again: not to be written, and not to be kept.

        Args:
            name: Local tensor.
            dtype: Type that it is cast to.
            start: First element.
            count: Number of elements.
        """
        for b in self._boxes.get(self._ids[name], []):
            canonical = self._canonical(b)
            size = self._reader.shape(canonical)
            if (
                run_of_box(self._layout, b) == (start, count)
                and prod(size) == count
                and self._reader.dtype(canonical) == dtype
            ):
                return self._reader.read(canonical, (0,) * len(size), size).reshape(-1)
        if self._last != (name, dtype):
            self._scratch.take(self.shapes[name], dtype)
            self.fill(name, self._scratch.tensor)
            self._last = (name, dtype)
        return self._scratch.tensor.view(-1)[start : start + count]

    def _canonical(self, box: int) -> str:
        return str(self._layout.canonical_names[self._layout.box_canonical[box]])


def run_of_box(layout: Layout, box: int) -> tuple[int, int] | None:
    """First element and number of a box in its local tensor's memory; None if not one run."""
    shape = layout.local_shape[layout.first_local[layout.box_tensor[box]]].tolist()
    extent = layout.box_extent[box].tolist()
    first = next((i for i, n in enumerate(extent) if n > 1), len(extent) - 1)
    if extent[first + 1 :] != shape[first + 1 :]:
        return None
    start = layout.box_local_start[box].tolist()
    return start[0] * shape[1] * shape[2] + start[1] * shape[2] + start[2], prod(extent)


def boxes_by_tensor(layout: Layout, rank: int) -> dict[int, list[int]]:
    """The boxes of each local tensor of a rank; touches no other rank's pieces."""
    ids = np.flatnonzero(layout.local_rank == rank)
    tensors = np.searchsorted(layout.first_local, ids, side="right") - 1
    local = dict(zip(tensors.tolist(), ids.tolist(), strict=True))
    boxes: dict[int, list[int]] = {}
    for box in np.flatnonzero(np.isin(layout.box_tensor, tensors)).tolist():
        boxes.setdefault(local[int(layout.box_tensor[box])], []).append(box)
    return boxes


def import_hf(
    reader: CheckpointReader, layout: Layout, rank: int, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Fills a rank's tensors from a checkpoint folder, reading only what this rank holds.

    A value head that the folder lacks keeps its fresh weights. No communication.

    Args:
        reader: Checkpoint folder.
        layout: Where the model's weights are.
        rank: This rank in the layout.
        tensors: Live tensors, by the names of the layout; written in place, cast from the
            file's type to theirs.

    Raises:
        ValueError: when the folder is not that model's (see ``LocalReader``); or when
            ``tensors`` are not those of the layout.
    """
    local = LocalReader(reader, layout, rank)
    found = {name: tuple(t.shape) for name, t in tensors.items()}
    if found != local.shapes:
        odd = sorted(set(found.items()) ^ set(local.shapes.items()))[0]
        raise ValueError(f"rank {rank} holds other tensors than its layout says, first: {odd}")
    for name, tensor in tensors.items():
        if local.has(name):
            local.fill(name, tensor)


def _check_files(reader: CheckpointReader, layout: Layout) -> None:
    """Compares names and shapes with the headers of the files, before a weight is read."""
    wanted = set(layout.canonical_names)
    if absent := wanted - reader.names - {VALUE_HEAD}:
        raise ValueError(f"{reader.folder} lacks {len(absent)} tensors: {listing(absent)}")
    if odd := {n for n in reader.names - wanted if not n.endswith(UNUSED)}:
        raise ValueError(
            f"{reader.folder} holds {len(odd)} tensors that its config.json does not speak of: "
            f"{listing(odd)}"
        )
    for name, padded_shape in zip(layout.canonical_names, layout.canonical_shapes, strict=True):
        if name in reader.names:
            found = reader.shape(name)
            expected = unpadded(padded_shape, min(len(found), len(padded_shape)))
            if found != expected or prod(found) != int(padded_shape.prod()):
                raise ValueError(
                    f"{reader.folder}: {name} has shape {found}, config.json says {expected}"
                )


def export_hf(
    layout: Layout,
    shape: ModelShape,
    rank: int,
    tensors: Mapping[str, torch.Tensor],
    out_dir: str | Path,
    source_dir: str | Path,
    *,
    group: dist.ProcessGroup | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    staging_bytes: int = STAGING_BYTES,
    max_shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes a model as a Hugging Face folder; all ranks of the group call it together.

    Weights get the type that they have in the source folder (float32 if they are not in it),
    so the copied ``config.json`` stays true. The folder appears whole or not at all.

    Args:
        layout: Where the model's weights are; with ``score.weight`` in it, a value model.
        shape: Model.
        rank: This rank in the layout and in the group.
        tensors: Its live tensors, by the names of the layout.
        out_dir: Folder to make.
        source_dir: Checkpoint folder that the model came from: its configuration, tokenizer and
            other files are copied.
        group: Process group; the default group if None.
        bucket_bytes: Rank 0 gathers tensors up to this size at a time (one, if larger).
        staging_bytes: Bound on the staging memory of the transfer.
        max_shard_bytes: Largest file, unless one tensor is larger.

    Raises:
        ValueError: when the folders are not usable (on rank 0; the other ranks raise
            RuntimeError).
        OSError: when a file cannot be written (likewise).
    """
    value_head = VALUE_HEAD in layout.canonical_names
    canonical = canonical_tensors(shape, value_head=value_head)
    device = next(iter(tensors.values())).device
    changes = value_config(shape) if value_head else None
    together = _Together(rank, device, group)
    new_writer = partial(CheckpointWriter, max_shard_bytes=max_shard_bytes, config_changes=changes)
    read = partial(file_entries, canonical=canonical)
    entries = together.on_rank_0(lambda: read(CheckpointReader(source_dir))) or {}
    writer = together.on_rank_0(lambda: new_writer(out_dir, entries, source_dir))
    try:
        for bucket in _buckets(canonical, bucket_bytes):
            whole = _empty({n: entries[n] for n in bucket if n in entries}, device)
            gather = plan(layout, files_layout(bucket, world_size=layout.world_size))
            Executor(gather, rank, group, staging_bytes=staging_bytes, device=device).run(
                tensors, whole
            )
            together.on_rank_0(partial(_write, writer, whole))
        together.on_rank_0(partial(_commit, writer))
    finally:
        if writer is not None:
            writer.discard()


class _Together:
    """Runs what only rank 0 does so that all ranks learn whether it succeeded."""

    def __init__(self, rank: int, device: torch.device, group: dist.ProcessGroup | None) -> None:
        self._rank = rank
        self._device = device
        self._group = group

    def on_rank_0(self, action: Callable[[], Result]) -> Result | None:
        """The result on rank 0, None elsewhere; an error on rank 0 is raised everywhere."""
        result: Result | None = None
        failure: Exception | None = None
        if self._rank == 0:
            try:
                result = action()
            except (OSError, ValueError, SafetensorError) as error:
                failure = error
        failed = torch.tensor([failure is not None], dtype=torch.uint8, device=self._device)
        source = dist.get_global_rank(self._group, 0) if self._group else 0
        dist.broadcast(failed, source, group=self._group)
        if failure is not None:
            raise failure
        if failed.item():
            raise OtherRankError("the export failed on rank 0")
        return result


def _buckets(
    canonical: Mapping[str, tuple[int, ...]], bucket_bytes: int
) -> Iterator[dict[str, tuple[int, ...]]]:
    """Consecutive tensors of at most ``bucket_bytes`` in float32, or one larger tensor."""
    bucket: dict[str, tuple[int, ...]] = {}
    size = 0
    for name, shape in canonical.items():
        num_bytes = prod(shape) * torch.float32.itemsize
        if bucket and size + num_bytes > bucket_bytes:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = shape
        size += num_bytes
    yield bucket


def file_entries(
    reader: CheckpointReader, canonical: Mapping[str, tuple[int, ...]]
) -> dict[str, Entry]:
    """Tensors to write in the types of a source folder; float32 where it has none."""
    return {
        name: Entry(reader.dtype(name) if name in reader.names else torch.float32, shape)
        for name, shape in canonical.items()
    }


def _empty(entries: Mapping[str, Entry], device: torch.device) -> dict[str, torch.Tensor]:
    return {
        name: torch.empty(entry.shape, dtype=entry.dtype, device=device)
        for name, entry in entries.items()
    }


def _write(writer: CheckpointWriter | None, tensors: Mapping[str, torch.Tensor]) -> None:
    assert writer is not None
    for name, tensor in tensors.items():
        writer.add(name, tensor)


def _commit(writer: CheckpointWriter | None) -> None:
    assert writer is not None
    writer.commit()


def value_config(shape: ModelShape) -> dict[str, object]:
    """What ``config.json`` says of a model with one scalar output."""
    return {
        "architectures": [FAMILIES[shape.family].value_architecture],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
    }
