"""Hugging Face checkpoint folders: safetensors read by slices and written as a stream.

``CheckpointReader`` opens a single ``model.safetensors`` or an index with its shards and
reads boxes of tensors; ``CheckpointWriter`` takes whole tensors one by one and leaves either
a complete folder or none. Both know files and names only: what the tensors mean is for the
layouts, and who holds them for ``reshard``.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}
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


class CheckpointWriter:
    """Writes a checkpoint folder from a stream of whole tensors: all of it, or nothing.

    Everything goes to ``<out_dir>.tmp`` first; ``commit`` completes, syncs and renames it, and
    ``discard`` removes it. Memory is bounded by one shard.

    Args:
        out_dir: Folder to make. An older checkpoint of that name is replaced at the end.
        expected: Shape of every tensor that the stream must have, by name.
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
        expected: Mapping[str, tuple[int, ...]],
        source_dir: str | Path,
        *,
        max_shard_bytes: int = 2 * 1024**3,
        config_changes: Mapping[str, Any] | None = None,
    ) -> None:
        """Makes the temporary folder and copies the files that are not weights."""
        self.out_dir = Path(out_dir)
        self._expected = dict(expected)
        self._max_shard_bytes = max_shard_bytes
        self._pending: dict[str, torch.Tensor] = {}
        self._shards: list[list[str]] = []
        self._total_bytes = 0
        if self.out_dir.resolve() == Path(source_dir).resolve():
            raise ValueError(f"{out_dir} is the folder that the model came from: choose another")
        if self.out_dir.exists() and not self._replaceable():
            raise ValueError(f"{out_dir} exists and is no Hugging Face folder: choose another")
        config = {**read_config(source_dir), **(config_changes or {})}
        self._tmp = self.out_dir.with_name(self.out_dir.name + ".tmp")
        shutil.rmtree(self._tmp, ignore_errors=True)
        self._tmp.mkdir(parents=True)
        _copy_other_files(Path(source_dir), self._tmp)
        if config_changes:
            self._write_json("config.json", config)

    def discard(self) -> None:
        """Removes what was written, unless it was committed."""
        shutil.rmtree(self._tmp, ignore_errors=True)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Takes one whole tensor; keeps a reference until its shard is written.

        Raises:
            ValueError: when the name or the shape is not expected, or the name came before.
        """
        if name not in self._expected:
            raise ValueError(f"{self.out_dir}: tensor {name} is not expected, or came twice")
        shape = self._expected.pop(name)
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{self.out_dir}: {name} has shape {tuple(tensor.shape)}, expected {shape}"
            )
        pending = sum(t.nbytes for t in self._pending.values())
        if self._pending and pending + tensor.nbytes > self._max_shard_bytes:
            self._write_shard()
        self._pending[name] = tensor.detach().cpu().contiguous()

    def commit(self) -> None:
        """Writes the last shard and the index, syncs, and gives the folder its name.

        Raises:
            ValueError: listing the tensors that never came.
        """
        if self._expected:
            raise ValueError(
                f"{self.out_dir} is not written: {len(self._expected)} tensors are missing: "
                f"{listing(self._expected)}"
            )
        self._write_shard()
        self._name_shards()
        for path in self._tmp.rglob("*"):
            _sync(path)
        _sync(self._tmp)
        old = self.out_dir.with_name(self.out_dir.name + ".old")
        shutil.rmtree(old, ignore_errors=True)
        if self.out_dir.exists():
            self.out_dir.rename(old)
        self._tmp.rename(self.out_dir)
        _sync(self.out_dir.parent)
        shutil.rmtree(old, ignore_errors=True)

    def _replaceable(self) -> bool:
        if not self.out_dir.is_dir():
            return False
        return (self.out_dir / "config.json").is_file() or not any(self.out_dir.iterdir())

    def _write_shard(self) -> None:
        """Writes the pending tensors; the shard's final name is known at the end."""
        path = self._tmp / f"shard-{len(self._shards)}"
        save_file(self._pending, path, metadata={"format": "pt"})
        self._total_bytes += sum(t.nbytes for t in self._pending.values())
        self._shards.append(list(self._pending))
        self._pending.clear()

    def _name_shards(self) -> None:
        count = len(self._shards)
        if count == 1:
            (self._tmp / "shard-0").rename(self._tmp / SINGLE)
            return
        weight_map: dict[str, str] = {}
        for i, names in enumerate(self._shards):
            file = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
            (self._tmp / f"shard-{i}").rename(self._tmp / file)
            weight_map.update(dict.fromkeys(names, file))
        metadata = {"total_size": self._total_bytes}
        self._write_json(INDEX, {"metadata": metadata, "weight_map": weight_map})

    def _write_json(self, file: str, value: dict[str, Any]) -> None:
        text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
        (self._tmp / file).write_text(text, encoding="utf-8")


def _copy_other_files(source: Path, target: Path) -> None:
    """Copies what is not weights; tokenizers come in too many files to list them."""
    for path in source.iterdir():
        if path.name.startswith(".") or path.name.endswith(tuple(WEIGHT_SUFFIXES)):
            continue
        if path.is_file():
            shutil.copyfile(path, target / path.name)
        elif path.name == "additional_chat_templates":
            shutil.copytree(path, target / path.name)


def _sync(path: Path) -> None:
    """Puts a file or a folder's entries on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
