"""Properties of every plan: each element once, from an equal one, and the same on all ranks.

On layouts of random boxes, and on those of every family at random parallel sizes, against
explicit references. Elements outside the source's boxes are NaN and would show.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from hashlib import sha256

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megappo.topology import Topology
from megappo.weights.canonical import canonical_tensors, files_layout
from megappo.weights.megatron import megatron_layout
from megappo.weights.plan import plan
from megappo.weights.shape import ModelShape
from megappo.weights.vllm import vllm_layout
from tests.support.boxes import Shapes, held, shapes
from tests.support.weights import (
    SPECIAL,
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
    st.sampled_from(sorted(SPECIAL)),
    layers=st.sampled_from([4, 5]),
    kv_heads=st.sampled_from([1, 2, 4]),
    vocab=st.sampled_from([7, 96, 101, 130]),
    tied=st.booleans(),
)
SIZES = st.fixed_dictionaries(
    {
        "tp": st.sampled_from([1, 2, 4]),
        "pp": st.sampled_from([1, 2]),
        "dp": st.sampled_from([1, 2]),
        "ep": st.sampled_from([1, 2, 4]),
        "vpp": st.sampled_from([1, 2]),
    }
)


def _topology(shape: ModelShape, sizes: dict[str, int]) -> Topology:
    """A mesh of these sizes, without those that this model cannot have."""
    tp, pp, dp = sizes["tp"], sizes["pp"], sizes["dp"]
    ep = math.gcd(sizes["ep"], tp * dp) if shape.num_experts else 1
    return Topology(tp * pp * dp, tp, pp, ep, sizes["vpp"] if pp > 1 else 1)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(canonical=shapes(), world_size=st.integers(1, 4), nodes=st.booleans(), data=st.data())
def test_random_boxes(canonical: Shapes, world_size: int, nodes: bool, data: st.DataObject) -> None:
    """Whatever the cuts: equal elements, each written once, zeros only where declared."""
    count = 0
    weights = {}
    for name, size in canonical.items():
        elements = math.prod(size)
        weights[name] = torch.arange(count + 1, count + elements + 1).double().view(size)
        count += elements
    source, tensors = data.draw(held(canonical, weights, world_size, math.nan))
    destination, expected = data.draw(held(canonical, weights, world_size, 0.0))
    found = blank(destination)
    the_plan = plan(source, destination, ranks_per_node=2 if nodes else None)
    apply_plan(the_plan, tensors, found)
    assert_equal_ranks(found, expected)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(shape=SHAPES, sizes=SIZES, value_head=st.booleans())
def test_files_to_mesh_and_back_is_the_identity(
    shape: ModelShape, sizes: dict[str, int], value_head: bool
) -> None:
    """Import equals the reference on every rank; export gives back every bit."""
    topology = _topology(shape, sizes)
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
    padded = megatron_reference(shape, topology, weights, value_head=value_head, padding=math.nan)
    apply_plan(plan(mesh, files), padded, back)
    assert_equal_ranks(back[:1], [weights])


@settings(max_examples=25, deadline=None, derandomize=True)
@given(shape=SHAPES, sizes=SIZES, engine_tp=st.sampled_from([1, 2, 4]))
def test_mesh_to_engines_equals_reference(
    shape: ModelShape, sizes: dict[str, int], engine_tp: int
) -> None:
    """Every engine rank gets exactly its own elements, each once, from an equal element."""
    topology = _topology(shape, sizes)
    assume(topology.world_size % engine_tp == 0)
    weights = numbered(shape)
    engines = vllm_layout(shape, topology.world_size, engine_tp)
    ranks = blank(engines)
    source = megatron_reference(shape, topology, weights, padding=math.nan)
    apply_plan(plan(megatron_layout(shape, topology), engines), source, ranks)
    expected = vllm_reference(shape, topology.world_size, engine_tp, weights)
    assert_equal_ranks(ranks, expected)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(shape=SHAPES, old=SIZES, new=SIZES)
def test_mesh_to_other_mesh(shape: ModelShape, old: dict[str, int], new: dict[str, int]) -> None:
    """Between meshes that are cut differently, of as many ranks or not."""
    here, there = _topology(shape, old), _topology(shape, new)
    weights = numbered(shape)
    target = megatron_layout(shape, there)
    ranks = blank(target)
    source = megatron_reference(shape, here, weights, padding=math.nan)
    apply_plan(plan(megatron_layout(shape, here), target), source, ranks)
    assert_equal_ranks(ranks, megatron_reference(shape, there, weights))


def plan_digest() -> str:
    """Of some plans with replicas to choose from."""
    digest = sha256()
    for family in sorted(SPECIAL):
        shape = tiny_shape(family, layers=5)
        mesh = megatron_layout(shape, Topology(12, 2, 2))
        for ranks_per_node in (None, 4):
            to_engines = plan(mesh, vllm_layout(shape, 12, 4), ranks_per_node=ranks_per_node)
            digest.update(to_engines.ends.tobytes())
    return digest.hexdigest()


def test_every_process_makes_the_same_plan() -> None:
    """Another process, which hashes strings in another way, plans the same copies."""
    code = "from tests.unit.weights.test_properties import plan_digest; print(plan_digest())"
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    output = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    assert output.split() == [plan_digest()]
