"""Where a Megatron mesh holds the weights, under tensor, pipeline and data parallelism.

Local names are those of ``GPTModel.named_parameters`` with the local layer spec. Query, key
and value rows are fused per query group and the stack is cut by rows; gate and up are cut
first and then stacked; the vocabulary is padded. Imports no Megatron.
"""

from __future__ import annotations

from megappo.topology import Topology
from megappo.weights.canonical import (
    canonical_names,
    canonical_tensors,
    parameters,
    tensor_shapes,
    tied_head,
)
from megappo.weights.cut import (
    LocalTensor,
    Rows,
    columns,
    equal_share,
    stack,
    vocabulary,
    window,
)
from megappo.weights.families.table import Parameter, sizes
from megappo.weights.layout import Layout, LayoutBuilder
from megappo.weights.shape import ModelShape

# Vocabulary rows per tensor rank are a multiple of this.
VOCAB_MULTIPLE = 8


def padded_vocab_size(shape: ModelShape, tp: int) -> int:
    """Rows of the embedding over all tensor ranks, padding included."""
    multiple = VOCAB_MULTIPLE * tp
    return -(-shape.vocab_size // multiple) * multiple


def megatron_layout(shape: ModelShape, topology: Topology, *, value_head: bool = False) -> Layout:
    """The layout of a model on a mesh.

    Args:
        shape: Model.
        topology: Mesh.
        value_head: Whether the last stage has a scalar head, held whole by its tensor ranks.

    Raises:
        ValueError: when the mesh does not cut the model evenly; names both numbers.
    """
    check_divisible(shape, topology)
    builder = LayoutBuilder(topology.world_size, canonical_tensors(shape, value_head=value_head))
    layers = shape.num_layers // topology.pp
    for row in parameters(shape, value_head=value_head):
        for stage in _stages(shape, topology, row):
            for tp_rank in range(topology.tp):
                ranks = [topology.rank(stage, dp, tp_rank) for dp in range(topology.dp)]
                for i in range(layers if row.place == "layer" else 1):
                    local = _local_tensor(shape, topology.tp, row, stage * layers + i, tp_rank)
                    name = row.megatron.format(layer=i)
                    builder.add(ranks, name, local.shape, local.pieces, local.zeros)
    return builder.build()


def check_divisible(shape: ModelShape, topology: Topology) -> None:
    """Refuses a mesh that cannot cut this model evenly, before any weight is read.

    Raises:
        ValueError: naming the two numbers and the key to change.
    """
    tp, kv_heads = topology.tp, shape.num_kv_heads
    key = f"megatron.tensor_model_parallel_size = {tp}"
    for what, size in (
        ("num_attention_heads", shape.num_heads),
        ("intermediate_size", shape.ffn_hidden_size),
        ("rows of queries, keys and values", sum(r.count for r in _query_groups(shape))),
    ):
        if size % tp:
            raise ValueError(f"{key} does not divide the model's {what} = {size}")
    if kv_heads % tp and tp % kv_heads:
        raise ValueError(
            f"{key} neither divides the model's num_key_value_heads = {kv_heads} "
            f"nor is a multiple of it"
        )
    if shape.num_layers % topology.pp:
        raise ValueError(
            f"megatron.pipeline_model_parallel_size = {topology.pp} does not divide the "
            f"model's num_hidden_layers = {shape.num_layers}"
        )


def _stages(shape: ModelShape, topology: Topology, row: Parameter) -> range:
    """The pipeline stages that hold a row."""
    last = topology.pp - 1
    if row.place == "layer":
        return range(topology.pp)
    if row.place == "embedding":
        return range(1)
    if tied_head(shape, row) and last == 0:
        return range(0)  # the one stage uses its embedding
    return range(last, last + 1)


def _local_tensor(
    shape: ModelShape, tp: int, row: Parameter, layer: int, tp_rank: int
) -> LocalTensor:
    names = canonical_names(shape, row, layer)
    whole = tensor_shapes(shape, row)
    rest = whole[0][1:]
    if row.fusion == "qkv":
        groups = _query_groups(shape)
        share = equal_share(0, sum(r.count for r in groups), tp_rank, tp)
        return stack(names, rest, window(groups, share.start, share.count))
    if row.fusion == "gate_up":
        ffn = sizes(shape)["ffn"]
        return stack(names, rest, [equal_share(part, ffn, tp_rank, tp) for part in (0, 1)])
    if row.padded:
        return vocabulary(names[0], whole[0], padded_vocab_size(shape, tp), tp_rank, tp)
    if row.split == 1:
        return columns(names[0], whole[0], tp_rank, tp)
    assert row.split is None, row
    return stack(names, rest, [Rows(0, 0, whole[0][0])])


def _query_groups(shape: ModelShape) -> list[Rows]:
    """All rows of the fused tensor: the queries of a group, then its key, then its value."""
    head, queries = shape.head_dim, shape.num_heads // shape.num_kv_heads * shape.head_dim
    return [
        rows
        for group in range(shape.num_kv_heads)
        for rows in (
            Rows(0, group * queries, queries),
            Rows(1, group * head, head),
            Rows(2, group * head, head),
        )
    ]
