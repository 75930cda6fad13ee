"""Weights from and to Hugging Face folders, by the same layouts and planner as everything else.

``import_hf`` copies the slices that a rank needs from safetensors into its live tensors;
``export_hf`` sends whole tensors to rank 0, a bucket at a time, and rank 0 writes them. No
rank other than 0 sees more than its own shards, and rank 0 never more than a bucket and a
file shard.
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

from megappo.reshard.executor import STAGING_BYTES, Executor
from megappo.weights.canonical import canonical_tensors, files_layout
from megappo.weights.families import FAMILIES, VALUE_HEAD
from megappo.weights.hf_files import CheckpointReader, CheckpointWriter, listing
from megappo.weights.layout import Layout, box_index, split_box, unpadded
from megappo.weights.plan import plan
from megappo.weights.shape import ModelShape

Result = TypeVar("Result")
READ_ELEMENTS = 16 * 1024**2
BUCKET_BYTES = 1024**3
SHARD_BYTES = 2 * 1024**3
# Tensors of checkpoint files that are no weights of the model: buffers that old versions of
# transformers saved, and an output head that a tied or a value model does not use.
UNUSED = ("rotary_emb.inv_freq", "lm_head.weight")


@torch.no_grad()
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
        ValueError: when the folder lacks a tensor, has one that the model does not know, or
            has one of another shape; or when ``tensors`` are not those of the layout.
    """
    _check_files(reader, layout)
    shapes = layout.local_shapes(rank)
    found = {name: tuple(t.shape) for name, t in tensors.items()}
    if found != shapes:
        odd = sorted(set(found.items()) ^ set(shapes.items()))[0]
        raise ValueError(f"rank {rank} holds other tensors than its layout says, first: {odd}")
    local = {i: tensors[name] for name, i in layout.local_ids(rank).items()}
    ndims = {
        name: len(reader.shape(name)) for name in layout.canonical_names if name in reader.names
    }
    for p in np.flatnonzero(layout.local_rank[layout.piece_local] == rank):
        name = layout.canonical_names[layout.piece_canonical[p]]
        if name not in ndims:
            continue
        target = local[int(layout.piece_local[p])]
        for offset, extent in zip(*split_box(layout.piece_extent[p], READ_ELEMENTS), strict=True):
            box = target[box_index(layout.piece_local_start[p] + offset, extent, target.dim())]
            start = unpadded(layout.piece_canonical_start[p] + offset, ndims[name])
            box.copy_(reader.read(name, start, unpadded(extent, ndims[name])).view(box.shape))
    for z in np.flatnonzero(layout.local_rank[layout.zero_local] == rank):
        target = local[int(layout.zero_local[z])]
        target[box_index(layout.zero_start[z], layout.zero_extent[z], target.dim())].zero_()


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
    changes = _value_config(shape) if value_head else None
    together = _Together(rank, device, group)
    reader = together.on_rank_0(lambda: CheckpointReader(source_dir))
    new_writer = partial(CheckpointWriter, max_shard_bytes=max_shard_bytes, config_changes=changes)
    writer = together.on_rank_0(lambda: new_writer(out_dir, canonical, source_dir))
    try:
        for bucket in _buckets(canonical, bucket_bytes):
            whole = {} if reader is None else _empty(bucket, reader, device)
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
            raise RuntimeError("the export failed on rank 0")
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


def _empty(
    bucket: Mapping[str, tuple[int, ...]], reader: CheckpointReader, device: torch.device
) -> dict[str, torch.Tensor]:
    """Uninitialised tensors of the types in the source folder."""
    return {
        name: torch.empty(
            shape,
            dtype=reader.dtype(name) if name in reader.names else torch.float32,
            device=device,
        )
        for name, shape in bucket.items()
    }


def _write(writer: CheckpointWriter | None, tensors: Mapping[str, torch.Tensor]) -> None:
    assert writer is not None
    for name, tensor in tensors.items():
        writer.add(name, tensor)


def _commit(writer: CheckpointWriter | None) -> None:
    assert writer is not None
    writer.commit()


def _value_config(shape: ModelShape) -> dict[str, object]:
    """What ``config.json`` says of a model with one scalar output."""
    return {
        "architectures": [FAMILIES[shape.family].value_architecture],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
    }
