"""Checkpoints of either format as whole tensors under their Hugging Face names.

``HFModel`` and ``MegatronModel`` answer the same questions (names, shapes, types, content,
logits), so that commands compare and convert without knowing which one they hold. Weights
are read one at a time and only when asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from megappo.checkpoint.convert_read import stored_parameters
from megappo.checkpoint.model_files import HF, ModelRecord, read_record
from megappo.checkpoint.stored import StoredModel
from megappo.models.build import Head, build_model
from megappo.models.meta import build_on_meta
from megappo.models.reference import megatron_outputs, transformers_outputs
from megappo.reshard.hf import UNUSED
from megappo.reshard.whole import WholeTensors
from megappo.topology import Topology
from megappo.weights.families import VALUE_HEAD, shape_from_config
from megappo.weights.hf_files import CheckpointReader, Entry, read_config
from megappo.weights.megatron import megatron_layout
from megappo.weights.shape import ModelShape


class Model(Protocol):
    """A checkpoint of either format."""

    folder: Path
    entries: dict[str, Entry]
    config: dict[str, Any]

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor; not to be written."""

    def outputs(self, sequences: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Logits or values in float32, of weights rounded to ``dtype``."""


class HFModel:
    """A Hugging Face folder.

    Args:
        folder: of the checkpoint.
        score: the value head to use where the folder has none of its own.
    """

    def __init__(self, folder: Path, score: torch.Tensor | None = None) -> None:
        """Reads the headers."""
        self.folder = folder
        self.config = read_config(folder)
        self._reader = CheckpointReader(folder)
        self._score = score
        tied = bool(self.config.get("tie_word_embeddings", False))
        unused = UNUSED if tied or VALUE_HEAD in self._reader.names else UNUSED[:1]
        self.entries = {
            name: Entry(self._reader.dtype(name), self._reader.shape(name))
            for name in sorted(self._reader.names)
            if not name.endswith(unused)
        }

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor; the file's own memory."""
        shape = self.entries[name].shape
        return self._reader.read(name, (0,) * len(shape), shape)

    def outputs(self, sequences: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Logits or values by transformers."""
        score = self.read(VALUE_HEAD) if VALUE_HEAD in self.entries else self._score
        return transformers_outputs(self.folder, sequences, dtype=dtype, score=score)


class MegatronModel:
    """A distributed checkpoint of Megatron-Core, within ``process.mesh``.

    Args:
        folder: of the checkpoint.
        topology: the running mesh.
        hf_dir: Hugging Face folder with the configuration and tokenizer; by default the
            checkpoint's own.

    Attributes:
        hf_dir: that folder.
        shape: the model.
        head: its head.
        record: what megappo noted beside the checkpoint, None for other writers' checkpoints.

    Raises:
        ValueError: the configuration is not there or is not the stored model's.
    """

    def __init__(self, folder: Path, topology: Topology, hf_dir: Path | None = None) -> None:
        """Reads the metadata and compares it with the configuration."""
        self.folder = folder
        self.hf_dir = hf_dir or folder / HF
        if hf_dir is None and not self.hf_dir.is_dir():
            raise ValueError(
                f"{folder} has no {HF}/ with the model's configuration and tokenizer: give the "
                "Hugging Face folder that it came from with --hf"
            )
        self.record: ModelRecord | None = read_record(folder)
        self.config = read_config(self.hf_dir)
        self._topology = topology
        self._stored = StoredModel(folder)
        where = str(self.hf_dir / "config.json")
        self.head: Head = self._find_head(shape_from_config(self.config, where=where))
        self.shape: ModelShape = shape_from_config(
            self.config, value_head=self.head == "value", where=where
        )
        modules = build_on_meta(self.shape, Topology(1), head=self.head, dtype=torch.float32)
        self._parameters = stored_parameters(self._stored, modules, self.shape.vocab_size)
        layout = megatron_layout(self.shape, Topology(1), value_head=self.head == "value")
        self._whole = WholeTensors(layout, self._parameters.part)
        self.entries = {
            name: Entry(self._parameters.dtype(self._whole.source[name]), self._whole.shape(name))
            for name in self._whole.names
        }

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor; cheapest in the order of ``entries``."""
        return self._whole.read(name)

    def outputs(self, sequences: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Logits or values by Megatron."""
        [model] = build_model(
            self.shape,
            self._topology,
            head=self.head,
            dtype=torch.float32,
            sequence_parallel=False,
            recompute=None,
        )
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                stored = self._parameters.part(f"0.{name}", 0, parameter.numel())
                parameter.copy_(stored.to(dtype).view(parameter.shape))
        vocab = self.shape.vocab_size
        return megatron_outputs(model, sequences, head=self.head, vocab_size=vocab)

    def close(self) -> None:
        """Close the files."""
        self._stored.close()

    def _find_head(self, shape: ModelShape) -> Head:
        if self.record is not None:
            return self.record.head
        head = self._stored.entries.get("output_layer.weight")
        return "value" if head is not None and head[1] == (1, shape.hidden_size) else "lm"


def sample_tokens(
    config: dict[str, Any], *, length: int = 48, count: int = 3
) -> list[torch.Tensor]:
    """Random sequences of unequal length, the same for the same configuration."""
    generator = torch.Generator().manual_seed(0)
    longest = min(length, int(config.get("max_position_embeddings", length)))
    return [
        torch.randint(int(config["vocab_size"]), (max(1, longest - 7 * i),), generator=generator)
        for i in range(count)
    ]


def fits_twice(entries: dict[str, Entry]) -> bool:
    """Whether two float32 copies of a model take less than half of the memory that is free."""
    needed = 2 * 4 * sum(torch.Size(entry.shape).numel() for entry in entries.values())
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return needed < int(line.split()[1]) * 1024 // 2
    return False


def say(text: str) -> None:
    """Print a line of the report at once."""
    print(text, flush=True)
