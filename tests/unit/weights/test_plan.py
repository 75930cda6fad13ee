"""The layouts and the planner against explicit references, over shapes and parallel sizes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megappo.topology import Topology
from megappo.weights.canonical import canonical_tensors, files_layout
from megappo.weights.layout import Layout
from megappo.weights.megatron import megatron_layout, padded_vocab_size
from megappo.weights.plan import Plan, plan
from megappo.weights.shape import ModelShape
from megappo.weights.vllm import vllm_layout
from tests.support.weights import (
    apply_plan,
    assert_equal_ranks,
    blank,
    megatron_reference,
    numbered,
    tiny_shape,
    vllm_reference,
)

SHAPES = st.builds(
    tiny_shape,
    layers=st.sampled_from([2, 4]),
    heads=st.just(4),
    kv_heads=st.sampled_from([1, 2, 4]),
    vocab=st.sampled_from([7, 96, 101, 130]),
    tied=st.booleans(),
)
TOPOLOGIES = st.builds(
    lambda tp, pp, dp: Topology(tp * pp * dp, tp, pp),
    tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2]),
    dp=st.sampled_from([1, 2]),
)


@settings(max_examples=15, deadline=None)
@given(shape=SHAPES, topology=TOPOLOGIES, value_head=st.booleans())
def test_files_to_mesh_and_back_is_the_identity(
    shape: ModelShape, topology: Topology, value_head: bool
) -> None:
    """Import equals the reference on every rank; export gives back every bit."""
    weights = numbered(shape, value_head=value_head)
    files = files_layout(
        canonical_tensors(shape, value_head=value_head), world_size=topology.world_size
    )
    mesh = megatron_layout(shape, topology, value_head=value_head)
    ranks = blank(mesh)
    apply_plan(plan(files, mesh), [weights], ranks)
    reference = megatron_reference(shape, topology, weights, value_head=value_head)
    assert_equal_ranks(ranks, reference)
    back = blank(files)
    apply_plan(plan(mesh, files), ranks, back)
    assert_equal_ranks(back[:1], [weights])


@settings(max_examples=15, deadline=None)
@given(
    shape=SHAPES,
    topology=TOPOLOGIES,
    engine_tp=st.sampled_from([1, 2, 4]),
)
def test_mesh_to_engines_equals_reference(
    shape: ModelShape, topology: Topology, engine_tp: int
) -> None:
    """Every engine rank gets exactly its own elements, each once, from an equal element."""
    engine_tp = min(engine_tp, topology.world_size)
    weights = numbered(shape)
    engines = vllm_layout(shape, topology.world_size, engine_tp)
    ranks = blank(engines)
    source = megatron_reference(shape, topology, weights)
    apply_plan(plan(megatron_layout(shape, topology), engines), source, ranks)
    expected = vllm_reference(shape, topology.world_size, engine_tp, weights)
    assert_equal_ranks(ranks, expected)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (Topology(4, 2, 2), Topology(4, 4, 1)),
        (Topology(8, 2, 2), Topology(8, 1, 2)),
        (Topology(4, 1, 1), Topology(4, 2, 2)),
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_mesh_to_other_mesh(old: Topology, new: Topology, tied: bool) -> None:
    """The same planner moves weights between meshes that are cut differently."""
    shape = tiny_shape(tied=tied)
    weights = numbered(shape)
    target = megatron_layout(shape, new)
    ranks = blank(target)
    source = megatron_reference(shape, old, weights)
    apply_plan(plan(megatron_layout(shape, old), target), source, ranks)
    assert_equal_ranks(ranks, megatron_reference(shape, new, weights))


def _remote_elements_sent(the_plan: Plan, world_size: int) -> list[int]:
    remote = the_plan.source_rank != the_plan.destination_rank
    sent = np.zeros(world_size, dtype=np.int64)
    np.add.at(sent, the_plan.source_rank[remote], the_plan.extent[remote].prod(axis=1))
    return [int(x) for x in sent]


def test_own_rank_comes_first() -> None:
    """With equal cuts on both sides nothing but unlike fusions leaves its rank."""
    shape = tiny_shape()
    same = plan(vllm_layout(shape, 4, 2), vllm_layout(shape, 4, 2))
    assert (same.source_rank == same.destination_rank).all()
    whole = plan(megatron_layout(shape, Topology(4)), vllm_layout(shape, 4, 2))
    assert (whole.source_rank == whole.destination_rank).all()


def test_replicas_share_the_load() -> None:
    """Four data-parallel replicas of a stage send about as much as each other."""
    topology = Topology(8, 1, 2)
    shape = tiny_shape(layers=4)
    to_engines = plan(megatron_layout(shape, topology), vllm_layout(shape, 8, 1))
    for stage in (0, 1):
        sent = _remote_elements_sent(to_engines, 8)[4 * stage : 4 * stage + 4]
        assert min(sent) > 0
        assert max(sent) <= 1.6 * min(sent)


def test_missing_tensor_is_named() -> None:
    """A source that lacks what the destination needs is refused by name."""
    tied, untied = tiny_shape(tied=True), tiny_shape()
    with pytest.raises(ValueError, match=r"the source has no lm_head\.weight"):
        plan(files_layout(canonical_tensors(tied)), vllm_layout(untied, 1, 1))
    small, large = tiny_shape(vocab=96), tiny_shape(vocab=101)
    with pytest.raises(ValueError, match=r"does not hold all of model\.embed_tokens\.weight"):
        plan(files_layout(canonical_tensors(small)), vllm_layout(large, 1, 1))


@pytest.mark.parametrize(
    ("vocab", "tp", "padded"), [(101, 1, 104), (101, 2, 112), (96, 2, 96), (97, 4, 128)]
)
def test_vocabulary_is_padded_to_eight_rows_per_rank(vocab: int, tp: int, padded: int) -> None:
    """C3: 101 rows at TP2 become 112, and the padding is declared as zeros."""
    shape = tiny_shape(vocab=vocab)
    assert padded_vocab_size(shape, tp) == padded
    layout = megatron_layout(shape, Topology(tp, tp))
    rows = [layout.local_shapes(r)["output_layer.weight"][0] for r in range(tp)]
    assert rows == [padded // tp] * tp
    zeros = layout.zero_extent.prod(axis=1).sum()
    assert zeros == 2 * (padded - vocab) * shape.hidden_size


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp", "what"),
    [
        (6, 3, 2, "num_key_value_heads = 3"),
        (12, 6, 4, "num_key_value_heads = 6"),
        (4, 4, 3, "num_attention_heads = 4"),
        (6, 2, 4, "num_attention_heads = 6"),
    ],
)
def test_tensor_parallel_size_that_cannot_cut_heads(
    heads: int, kv_heads: int, tp: int, what: str
) -> None:
    """C8: refused with both numbers, for the mesh and for the engine, before any weight."""
    shape = tiny_shape(heads=heads, kv_heads=kv_heads)
    with pytest.raises(ValueError, match=f"tensor_model_parallel_size = {tp} .*{what}"):
        megatron_layout(shape, Topology(tp, tp))
    with pytest.raises(ValueError, match=f"vllm.tensor_parallel_size = {tp} .*{what}"):
        vllm_layout(shape, tp, tp)


def test_other_sizes_that_do_not_divide() -> None:
    """Layers over stages and ranks over engines: both numbers in the error."""
    with pytest.raises(ValueError, match=r"size = 2 .*num_hidden_layers = 3"):
        megatron_layout(tiny_shape(layers=3), Topology(2, 1, 2))
    with pytest.raises(ValueError, match=r"size = 2 .*number of ranks = 3"):
        vllm_layout(tiny_shape(), 3, 2)


def test_value_checkpoint_is_no_policy() -> None:
    """A checkpoint with a scalar head has no output head to sample from."""
    with pytest.raises(ValueError, match=r"score\.weight.*no language model"):
        megatron_layout(tiny_shape(value_head=True), Topology(1))


def _pieces(layout: Layout) -> int:
    return len(layout.piece_local)


def test_layout_of_a_large_model_is_cheap() -> None:
    """70 B parameters on 40 ranks: columns only, planned in seconds, no weight allocated."""
    shape = ModelShape(
        family="llama",
        num_layers=80,
        hidden_size=8192,
        ffn_hidden_size=28672,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=128256,
        tied=False,
        norm_eps=1e-5,
        rope_theta=5e5,
        rope_scaling=None,
        max_position_embeddings=131072,
    )
    mesh, engines = megatron_layout(shape, Topology(40, 8, 5)), vllm_layout(shape, 40, 8)
    to_engines = plan(mesh, engines)
    assert _pieces(engines) == len(to_engines.extent)
    wanted = engines.piece_extent.prod(axis=1).sum()
    assert to_engines.extent.prod(axis=1).sum() == wanted
