"""Family tables by ``model_type``, and the shape of a checkpoint folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megappo.weights.families import llama, mistral, mixtral, qwen2, qwen3, qwen3_moe
from megappo.weights.families.table import Family
from megappo.weights.hf_files import CheckpointReader, read_config
from megappo.weights.shape import ModelShape

FAMILIES: dict[str, Family] = {
    "llama": llama.FAMILY,
    "mistral": mistral.FAMILY,
    "mixtral": mixtral.FAMILY,
    "qwen2": qwen2.FAMILY,
    "qwen3": qwen3.FAMILY,
    "qwen3_moe": qwen3_moe.FAMILY,
}
VALUE_HEAD = "score.weight"


def shape_from_config(
    config: dict[str, Any], *, value_head: bool = False, where: str = "config.json"
) -> ModelShape:
    """The shape that a parsed ``config.json`` describes; ``where`` names the file in errors.

    Raises:
        ValueError: for an unknown ``model_type`` or a field that the family does not understand.
    """
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise ValueError(
            f"{where}: model_type = {model_type!r} is not supported, only {', '.join(FAMILIES)}"
        )
    return FAMILIES[model_type].translate(config, value_head, where)


def load_shape(hf_dir: str | Path) -> ModelShape:
    """The shape of a checkpoint folder; reads ``config.json`` and file headers, no weights.

    Raises:
        ValueError: when the folder is not a checkpoint that megappo can read.
    """
    where = Path(hf_dir) / "config.json"
    config = read_config(hf_dir)
    reader = CheckpointReader(hf_dir)
    shape = shape_from_config(config, value_head=VALUE_HEAD in reader.names, where=str(where))
    if shape.value_head and reader.shape(VALUE_HEAD) != (1, shape.hidden_size):
        raise ValueError(
            f"{hf_dir}: {VALUE_HEAD} has shape {reader.shape(VALUE_HEAD)}; a value head "
            f"has (1, {shape.hidden_size}), a classifier with num_labels = 1"
        )
    return shape
