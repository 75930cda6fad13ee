"""What lies beside the weights of a checkpointed model: where it came from, and how it is cut.

``hf/`` is a copy of the Hugging Face folder without its weights (configuration, tokenizer,
chat template, generation config); ``megappo.json`` says which head the model has and in which
types its files were. Training checkpoints and the checkpoint tools write the same, so that
either is exported alike. Knows no tensors.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from megappo.topology import Topology
from megappo.weights.families import VALUE_HEAD
from megappo.weights.hf_files import CheckpointReader, copy_other_files

HF = "hf"
RECORD = "megappo.json"


@dataclass(frozen=True)
class ModelRecord:
    """How a checkpointed model relates to the Hugging Face folder that it came from.

    Attributes:
        head: "lm", or "value" for one float per token.
        dtype: type of the tensors in that folder, ``bfloat16``, say.
        other_dtypes: types of the tensors that have another one, by name.
        parallel: sizes of the mesh that wrote the checkpoint; it loads at any other.
    """

    head: Literal["lm", "value"]
    dtype: str
    other_dtypes: dict[str, str] = field(default_factory=dict)
    parallel: dict[str, int] = field(default_factory=dict)

    def dtype_of(self, name: str) -> torch.dtype:
        """Type of a tensor in the Hugging Face folder."""
        dtype = vars(torch)[self.other_dtypes.get(name, self.dtype)]
        assert isinstance(dtype, torch.dtype)
        return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def stored_dtypes(reader: CheckpointReader) -> tuple[str, dict[str, str]]:
    """The type that most tensors of a folder have, and those of the others by name."""
    names = {name: dtype_name(reader.dtype(name)) for name in sorted(reader.names)}
    (most, _), *_ = Counter(names.values()).most_common(1)
    return most, {name: dtype for name, dtype in names.items() if dtype != most}


def write_model_files(
    folder: Path,
    source: Path,
    *,
    head: Literal["lm", "value"],
    topology: Topology,
    dtype: torch.dtype | None = None,
) -> None:
    """Write ``hf/`` and ``megappo.json`` into a checkpointed model's folder.

    Args:
        folder: of the distributed checkpoint.
        source: Hugging Face folder that the model came from.
        head: the model's.
        topology: mesh that writes the checkpoint.
        dtype: type to export to instead of the source's; ``hf/config.json`` says so.
    """
    target = folder / HF
    target.mkdir()
    copy_other_files(source, target)
    reader = CheckpointReader(source)
    most, others = stored_dtypes(reader)
    if head == "value" and VALUE_HEAD not in reader.names:
        others = {**others, VALUE_HEAD: "float32"}  # as a run's own export has it
    if dtype is not None:
        most, others = dtype_name(dtype), {}
        path = target / "config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        text = json.dumps({**config, **dtype_change(config, dtype)}, indent=2, ensure_ascii=False)
        path.write_text(text + "\n", encoding="utf-8")
    sizes = dataclasses.asdict(topology)
    record = ModelRecord(head, most, others, sizes)
    (folder / RECORD).write_text(json.dumps(dataclasses.asdict(record), indent=1) + "\n")


def dtype_change(config: Mapping[str, object], dtype: torch.dtype) -> dict[str, str]:
    """The field of a ``config.json`` that says the weights' type, with this one."""
    key = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
    return {key: dtype_name(dtype)}


def read_record(folder: Path) -> ModelRecord | None:
    """Read ``folder/megappo.json``; None where there is none.

    Raises:
        ValueError: the file is something else.
    """
    path = folder / RECORD
    if not path.is_file():
        return None
    try:
        record = ModelRecord(**json.loads(path.read_text()))
        for name in (record.dtype, *record.other_dtypes.values()):
            assert isinstance(vars(torch)[name], torch.dtype)
    except (ValueError, TypeError, KeyError, AssertionError) as error:
        raise ValueError(f"{path} is not a record of megappo's: {error}") from error
    return record
