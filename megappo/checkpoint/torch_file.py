"""Where in a file of ``torch.save`` the numbers of its one tensor are, without reading them.

Such a file is a zip archive: ``data.pkl`` describes the tensor, ``data/0`` holds its storage,
uncompressed. The description is a pickle; it is read by an unpickler that knows tensors and
nothing else. So a tensor's bytes can be used where they are in a mapped file.
"""

from __future__ import annotations

import collections
import io
import pickle
from dataclasses import dataclass
from typing import IO, Any, cast

import torch

_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "BFloat16Storage": torch.bfloat16,
    "HalfStorage": torch.float16,
}


@dataclass(frozen=True)
class Location:
    """A tensor in a file.

    Attributes:
        dtype: of its elements.
        data_offset: first byte of its storage.
        num_bytes: of its storage.
        start: of the tensor in its storage, in elements.
        size: of the tensor.
        stride: of the tensor.
    """

    dtype: torch.dtype
    data_offset: int
    num_bytes: int
    start: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class _Storage:
    dtype: torch.dtype
    record: str
    num_elements: int


def locate_tensor(file: io.IOBase) -> Location:
    """Find the tensor of a file.

    Args:
        file: readable and seekable.

    Raises:
        RuntimeError: the file is no archive of torch's, or is damaged.
        pickle.UnpicklingError: it holds something other than one tensor.
    """
    archive: Any = torch._C.PyTorchFileReader(cast(IO[bytes], file))
    if archive.has_record("byteorder") and archive.get_record("byteorder") != b"little":
        raise pickle.UnpicklingError("its bytes are in another order than this machine's")
    described = _Unpickler(io.BytesIO(archive.get_record("data.pkl"))).load()
    if not isinstance(described, tuple) or not isinstance(described[0], _Storage):
        raise pickle.UnpicklingError("it holds something other than one tensor")
    storage, start, size, stride, *_ = described
    last = start + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if 0 not in size and not 0 <= last < storage.num_elements:
        raise pickle.UnpicklingError("the tensor is larger than what is stored")
    return Location(
        dtype=storage.dtype,
        data_offset=archive.get_record_offset(storage.record),
        num_bytes=storage.num_elements * storage.dtype.itemsize,
        start=start,
        size=tuple(size),
        stride=tuple(stride),
    )


class _Unpickler(pickle.Unpickler):
    """Describes a tensor; makes nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _description
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if module == "torch" and name in _STORAGES:
            return name
        raise pickle.UnpicklingError(f"it names {module}.{name}")

    def persistent_load(self, pid: Any) -> _Storage:
        kind, type_name, key, _, num_elements = pid
        if kind != "storage" or type_name not in _STORAGES or "/" in str(key):
            raise pickle.UnpicklingError(f"it names {pid!r}")
        return _Storage(_STORAGES[type_name], f"data/{key}", int(num_elements))


def _description(*args: Any) -> tuple[Any, ...]:
    return args
