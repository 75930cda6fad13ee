"""Where a Megatron mesh holds the weights, under tensor, pipeline and data parallelism.

Local names are those of ``GPTModel.named_parameters`` with the local layer spec, behind the
number of the model chunk (``0.decoder...``). Query, key and value rows are fused per query
group and the stack is cut by rows; gate and up are cut first and then stacked; the
vocabulary is padded; an expert is whole on its rank. Imports no Megatron.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from megappo.topology import Topology
from megappo.weights.canonical import (
    all_names,
    canonical_tensors,
    num_copies,
    parameters,
    tensor_shapes,
    tied_head,
)
from megappo.weights.cut import Rows, columns, equal_share, stack, vocabulary, window
from megappo.weights.families.table import Parameter, sizes
from megappo.weights.layout import Ints, Layout, LayoutBuilder, LocalTensor
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
    for row in parameters(shape, value_head=value_head):
        canonical = builder.canonical_ids(all_names(shape, row))
        by_layer = canonical.reshape(-1, num_copies(shape, row), len(row.canonical))
        for stage, chunk in _chunks(shape, topology, row):
            layers = topology.layers(shape.num_layers, stage, chunk) if row.per_layer else range(1)
            here = by_layer[layers.start : layers.stop]
            if row.place == "expert":
                _add_experts(builder, shape, topology, row, stage, chunk, here)
                continue
            names = [f"{chunk}.{row.megatron.format(layer=i)}" for i in range(len(layers))]
            for tp_rank in range(topology.tp):
                tensor = _local_tensor(shape, topology.tp, row, tp_rank)
                builder.add(topology.tensor_ranks(stage, tp_rank), names, tensor, here[:, 0])
    return builder.build()


def _add_experts(
    builder: LayoutBuilder,
    shape: ModelShape,
    topology: Topology,
    row: Parameter,
    stage: int,
    chunk: int,
    canonical: Ints,
) -> None:
    """Adds one row for every expert of a stage's chunk: whole, on the ranks of its share.

    ``canonical`` [layers, experts, parts] are the chunk's canonical tensors.
    """
    layers, _, parts = canonical.shape
    share = shape.num_experts // topology.ep
    names = [
        f"{chunk}.{row.megatron.format(layer=i, expert=e)}"
        for i in range(layers)
        for e in range(share)
    ]
    tensor = _local_tensor(shape, 1, row, 0)
    for ep_rank in range(topology.ep):
        own = canonical[:, ep_rank * share : (ep_rank + 1) * share].reshape(-1, parts)
        builder.add(topology.expert_ranks(stage, ep_rank), names, tensor, own)


def check_divisible(shape: ModelShape, topology: Topology) -> None:
    """Refuses a mesh that cannot cut this model evenly, before any weight is read.

    Raises:
        ValueError: naming the two numbers and the key to change.
    """
    tp, kv_heads = topology.tp, shape.num_kv_heads
    key = f"megatron.tensor_model_parallel_size = {tp}"
    for what, size in (
        ("num_attention_heads", shape.num_heads),
        ("intermediate_size", tp if shape.num_experts else shape.ffn_hidden_size),
        ("rows of queries, keys and values", sum(r.count for r in _query_groups(shape))),
    ):
        if size % tp:
            raise ValueError(f"{key} does not divide the model's {what} = {size}")
    if kv_heads % tp and tp % kv_heads:
        raise ValueError(
            f"{key} neither divides the model's num_key_value_heads = {kv_heads} "
            f"nor is a multiple of it"
        )
    topology.layers(shape.num_layers, 0)
    if shape.num_experts % topology.ep:
        raise ValueError(
            f"megatron.expert_model_parallel_size = {topology.ep} does not divide the model's "
            f"number of experts = {shape.num_experts}"
        )


def check_sequence_parallel(shape: ModelShape, topology: Topology, enabled: bool) -> None:
    """Refuses experts on tensor ranks that all hold the whole sequence.

    Experts are whole on their ranks, so each token would reach its expert once per tensor rank.

    Raises:
        ValueError: naming the key to change.
    """
    if shape.num_experts and topology.tp > 1 and not enabled:
        raise ValueError(
            f"megatron.sequence_parallel = false, but a model with {shape.num_experts} experts "
            f"per layer at tensor_model_parallel_size = {topology.tp} needs it: set it to true"
        )


def _chunks(shape: ModelShape, topology: Topology, row: Parameter) -> Iterator[tuple[int, int]]:
    """The pipeline stages, and their model chunks, that hold a row."""
    if row.per_layer:
        yield from product(range(topology.pp), range(topology.vpp))
    elif row.place == "embedding":
        yield 0, 0
    elif topology.pp > 1 or not tied_head(shape, row):  # else the embedding serves as head
        yield topology.pp - 1, topology.vpp - 1


def _local_tensor(shape: ModelShape, tp: int, row: Parameter, tp_rank: int) -> LocalTensor:
    whole = tensor_shapes(shape, row)
    rest = whole[0][1:]
    if row.fusion == "qkv":
        groups = _query_groups(shape)
        share = equal_share(0, sum(r.count for r in groups), tp_rank, tp)
        return stack(rest, window(groups, share.start, share.count))
    if row.fusion == "gate_up":
        ffn = sizes(shape)["ffn"]
        return stack(rest, [equal_share(part, ffn, tp_rank, tp) for part in (0, 1)])
    if row.padded:
        return vocabulary(whole[0], padded_vocab_size(shape, tp), tp_rank, tp)
    if row.split == 1 and tp > 1:
        return columns(whole[0], tp_rank, tp)
    assert row.split is None or tp == 1, row
    return stack(rest, [Rows(0, 0, whole[0][0])])


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
