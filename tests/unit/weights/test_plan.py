"""The layouts and the planner against explicit references, over shapes and parallel sizes."""

from __future__ import annotations

import numpy as np
import pytest

from megappo.topology import Topology
from megappo.weights.canonical import canonical_tensors, files_layout
from megappo.weights.layout import shifted, widened
from megappo.weights.megatron import megatron_layout, padded_vocab_size
from megappo.weights.plan import Plan, plan
from megappo.weights.vllm import vllm_layout
from tests.support.weights import (
    tiny_shape,
)


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
    """Four data-parallel replicas of a stage send as much as each other."""
    topology = Topology(8, 1, 2)
    shape = tiny_shape(layers=4)
    to_engines = plan(megatron_layout(shape, topology), vllm_layout(shape, 8, 1))
    for stage in (0, 1):
        sent = _remote_elements_sent(to_engines, 8)[4 * stage : 4 * stage + 4]
        assert min(sent) > 0
        assert max(sent) <= 1.1 * sum(sent) / len(sent)


def test_same_node_comes_before_other_nodes() -> None:
    """Rank 3 is no part of a mesh of ranks 0-2, whose last is on its node."""
    shape = tiny_shape(layers=4)
    mesh = widened(megatron_layout(shape, Topology(3)), 8)
    engines = shifted(vllm_layout(shape, 5, 1), 3, 8)
    for ranks_per_node, is_near in ((2, True), (None, False)):
        the_plan = plan(mesh, engines, ranks_per_node=ranks_per_node)
        to_3 = the_plan.source_rank[the_plan.destination_rank == 3]
        assert bool((to_3 == 2).all()) == is_near
        sent = _remote_elements_sent(the_plan, 3)
        assert max(sent) <= 1.1 * sum(sent) / len(sent)


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
    rows = [layout.local_shapes(r)["0.output_layer.weight"][0] for r in range(tp)]
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
    with pytest.raises(ValueError, match=r"2 x 2 is more than .*num_hidden_layers = 3"):
        megatron_layout(tiny_shape(layers=3), Topology(2, 1, 2, vpp=2))
    with pytest.raises(ValueError, match=r"size = 2 .*number of ranks = 3"):
        vllm_layout(tiny_shape(), 3, 2)


def test_value_checkpoint_is_no_policy() -> None:
    """A checkpoint with a scalar head has no output head to sample from."""
    with pytest.raises(ValueError, match=r"score\.weight.*no language model"):
        megatron_layout(tiny_shape(value_head=True), Topology(1))


def test_a_part_of_a_plan() -> None:
    """Some of the copies have the columns of these copies."""
    shape = tiny_shape()
    whole = plan(megatron_layout(shape, Topology(4, 2, 2)), vllm_layout(shape, 4, 2))
    part = whole.part(slice(5, 9))
    for column in ("canonical", "source_rank", "source_local", "source_start"):
        assert np.array_equal(getattr(part, column), getattr(whole, column)[5:9])
    for column in ("destination_rank", "destination_local", "destination_start", "extent"):
        assert np.array_equal(getattr(part, column), getattr(whole, column)[5:9])
