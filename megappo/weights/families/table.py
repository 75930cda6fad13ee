"""The form of a family table: one row per parameter, names and splits of all three worlds.

A row says what a parameter is called in the checkpoint files, in Megatron and in vLLM, how
checkpoint tensors fuse into one local tensor, and how tensor parallelism cuts it. The table
is data: ``megatron_layout`` and ``vllm_layout`` turn it into boxes for given parallel sizes.
Knows no family and no parallel size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from megappo.weights.shape import ModelShape

Dim = Literal["vocab", "hidden", "q", "kv", "ffn", "head", "experts", "one"]
Fusion = Literal["plain", "qkv", "gate_up"]
Place = Literal["embedding", "layer", "expert", "final", "lm_head", "value_head"]


@dataclass(frozen=True)
class Parameter:
    """One parameter of a family; ``{layer}`` in a name is the layer's number.

    Attributes:
        canonical: Names of the checkpoint tensors, in the order in which they fuse; with
            ``{expert}`` where ``place`` is "expert".
        dims: Dimensions of each of them.
        megatron: Name in a model chunk of a stage, with the chunk's own layer number and the
            rank's own ``{expert}`` number.
        vllm: Name in vLLM's model, None when vLLM does not hold it. Experts are stacked there.
        place: Where in the model it lives; decides the pipeline stage.
        fusion: How the checkpoint tensors share one local tensor.
        split: Dimension that tensor parallelism cuts, None when replicated. Megatron never cuts
            an expert.
    """

    canonical: tuple[str, ...]
    dims: tuple[tuple[Dim, ...], ...]
    megatron: str
    vllm: str | None
    place: Place
    fusion: Fusion = "plain"
    split: int | None = None

    @property
    def padded(self) -> bool:
        """Whether its rows are the vocabulary, which parallel layouts pad with zero rows."""
        return self.dims[0][0] == "vocab"

    @property
    def per_layer(self) -> bool:
        """Whether every layer has one (or one per expert)."""
        return self.place in ("layer", "expert")


@dataclass(frozen=True)
class Family:
    """A model family: its table and the translation of its configuration.

    Attributes:
        table: Every parameter that a checkpoint of this family may have.
        translate: Makes the shape from a parsed ``config.json``; arguments are the
            configuration, whether the files have a value head, and the file's name for errors.
        value_architecture: Class name of transformers for a checkpoint with a value head.
    """

    table: tuple[Parameter, ...]
    translate: Callable[[dict[str, Any], bool, str], ModelShape]
    value_architecture: str


def sizes(shape: ModelShape) -> dict[Dim, int]:
    """The length of every named dimension."""
    return {
        "vocab": shape.vocab_size,
        "hidden": shape.hidden_size,
        "q": shape.num_heads * shape.head_dim,
        "kv": shape.num_kv_heads * shape.head_dim,
        "ffn": shape.ffn_hidden_size,
        "head": shape.head_dim,
        "experts": shape.num_experts,
        "one": 1,
    }
