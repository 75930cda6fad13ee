"""Weights of pretend ranks: explicit references for every layout, and plans on plain dicts.

The references are written the slow and obvious way, with torch operations on whole tensors,
and share nothing with the layout algebra. A rank is a dict of tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from megappo.topology import Topology
from megappo.weights.canonical import canonical_tensors
from megappo.weights.layout import Layout, box_index
from megappo.weights.plan import Plan
from megappo.weights.shape import ModelShape

Tensors = dict[str, torch.Tensor]

# Where experts are in a layer, and what their gate, up and down projections are called.
EXPERT_NAMES = {
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
    "qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
}
# What each family has that a Llama has not.
SPECIAL: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 8},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "mixtral": {"num_experts": 4, "experts_per_token": 2},
    "qwen3_moe": {"qk_norm": True, "num_experts": 4, "experts_per_token": 2},
}


def tiny_shape(
    family: str = "llama",
    *,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    vocab: int = 101,
    tied: bool = False,
    value_head: bool = False,
) -> ModelShape:
    """A model of a family with different lengths in every dimension."""
    return ModelShape(
        family=family,
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
        **SPECIAL[family],
    )


def numbered(shape: ModelShape, *, value_head: bool = False) -> Tensors:
    """Canonical float64 tensors in which no two elements are equal and none is zero."""
    tensors, first = {}, 1
    for name, size in canonical_tensors(shape, value_head=value_head).items():
        count = torch.Size(size).numel()
        tensors[name] = torch.arange(first, first + count, dtype=torch.float64).view(size)
        first += count
    return tensors


def _pad(matrix: torch.Tensor, multiple: int, padding: float) -> torch.Tensor:
    return functional.pad(matrix, (0, 0, 0, -len(matrix) % multiple), value=padding)


def _chunk_layers(shape: ModelShape, topology: Topology, stage: int, chunk: int) -> list[int]:
    """Layers go round the stages, chunk after chunk; the first chunks have one more."""
    chunks = torch.arange(shape.num_layers).tensor_split(topology.pp * topology.vpp)
    return [int(layer) for layer in chunks[chunk * topology.pp + stage]]


def _megatron_layer(
    shape: ModelShape, topology: Topology, weights: Tensors, layer: int, rank: int
) -> Tensors:
    """A rank's tensors of one layer, by their names in the layer."""
    hf, tp, t = f"model.layers.{layer}", topology.tp, rank % topology.tp
    local = {
        "input_layernorm.weight": weights[f"{hf}.input_layernorm.weight"],
        "pre_mlp_layernorm.weight": weights[f"{hf}.post_attention_layernorm.weight"],
        "self_attention.linear_proj.weight": weights[f"{hf}.self_attn.o_proj.weight"].chunk(
            tp, dim=1
        )[t],
    }
    for kind in ("weight", "bias") if shape.qkv_bias else ("weight",):
        qkv = [weights[f"{hf}.self_attn.{x}_proj.{kind}"].chunk(shape.num_kv_heads) for x in "qkv"]
        groups = [torch.cat(group) for group in zip(*qkv, strict=True)]
        local[f"self_attention.linear_qkv.{kind}"] = torch.cat(groups).chunk(tp)[t]
    for x in "qk" if shape.qk_norm else "":
        name = f"self_attention.{x}_layernorm.weight"
        local[name] = weights[f"{hf}.self_attn.{x}_norm.weight"]
    if not shape.num_experts:
        gate, up, down = (weights[f"{hf}.mlp.{x}_proj.weight"] for x in ("gate", "up", "down"))
        local["mlp.linear_fc1.weight"] = torch.cat((gate.chunk(tp)[t], up.chunk(tp)[t]))
        local["mlp.linear_fc2.weight"] = down.chunk(tp, dim=1)[t]
        return local
    block, gate_name, up_name, down_name = EXPERT_NAMES[shape.family]
    local["mlp.router.weight"] = weights[f"{hf}.{block}.gate.weight"]
    share = shape.num_experts // topology.ep
    for i in range(share):
        expert = f"{hf}.{block}.experts.{rank % topology.ep * share + i}"
        fc1 = [weights[f"{expert}.{x}.weight"] for x in (gate_name, up_name)]
        local[f"mlp.experts.local_experts.{i}.linear_fc1.weight"] = torch.cat(fc1)
        fc2 = weights[f"{expert}.{down_name}.weight"]
        local[f"mlp.experts.local_experts.{i}.linear_fc2.weight"] = fc2
    return local


def megatron_reference(
    shape: ModelShape,
    topology: Topology,
    weights: Tensors,
    *,
    value_head: bool = False,
    padding: float = 0,
) -> list[Tensors]:
    """What every rank of a mesh holds; ``padding`` is in the rows beyond the vocabulary."""
    tp, stage_size = topology.tp, topology.world_size // topology.pp
    multiple = 8 * tp
    ranks: list[Tensors] = []
    for rank in range(topology.world_size):
        stage, t = rank // stage_size, rank % tp
        local: Tensors = {}
        for chunk in range(topology.vpp):
            for i, layer in enumerate(_chunk_layers(shape, topology, stage, chunk)):
                # Experts are spread over the ranks of the stage, which start at a multiple of ep.
                for name, tensor in _megatron_layer(
                    shape, topology, weights, layer, rank % stage_size
                ).items():
                    local[f"{chunk}.decoder.layers.{i}.{name}"] = tensor
        embedding = _pad(weights["model.embed_tokens.weight"], multiple, padding).chunk(tp)[t]
        if stage == 0:
            local["0.embedding.word_embeddings.weight"] = embedding
        if stage == topology.pp - 1:
            last = topology.vpp - 1
            local[f"{last}.decoder.final_layernorm.weight"] = weights["model.norm.weight"]
            if value_head:
                local[f"{last}.output_layer.weight"] = weights["score.weight"]
            elif not shape.tied:
                head = _pad(weights["lm_head.weight"], multiple, padding).chunk(tp)[t]
                local[f"{last}.output_layer.weight"] = head
            elif topology.pp > 1:
                local[f"{last}.output_layer.weight"] = embedding
        ranks.append(local)
    return ranks


def _vllm_experts(shape: ModelShape, weights: Tensors, layer: int, tp: int, t: int) -> Tensors:
    """The stacked experts of one layer on tensor rank ``t``."""
    block, gate, up, down = EXPERT_NAMES[shape.family]
    experts = f"model.layers.{layer}.{block}.experts"
    w13, w2 = [], []
    for e in range(shape.num_experts):
        halves = [weights[f"{experts}.{e}.{x}.weight"].chunk(tp)[t] for x in (gate, up)]
        w13.append(torch.cat(halves))
        w2.append(weights[f"{experts}.{e}.{down}.weight"].chunk(tp, dim=1)[t])
    return {
        f"{experts}.routed_experts.w13_weight": torch.stack(w13),
        f"{experts}.routed_experts.w2_weight": torch.stack(w2),
    }


def vllm_reference(
    shape: ModelShape, world_size: int, engine_tp: int, weights: Tensors
) -> list[Tensors]:
    """What every rank of the engines holds."""
    ranks: list[Tensors] = []
    for rank in range(world_size):
        tp, t = engine_tp, rank % engine_tp
        local: Tensors = {}
        for layer in range(shape.num_layers if shape.num_experts else 0):
            local |= _vllm_experts(shape, weights, layer, tp, t)
        for name, tensor in weights.items():
            if ".experts." in name:
                continue
            if name.endswith(("embed_tokens.weight", "lm_head.weight")):
                local[name] = _pad(tensor, 64, 0).chunk(tp)[t]
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                local[name] = tensor.chunk(tp, dim=1)[t]
            elif ".q_proj." in name:
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
            elif not any(part in name for part in (".k_proj.", ".v_proj.", ".up_proj.")):
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
