"""The canonical tensors of a model, and the layout of a rank that holds them whole.

Canonical means: names and shapes as in the checkpoint files. Which table rows a model uses
(tied embeddings, language-model or value head) is decided here, for all layouts.
"""

from __future__ import annotations

from collections.abc import Mapping

from megappo.weights.families import FAMILIES, VALUE_HEAD
from megappo.weights.families.table import Parameter, sizes
from megappo.weights.layout import Layout, LayoutBuilder, LocalTensor, Piece
from megappo.weights.shape import ModelShape


def parameters(shape: ModelShape, *, value_head: bool) -> tuple[Parameter, ...]:
    """The rows of the family's table that this model has; a tied head is the embedding.

    Args:
        shape: Model.
        value_head: Whether the model's head is a scalar instead of the vocabulary.
    """
    other = "lm_head" if value_head else "value_head"
    return tuple(p for p in FAMILIES[shape.family].table if p.place != other)


def tensor_shapes(shape: ModelShape, parameter: Parameter) -> list[tuple[int, ...]]:
    """Shapes of the canonical tensors of one row."""
    size = sizes(shape)
    return [tuple(size[d] for d in dims) for dims in parameter.dims]


def canonical_tensors(shape: ModelShape, *, value_head: bool = False) -> dict[str, tuple[int, ...]]:
    """Names and shapes in the checkpoint files, in the order of the model.

    A tied model has no output head of its own. A model with a value head has ``score.weight``,
    whether or not the checkpoint that it starts from has one.

    Raises:
        ValueError: when a language model is asked of a checkpoint that has a value head.
    """
    if shape.value_head and not value_head:
        raise ValueError(f"the checkpoint has a value head ({VALUE_HEAD}): it is no language model")
    rows = [p for p in parameters(shape, value_head=value_head) if not tied_head(shape, p)]
    tensors: dict[str, tuple[int, ...]] = {}
    for places in (("embedding",), ("layer", "expert"), ("final",), ("lm_head",), ("value_head",)):
        for layer in range(shape.num_layers if "layer" in places else 1):
            for row in (r for r in rows if r.place in places):
                sizes_of_row = tensor_shapes(shape, row)
                for expert in range(num_copies(shape, row)):
                    names = canonical_names(shape, row, layer, expert)
                    tensors.update(zip(names, sizes_of_row, strict=True))
    return tensors


def tied_head(shape: ModelShape, parameter: Parameter) -> bool:
    """Whether a row is an output head that is the embedding."""
    return shape.tied and parameter.place == "lm_head"


def num_copies(shape: ModelShape, parameter: Parameter) -> int:
    """How many there are of a row in a layer: one per expert, or one."""
    return shape.num_experts if parameter.place == "expert" else 1


def canonical_names(
    shape: ModelShape, parameter: Parameter, layer: int = 0, expert: int = 0
) -> list[str]:
    """Names of the canonical tensors of one row; of the embedding for a tied head."""
    if tied_head(shape, parameter):
        table = FAMILIES[shape.family].table
        parameter = next(p for p in table if p.place == "embedding")
    return [name.format(layer=layer, expert=expert) for name in parameter.canonical]


def all_names(shape: ModelShape, parameter: Parameter) -> list[list[str]]:
    """``canonical_names`` of every layer, and in a layer of every expert."""
    return [
        canonical_names(shape, parameter, layer, expert)
        for layer in range(shape.num_layers if parameter.per_layer else 1)
        for expert in range(num_copies(shape, parameter))
    ]


def files_layout(
    canonical: Mapping[str, tuple[int, ...]], *, rank: int = 0, world_size: int = 1
) -> Layout:
    """The layout in which one rank holds canonical tensors whole, under their own names.

    Args:
        canonical: Shapes by name: ``canonical_tensors`` or some of them.
        rank: The rank that holds them.
        world_size: Number of ranks; the others hold nothing.
    """
    builder = LayoutBuilder(world_size, canonical)
    for name, size in canonical.items():
        origin = (0,) * len(size)
        whole = LocalTensor(size, (Piece(0, origin, origin, size),))
        builder.add([rank], [name], whole, builder.canonical_ids([[name]]))
    return builder.build()
