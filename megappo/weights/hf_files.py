"""Hugging Face checkpoint folders: safetensors read by slices and written as a stream.

``CheckpointReader`` opens a single ``model.safetensors`` or an index with its shards and
reads boxes of tensors; ``CheckpointWriter`` takes whole tensors one by one, holds none of
them, and leaves either a complete folder or none. Both know files and names only: what the
tensors mean is for the layouts, and who holds them for ``reshard``.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from megappo.weights.whole_folder import WholeFolder, write_at

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
SHARD_BYTES = 5 * 1000**3
# Not copied by an export: weights in any format, and what belongs to them.
WEIGHT_SUFFIXES = (
    ".safetensors .index.json .bin .pt .pth .ckpt .gguf .h5 .msgpack .onnx .onnx_data".split()
)
EXPECTED = "expected a Hugging Face folder with config.json and model.safetensors or its index"


def _load_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, expected an object")
    return value


def listing(names: Iterable[str], limit: int = 10) -> str:
    """Names for an error line: sorted, the first ``limit`` of them and the number left out."""
    ordered = sorted(names)
    more = f" and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(ordered[:limit]) + more


def read_config(hf_dir: str | Path) -> dict[str, Any]:
    """The parsed ``config.json`` of a checkpoint folder.

    Raises:
        ValueError: when there is no such folder or file; says what was found instead.
    """
    folder = Path(hf_dir)
    if not folder.is_dir():
        found = "is a file" if folder.exists() else "does not exist"
        raise ValueError(f"model folder {folder} {found}: {EXPECTED}")
    if not (folder / "config.json").is_file():
        entries = sorted(p.name for p in folder.iterdir())
        inner = [n for n in entries if (folder / n / "config.json").is_file()]
        found = f"found {listing(entries, 5)}" if entries else "the folder is empty"
        hint = f"; pass {folder / inner[0]} instead?" if inner else ""
        raise ValueError(f"model folder {folder} has no config.json ({found}): {EXPECTED}{hint}")
    return _load_json(folder / "config.json")


class CheckpointReader:
    """The tensors of a checkpoint folder, read by slices; nothing is read before it is asked for.

    Args:
        hf_dir: Folder with ``model.safetensors``, or ``model.safetensors.index.json`` and shards.

    Attributes:
        names: Every tensor of the checkpoint.

    Raises:
        ValueError: when the folder has no readable safetensors; names what is missing.
    """

    def __init__(self, hf_dir: str | Path) -> None:
        """Finds the files and checks that none is missing."""
        self.folder = Path(hf_dir)
        self._open: dict[str, Any] = {}
        read_config(self.folder)
        if (self.folder / INDEX).is_file():
            self._file_of = dict(_load_json(self.folder / INDEX).get("weight_map") or {})
            files = set(self._file_of.values())
            absent = {f for f in files if not (self.folder / f).is_file()}
            if absent or not files:
                what = listing(absent) if absent else "every file (weight_map is empty)"
                raise ValueError(f"{self.folder / INDEX} names shards, missing: {what}")
        elif (self.folder / SINGLE).is_file():
            self._file_of = dict.fromkeys(self._handle(SINGLE).keys(), SINGLE)
        else:
            raise ValueError(self._no_weights())
        self.names = frozenset(self._file_of)

    def _no_weights(self) -> str:
        pickled = [p.name for p in self.folder.iterdir() if p.suffix in (".bin", ".pt", ".pth")]
        if pickled:
            return (
                f"{self.folder} has only pickled weights ({listing(pickled, 3)}), which megappo "
                f"does not load: save the model with safe_serialization=True"
            )
        return f"{self.folder} has neither {SINGLE} nor {INDEX}: {EXPECTED}"

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            try:
                self._open[file] = safe_open(self.folder / file, framework="pt")
            except SafetensorError as error:
                raise ValueError(f"{self.folder / file} is not whole: {error}") from error
        return self._open[file]

    def _slice(self, name: str) -> Any:
        if name not in self._file_of:
            raise ValueError(f"{self.folder} has no tensor {name}")
        try:
            return self._handle(self._file_of[name]).get_slice(name)
        except SafetensorError as error:
            file = self.folder / self._file_of[name]
            raise ValueError(f"{file} does not hold {name}: {error}") from error

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from its file's header."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Type of a tensor, from its file's header; float64, float32, bfloat16 or float16."""
        stored = self._slice(name).get_dtype()
        if stored not in DTYPES:
            raise ValueError(f"{self.folder}: {name} is stored as {stored}, not as a plain float")
        return DTYPES[stored]

    def read(self, name: str, start: Sequence[int], extent: Sequence[int]) -> torch.Tensor:
        """Reads one box of a tensor, in the file's dtype; only its bytes are touched.

        Args:
            name: Tensor.
            start: First index in each dimension of the tensor.
            extent: Length in each dimension.
        """
        index = tuple(slice(a, a + n) for a, n in zip(start, extent, strict=True))
        tensor: torch.Tensor = self._slice(name)[index]
        return tensor


class Entry(NamedTuple):
    """What a file's header says of one tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class CheckpointWriter:
    """Writes a checkpoint folder from a stream of whole tensors: all of it, or nothing.

    Names, types and shapes are known beforehand, so every tensor has its place in a file and
    is written when it comes, in any order. ``commit`` syncs the folder and gives it its name,
    ``discard`` removes it. No tensor is kept.

    Args:
        out_dir: Folder to make. An older checkpoint of that name is replaced at the end.
        expected: Every tensor that the stream must have, by name.
        source_dir: Checkpoint folder whose other files (configuration, tokenizer, chat template,
            ...) are copied unchanged.
        max_shard_bytes: A shard is closed before it grows beyond this.
        config_changes: Fields of ``config.json`` that differ from the source's.

    Raises:
        ValueError: when ``out_dir`` holds something that is not a checkpoint, or is the source.
    """

    def __init__(
        self,
        out_dir: str | Path,
        expected: Mapping[str, Entry],
        source_dir: str | Path,
        *,
        max_shard_bytes: int = SHARD_BYTES,
        config_changes: Mapping[str, Any] | None = None,
    ) -> None:
        """Makes the temporary folder and copies the files that are not weights."""
        self.out_dir = Path(out_dir)
        self._expected = dict(expected)
        source = Path(source_dir).resolve()
        if self.out_dir.resolve() in (source, *source.parents):
            raise ValueError(f"{out_dir} is or holds the folder that the model came from")
        if self.out_dir.exists() and not self._replaceable():
            raise ValueError(f"{out_dir} exists and is no Hugging Face folder: choose another")
        config = {**read_config(source_dir), **(config_changes or {})}
        self._folder = WholeFolder(self.out_dir)
        self._place: dict[str, tuple[int, int]] = {}
        self._handles: list[int] = []
        try:
            copy_other_files(Path(source_dir), self._folder.path)
            if config_changes:
                self._write_json("config.json", config)
            self._make_files(_shards(expected, max_shard_bytes))
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Removes what was written, unless it was committed."""
        self._close()
        self._folder.discard()

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Writes one whole tensor to its place.

        Raises:
            ValueError: when the name, the type or the shape is not expected, or the name came
                before.
        """
        if name not in self._expected:
            raise ValueError(f"{self.out_dir}: tensor {name} is not expected, or came twice")
        entry = self._expected.pop(name)
        if (tensor.dtype, tuple(tensor.shape)) != entry:
            raise ValueError(
                f"{self.out_dir}: {name} has shape {tuple(tensor.shape)} and {tensor.dtype}, "
                f"expected {entry.shape} and {entry.dtype}"
            )
        handle, offset = self._place[name]
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        write_at(handle, flat.numpy().data, offset)

    def commit(self) -> None:
        """Syncs everything and gives the folder its name.

        Raises:
            ValueError: listing the tensors that never came.
        """
        if self._expected:
            raise ValueError(
                f"{self.out_dir} is not written: {len(self._expected)} tensors are missing: "
                f"{listing(self._expected)}"
            )
        self._close()
        self._folder.commit()

    def _replaceable(self) -> bool:
        if not self.out_dir.is_dir():
            return False
        return (self.out_dir / "config.json").is_file() or not any(self.out_dir.iterdir())

    def _make_files(self, shards: Sequence[Mapping[str, Entry]]) -> None:
        """Writes the headers and the index; remembers where each tensor goes."""
        weight_map: dict[str, str] = {}
        for i, shard in enumerate(shards):
            sharded = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
            file = SINGLE if len(shards) == 1 else sharded
            header, offsets = _header(shard)
            path = self._folder.path / file
            self._handles.append(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
            write_at(self._handles[-1], memoryview(header), 0)
            self._place.update({n: (self._handles[-1], at) for n, at in offsets.items()})
            weight_map.update(dict.fromkeys(shard, file))
        if len(shards) > 1:
            total = sum(e.num_bytes for shard in shards for e in shard.values())
            self._write_json(INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})

    def _close(self) -> None:
        while self._handles:
            os.close(self._handles.pop())

    def _write_json(self, file: str, value: dict[str, Any]) -> None:
        text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
        (self._folder.path / file).write_text(text, encoding="utf-8")


def _shards(expected: Mapping[str, Entry], max_bytes: int) -> list[dict[str, Entry]]:
    """Tensors of each file, in the order given."""
    shards: list[dict[str, Entry]] = [{}]
    size = 0
    for name, entry in expected.items():
        if shards[-1] and size + entry.num_bytes > max_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = entry
        size += entry.num_bytes
    return shards


def _header(shard: Mapping[str, Entry]) -> tuple[bytes, dict[str, int]]:
    """The first bytes of a safetensors file, and where in it each tensor starts."""
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts: dict[str, int] = {}
    position = 0
    # Wide types first, so that each tensor starts at a multiple of its element's size.
    for name, entry in sorted(shard.items(), key=lambda item: -item[1].dtype.itemsize):
        end = position + entry.num_bytes
        fields[name] = {
            "dtype": _DTYPE_NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [position, end],
        }
        starts[name] = position
        position = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + start for name, start in starts.items()}


def copy_other_files(source: Path, target: Path) -> None:
    """Copies what is not weights; tokenizers come in too many files to list them."""
    for path in source.iterdir():
        if path.name.startswith(".") or path.name.endswith(tuple(WEIGHT_SUFFIXES)):
            continue
        if path.is_file():
            shutil.copyfile(path, target / path.name)
        elif path.name == "additional_chat_templates":
            shutil.copytree(path, target / path.name)
