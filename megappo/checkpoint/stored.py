"""The tensors of a Megatron-Core distributed checkpoint, read by boxes, however they were cut.

The stored pieces that touch a box are read one after another; no process group is needed to
read what many ranks wrote. Optimizer state is counted and not looked at. Knows keys and
boxes: ``convert_read`` knows which of them make up a parameter. Imports no Megatron.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.utils import _create_file_view

from megappo.checkpoint.metadata import read_metadata
from megappo.checkpoint.torch_file import locate_tensor
from megappo.weights.scratch import Scratch

OPTIMIZER_PREFIX = "optimizer."


@dataclass(frozen=True)
class View:
    """A box of a stored tensor and the place in a parameter that it fills.

    Attributes:
        key: of the stored tensor.
        offset: of the box in it.
        shape: of the box, with the stored tensor's dimensions.
        start: of its first element in the parameter's memory.
        stride: of each dimension of the box in the parameter's memory.
        padded: whether its rows are the vocabulary, padded more or less.
    """

    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int
    stride: tuple[int, ...]
    padded: bool


@dataclass(frozen=True)
class _Stored:
    """A stored tensor: its type, size, and the boxes that it was cut into."""

    dtype: torch.dtype
    size: tuple[int, ...]
    offsets: np.ndarray[Any, np.dtype[np.int64]]
    sizes: np.ndarray[Any, np.dtype[np.int64]]


class StoredModel:
    """What a distributed checkpoint holds of a model.

    Args:
        folder: of the checkpoint.

    Attributes:
        entries: type and size of every stored tensor that is not the optimizer's, by key.

    Raises:
        ValueError: the folder is no whole distributed checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        """Reads the metadata; no weight."""
        self.folder = folder
        metadata = read_metadata(folder)
        self._places: dict[MetadataIndex, Any] = metadata.storage_data
        self._stored = {
            key: _Stored(
                entry.properties.dtype,
                tuple(entry.size),
                np.array([c.offsets for c in entry.chunks]).reshape(-1, len(entry.size)),
                np.array([c.sizes for c in entry.chunks]).reshape(-1, len(entry.size)),
            )
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and not key.startswith(OPTIMIZER_PREFIX)
        }
        self.entries = {key: (s.dtype, s.size) for key, s in self._stored.items()}
        self.num_optimizer_tensors = sum(
            key.startswith(OPTIMIZER_PREFIX) for key in metadata.state_dict_metadata
        )
        self._files: dict[str, _File] = {}
        self._scratch = Scratch()

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.stream.close()
        self._files.clear()

    def read(self, view: View, target: torch.Tensor) -> None:
        """Fill ``target``, of the view's shape, with what is stored of the box; cast to its type.

        Beyond the stored tensor's end (vocabulary padding of another size) nothing is written.
        """
        stored = self._stored[view.key]
        offset = np.array(view.offset)
        end = np.minimum(offset + view.shape, stored.size)
        start = np.maximum(stored.offsets, offset)
        extent = np.minimum(stored.offsets + stored.sizes, end) - start
        for i in np.flatnonzero((extent > 0).all(axis=1)):
            piece = self._load(view.key, tuple(stored.offsets[i].tolist()))
            box = [
                slice(a, a + n)
                for a, n in zip(start[i] - stored.offsets[i], extent[i], strict=True)
            ]
            place = [slice(a, a + n) for a, n in zip(start[i] - offset, extent[i], strict=True)]
            target[tuple(place)].copy_(piece[tuple(box)])

    def exact(self, view: View) -> torch.Tensor | None:
        """What is stored of the box where that is one whole piece, else None.

        Not to be written, and not to be kept: the next call may use the memory again.
        """
        stored = self._stored[view.key]
        same = (stored.offsets == view.offset).all(axis=1) & (stored.sizes == view.shape).all(
            axis=1
        )
        return self._load(view.key, view.offset) if same.any() else None

    def _load(self, key: str, offset: tuple[int, ...]) -> torch.Tensor:
        """A stored piece: the file's own memory, or memory that the next call uses again."""
        place = self._places[MetadataIndex(key, offset)]
        if place.transform_descriptors:
            raise ValueError(
                f"{self.folder}: {key} is stored with {', '.join(place.transform_descriptors)}, "
                "which megappo does not read"
            )
        file = self._file(place.relative_path)
        try:
            where = locate_tensor(file.part(place.offset, place.length))
        except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
            reason = str(error).splitlines()[0]
            path = self.folder / place.relative_path
            raise ValueError(f"{path}: {key} cannot be read: {reason}") from error
        start = place.offset + where.data_offset
        data = file.memory[start : start + where.num_bytes]
        if start % where.dtype.itemsize:
            data = self._scratch.take((where.num_bytes,), torch.uint8).copy_(data)
        flat = data.view(where.dtype)
        return flat.as_strided(where.size, where.stride, flat.storage_offset() + where.start)

    def _file(self, name: str) -> _File:
        if name not in self._files:
            self._files[name] = _File(self.folder / name)
        return self._files[name]


class _File:
    """A file of stored tensors, mapped into memory: pages are read when they are looked at."""

    def __init__(self, path: Path) -> None:
        size = path.stat().st_size
        self.memory = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
        self.stream = path.open("rb", buffering=0)

    def part(self, offset: int, length: int) -> io.IOBase:
        """A run of bytes as a file of its own."""
        return _create_file_view(self.stream, offset, length)
