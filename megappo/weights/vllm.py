"""Where vLLM engines hold the weights, as their parameters are at load time.

Rank ``r`` of the world is tensor rank ``r % W`` of engine ``r // W``. Names are those of
vLLM's ``named_parameters``; what the engine does to a parameter after loading (packing, for
one) is the engine's affair. Imports no vLLM.
"""

from __future__ import annotations

from dataclasses import replace

from megappo.weights.canonical import (
    all_names,
    canonical_tensors,
    parameters,
    tensor_shapes,
    tied_head,
)
from megappo.weights.cut import Rows, columns, equal_share, stack, vocabulary
from megappo.weights.families.table import Parameter, sizes
from megappo.weights.layout import Layout, LayoutBuilder, LocalTensor
from megappo.weights.shape import ModelShape

VOCAB_MULTIPLE = 64


def vllm_layout(shape: ModelShape, world_size: int, engine_tp: int) -> Layout:
    """The layout of ``world_size // engine_tp`` engines, each ``engine_tp`` ranks wide.

    Raises:
        ValueError: when engines do not fill the world or cannot cut the model; names both
            numbers.
    """
    if world_size % engine_tp:
        raise ValueError(
            f"vllm.tensor_parallel_size = {engine_tp} does not divide the number of ranks = "
            f"{world_size}"
        )
    check_engine_divisible(shape, engine_tp)
    builder = LayoutBuilder(world_size, canonical_tensors(shape))
    for row in parameters(shape, value_head=False):
        if tied_head(shape, row):
            continue  # the same parameter as the embedding
        assert row.vllm is not None
        layers = shape.num_layers if row.per_layer else 1
        names = [row.vllm.format(layer=layer) for layer in range(layers)]
        canonical = builder.canonical_ids(all_names(shape, row)).reshape(layers, -1)
        for tp_rank in range(engine_tp):
            ranks = range(tp_rank, world_size, engine_tp)
            builder.add(ranks, names, _local_tensor(shape, engine_tp, row, tp_rank), canonical)
    return builder.build()


def check_engine_divisible(shape: ModelShape, engine_tp: int) -> None:
    """Refuses engines that cannot cut this model evenly, before any weight is read.

    Raises:
        ValueError: naming the two numbers and the key to change.
    """
    key = f"vllm.tensor_parallel_size = {engine_tp}"
    for what, size in (
        ("num_attention_heads", shape.num_heads),
        ("intermediate_size", shape.ffn_hidden_size),
        (f"vocab_size, padded to {VOCAB_MULTIPLE},", _padded_vocab_size(shape)),
    ):
        if size % engine_tp:
            raise ValueError(f"{key} does not divide the model's {what} = {size}")
    if shape.num_kv_heads % engine_tp and engine_tp % shape.num_kv_heads:
        raise ValueError(
            f"{key} neither divides the model's num_key_value_heads = {shape.num_kv_heads} "
            f"nor is a multiple of it"
        )


def _padded_vocab_size(shape: ModelShape) -> int:
    return -(-shape.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def _local_tensor(shape: ModelShape, tp: int, row: Parameter, tp_rank: int) -> LocalTensor:
    if row.place == "expert":
        return _stacked_experts(shape, tp, row, tp_rank)
    whole = tensor_shapes(shape, row)
    rest = whole[0][1:]
    if row.fusion == "qkv":
        size = sizes(shape)
        # With more ranks than key/value heads, neighbouring ranks hold the same head.
        shares = min(tp, shape.num_kv_heads)
        share = tp_rank * shares // tp
        keys, values = (equal_share(part, size["kv"], share, shares) for part in (1, 2))
        return stack(rest, [equal_share(0, size["q"], tp_rank, tp), keys, values])
    if row.fusion == "gate_up":
        ffn = sizes(shape)["ffn"]
        return stack(rest, [equal_share(part, ffn, tp_rank, tp) for part in (0, 1)])
    if row.padded:
        return vocabulary(whole[0], _padded_vocab_size(shape), tp_rank, tp)
    if row.split == 1:
        return columns(whole[0], tp_rank, tp)
    assert row.split is None, row
    return stack(rest, [Rows(0, 0, whole[0][0])])


def _stacked_experts(shape: ModelShape, tp: int, row: Parameter, tp_rank: int) -> LocalTensor:
    """One row of all experts, stacked along a leading dimension, each cut by tensor ranks."""
    whole = tensor_shapes(shape, row)
    if row.fusion == "gate_up":
        ffn = sizes(shape)["ffn"]
        shares = [equal_share(part, ffn, tp_rank, tp) for part in (0, 1)]
        one = stack(whole[0][1:], shares)
    else:
        one = columns(whole[0], tp_rank, tp)
    pieces = tuple(
        replace(
            piece,
            part=expert * len(row.canonical) + piece.part,
            canonical_start=(0, *piece.canonical_start),
            local_start=(expert, *piece.local_start),
            extent=(1, *piece.extent),
        )
        for expert in range(shape.num_experts)
        for piece in one.pieces
    )
    return LocalTensor((shape.num_experts, *one.shape), pieces)
