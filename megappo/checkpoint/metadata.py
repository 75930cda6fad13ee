"""What a Megatron-Core distributed checkpoint holds, read without running what it says.

The format's ``.metadata`` is a pickle and its ``common.pt`` another: the first goes through
an unpickler that makes nothing but the records of torch's checkpoint format, the second
through torch's own ``weights_only``. Knows keys, shapes and files; no model.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

METADATA = ".metadata"
COMMON = "common.pt"
# Written last by Megatron-Core: its presence says that the checkpoint is whole.
BACKEND = "metadata.json"
_DCP = "torch.distributed.checkpoint"
_ALLOWED = {
    *(
        (f"{_DCP}.metadata", name)
        for name in (
            "Metadata",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "MetadataIndex",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("collections", "OrderedDict"),
}


class _Unpickler(pickle.Unpickler):
    """Makes the records of torch's checkpoint format and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            dtype = vars(torch).get(name) if module == "torch" else None
            if not isinstance(dtype, torch.dtype):
                raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


def is_distributed_checkpoint(folder: Path) -> bool:
    """Whether a folder looks like a distributed checkpoint of Megatron-Core."""
    return (folder / METADATA).is_file() and (folder / BACKEND).is_file()


def read_metadata(folder: Path) -> Metadata:
    """Read ``folder/.metadata``.

    Raises:
        ValueError: the folder is no distributed checkpoint, the file is damaged, it names
            anything but the format's records, or files that it speaks of are missing or cut off.
    """
    if not is_distributed_checkpoint(folder):
        raise ValueError(f"{folder} is not a Megatron-Core distributed checkpoint")
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            metadata = _Unpickler(file).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, TypeError) as error:
        raise ValueError(f"{path} is not a distributed checkpoint's metadata: {error}") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise ValueError(f"{path} is not a distributed checkpoint's metadata")
    ends: dict[str, int] = {}
    for info in metadata.storage_data.values():
        end = info.offset + info.length
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), end)
    for name, end in sorted(ends.items()):
        if Path(name).name != name:
            raise ValueError(f"{path} speaks of {name}, which is not a file in {folder}")
        size = (folder / name).stat().st_size if (folder / name).is_file() else None
        if size is None or size < end:
            found = "missing" if size is None else f"cut off ({size} of {end} bytes)"
            raise ValueError(f"{folder / name} is {found}: the checkpoint is not whole")
    return metadata


def check_pickles(folder: Path) -> None:
    """Refuse a checkpoint whose pickles name what they should not, before a library loads it.

    Raises:
        ValueError: see ``read_metadata``; likewise for ``common.pt``.
    """
    read_metadata(folder)
    try:
        torch.load(folder / COMMON, weights_only=True, map_location="cpu")
    except (pickle.UnpicklingError, EOFError, RuntimeError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{folder / COMMON} is not loaded: {reason}") from error
