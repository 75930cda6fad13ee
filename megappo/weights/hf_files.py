"""Hugging Face checkpoint folders: safetensors read by slices and written as a stream.

``CheckpointReader`` opens a single ``model.safetensors`` or an index with its shards and
reads boxes of tensors; ``CheckpointWriter`` takes whole tensors one by one and leaves either
a complete folder or none. Both know files and names only: what the tensors mean is for the
layouts, and who holds them for ``reshard``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
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
