"""Weights of pretend ranks: explicit references for every layout, and plans on plain dicts.

The references are written the slow and obvious way, with torch operations on whole tensors,
and share nothing with the layout algebra. A rank is a dict of tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from megappo.topology import Topology
from megappo.weights.canonical import canonical_tensors
from megappo.weights.layout import Layout, box_index
from megappo.weights.plan import Plan
from megappo.weights.shape import ModelShape

Tensors = dict[str, torch.Tensor]


def tiny_shape(
    *,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    vocab: int = 101,
    tied: bool = False,
    value_head: bool = False,
) -> ModelShape:
    """A Llama with different lengths in every dimension."""
    return ModelShape(
        family="llama",
        num_layers=layers,
        hidden_size=20,
        ffn_hidden_size=24,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=4,
        vocab_size=vocab,
        tied=tied,
        norm_eps=1e-6,
        rope_theta=1e4,
        rope_scaling=None,
        max_position_embeddings=64,
        value_head=value_head,
    )


def numbered(shape: ModelShape, *, value_head: bool = False) -> Tensors:
    """Canonical float64 tensors in which no two elements are equal and none is zero."""
    tensors, first = {}, 1
    for name, size in canonical_tensors(shape, value_head=value_head).items():
        count = torch.Size(size).numel()
        tensors[name] = torch.arange(first, first + count, dtype=torch.float64).view(size)
        first += count
    return tensors


def _pad(matrix: torch.Tensor, multiple: int) -> torch.Tensor:
    return functional.pad(matrix, (0, 0, 0, -len(matrix) % multiple))


def megatron_reference(
    shape: ModelShape, topology: Topology, weights: Tensors, *, value_head: bool = False
) -> list[Tensors]:
    """What every rank of a mesh holds."""
    layers = shape.num_layers // topology.pp
    ranks: list[Tensors] = []
    for rank in range(topology.world_size):
        at = topology.coordinates(rank)
        tp, t = topology.tp, at.tp
        local: Tensors = {}
        if at.pp == 0:
            embedding = _pad(weights["model.embed_tokens.weight"], 8 * tp)
            local["embedding.word_embeddings.weight"] = embedding.chunk(tp)[t]
        for i in range(layers):
            hf = f"model.layers.{at.pp * layers + i}"
            q, k, v = (weights[f"{hf}.self_attn.{x}_proj.weight"] for x in "qkv")
            groups = [
                torch.cat(group)
                for group in zip(*(x.chunk(shape.num_kv_heads) for x in (q, k, v)), strict=True)
            ]
            gate, up = (weights[f"{hf}.mlp.{x}_proj.weight"] for x in ("gate", "up"))
            here = f"decoder.layers.{i}"
            norms = ("input_layernorm", "post_attention_layernorm")
            local[f"{here}.input_layernorm.weight"] = weights[f"{hf}.{norms[0]}.weight"]
            local[f"{here}.pre_mlp_layernorm.weight"] = weights[f"{hf}.{norms[1]}.weight"]
            attention = f"{here}.self_attention"
            local[f"{attention}.linear_qkv.weight"] = torch.cat(groups).chunk(tp)[t]
            output = weights[f"{hf}.self_attn.o_proj.weight"]
            local[f"{attention}.linear_proj.weight"] = output.chunk(tp, dim=1)[t]
            fc1 = torch.cat((gate.chunk(tp)[t], up.chunk(tp)[t]))
            local[f"{here}.mlp.linear_fc1.weight"] = fc1
            down = weights[f"{hf}.mlp.down_proj.weight"]
            local[f"{here}.mlp.linear_fc2.weight"] = down.chunk(tp, dim=1)[t]
        if at.pp == topology.pp - 1:
            local["decoder.final_layernorm.weight"] = weights["model.norm.weight"]
            if value_head:
                local["output_layer.weight"] = weights["score.weight"]
            elif not shape.tied or topology.pp > 1:
                name = "model.embed_tokens.weight" if shape.tied else "lm_head.weight"
                local["output_layer.weight"] = _pad(weights[name], 8 * tp).chunk(tp)[t]
        ranks.append(local)
    return ranks


def vllm_reference(
    shape: ModelShape, world_size: int, engine_tp: int, weights: Tensors
) -> list[Tensors]:
    """What every rank of the engines holds."""
    ranks: list[Tensors] = []
    for rank in range(world_size):
        tp, t = engine_tp, rank % engine_tp
        local: Tensors = {}
        for name, tensor in weights.items():
            if name.endswith(("embed_tokens.weight", "lm_head.weight")):
                local[name] = _pad(tensor, 64).chunk(tp)[t]
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                local[name] = tensor.chunk(tp, dim=1)[t]
            elif name.endswith("q_proj.weight"):
                heads = [tensor.chunk(tp)[t]]
                for x in "kv":
                    whole = weights[name.replace("q_proj", f"{x}_proj")]
                    per_head = whole.chunk(shape.num_kv_heads)
                    if tp > shape.num_kv_heads:
                        heads.append(per_head[t * shape.num_kv_heads // tp])
                    else:
                        heads.append(whole.chunk(tp)[t])
                local[name.replace("q_proj", "qkv_proj")] = torch.cat(heads)
            elif name.endswith("gate_proj.weight"):
                up = weights[name.replace("gate", "up")]
                local[name.replace("gate", "gate_up")] = torch.cat(
                    (tensor.chunk(tp)[t], up.chunk(tp)[t])
                )
            elif not name.endswith(("k_proj.weight", "v_proj.weight", "up_proj.weight")):
                local[name] = tensor
        ranks.append(local)
    return ranks


def blank(layout: Layout, dtype: torch.dtype = torch.float64) -> list[Tensors]:
    """Unwritten tensors of every rank: NaN everywhere."""
    return [
        {name: torch.full(s, torch.nan, dtype=dtype) for name, s in layout.local_shapes(r).items()}
        for r in range(layout.world_size)
    ]


def apply_plan(plan: Plan, source: Sequence[Tensors], destination: Sequence[Tensors]) -> None:
    """Carries out a plan copy by copy; asserts that every element is written exactly once."""
    writes = [{n: torch.zeros(t.shape) for n, t in rank.items()} for rank in destination]
    there, here = plan.destination, plan.source
    for k in range(len(plan.extent)):
        d, s = int(plan.destination_local[k]), int(plan.source_local[k])
        rank, name = int(plan.destination_rank[k]), there.names[there.local_name[d]]
        target = destination[rank][name]
        index = box_index(plan.destination_start[k], plan.extent[k], target.dim())
        origin = source[int(plan.source_rank[k])][here.names[here.local_name[s]]]
        box = origin[box_index(plan.source_start[k], plan.extent[k], origin.dim())]
        target[index] = box.view(target[index].shape)
        writes[rank][name][index] += 1
    for z in range(len(there.zero_local)):
        local = int(there.zero_local[z])
        rank, name = int(there.local_rank[local]), there.names[there.local_name[local]]
        index = box_index(there.zero_start[z], there.zero_extent[z], destination[rank][name].dim())
        destination[rank][name][index] = 0
        writes[rank][name][index] += 1
    assert all(bool((count == 1).all()) for rank in writes for count in rank.values())


def assert_equal_ranks(found: Sequence[Tensors], expected: Sequence[Tensors]) -> None:
    """Asserts that all ranks hold the same names and, bit for bit, the same tensors."""
    assert [set(r) for r in found] == [set(r) for r in expected]
    for rank, tensors in enumerate(expected):
        for name, tensor in tensors.items():
            assert torch.equal(found[rank][name], tensor), (rank, name)
