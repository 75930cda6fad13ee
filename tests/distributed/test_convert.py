"""Conversion of checkpoints: the identity there and back, from any ranks, for Megatron itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from megappo.checkpoint.model_files import write_model_files
from megappo.checkpoint.sharded import save_role
from megappo.mesh.rank import MeshRank
from megappo.mesh.settings import (
    MeshSettings,
    OptimizerSettings,
    PolicyLossSettings,
    RoleSettings,
    ValueLossSettings,
)
from megappo.topology import Topology
from megappo.weights.families import load_shape
from tests.support.convert import (
    Tensors,
    assert_same,
    hf_tensors,
    make_source,
    other_files,
    stored_tensors,
    there_and_back,
    to_hf,
    to_megatron,
)
from tests.support.models import FAMILIES
from tests.support.ranks import run_ranks
from tests.support.weights import megatron_reference

FOLDER = TemporaryDirectory(prefix="convert-")
# Per family, what the tools must carry over beyond the weights (C1, C11).
SPECIAL: dict[str, dict[str, Any]] = {
    "llama": {"kv_heads": 1},
    "qwen2": {"rms_norm_eps": 1e-3, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "qwen3": {"tied": True, "rms_norm_eps": 1e-3},
}


@cache
def source(family: str) -> Path:
    """A folder of a family."""
    return make_source(Path(FOLDER.name) / family, family, **SPECIAL.get(family, {}))


@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back_is_the_identity(family: str, tmp_path: Path) -> None:
    """C1, C3, C10, C11: tensors, names, configuration, tokenizer, template, generation, index."""
    folder, back = source(family), tmp_path / "back"
    [worst] = run_ranks(1, there_and_back, str(folder), str(tmp_path / "megatron"), str(back))
    assert worst <= 1e-4
    tensors = hf_tensors(folder)
    assert_same(hf_tensors(back), tensors)
    assert other_files(back) == other_files(folder)
    index = json.loads((back / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    assert set(index["weight_map"]) == set(tensors) and len(set(index["weight_map"].values())) >= 3
    assert GenerationConfig.from_pretrained(back).eos_token_id == [2, 7]
    assert len(AutoTokenizer.from_pretrained(back)) == 104
    auto: Any = AutoModelForCausalLM
    _, loading = auto.from_pretrained(back, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_any_number_of_ranks_writes_the_same(family: str, tmp_path: Path) -> None:
    """C3: as read back, bit for bit; every rank writes a share."""
    written = []
    for ranks in (1, 3):
        out = tmp_path / f"by_{ranks}"
        run_ranks(ranks, to_megatron, str(source(family)), str(out), {"check": False})
        files = sorted(out.glob("*.distcp"))
        assert len(files) == ranks and all(file.stat().st_size > 1000 for file in files)
        written.append(stored_tensors(out))
    assert not any(t.isnan().any() for t in written[0].values())
    assert_same(written[1], written[0])


def vanilla(
    out: Path, checkpoint: Path, hf: Path, sizes: dict[str, int], tokens: list[int] | None = None
) -> list[Tensors]:
    """The parameters that plain Megatron-Core loads on every rank."""
    shape = load_shape(hf)
    moe: dict[str, Any] = {
        "num_moe_experts": shape.num_experts,
        "moe_router_topk": shape.experts_per_token,
        "moe_ffn_hidden_size": shape.ffn_hidden_size,
        "moe_token_dispatcher_type": "allgather",  # the other one makes a CUDA stream
        "moe_router_load_balancing_type": "none",
    }
    multiple = 8 * sizes["tp"]
    settings = {
        **sizes,
        "checkpoint": str(checkpoint),
        "out": str(out),
        "config": {
            "num_layers": shape.num_layers,
            "hidden_size": shape.hidden_size,
            "ffn_hidden_size": shape.ffn_hidden_size,
            "num_attention_heads": shape.num_heads,
            "num_query_groups": shape.num_kv_heads,
            "kv_channels": shape.head_dim,
            "layernorm_epsilon": shape.norm_eps,
            "add_qkv_bias": shape.qkv_bias,
            "qk_layernorm": shape.qk_norm,
            **(moe if shape.num_experts else {}),
        },
        "spec": {"num_experts": shape.num_experts or None, "qk_layernorm": shape.qk_norm},
        "model": {
            "vocab_size": -(-shape.vocab_size // multiple) * multiple,
            "max_sequence_length": 64,
            "rotary_base": shape.rope_theta,
            "share_embeddings_and_output_weights": shape.tied,
        },
        "tokens": tokens,
    }
    out.mkdir()
    (out / "settings.json").write_text(json.dumps(settings))
    subprocess.run(
        [sys.executable, "-m", "tests.distributed.vanilla_megatron", str(out / "settings.json")],
        check=True,
        timeout=240,
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
    )
    return [torch.load(out / f"rank_{r}.pt") for r in range(sizes["world_size"])]


@pytest.mark.slow
def test_megatron_core_loads_a_dense_model_alone(tmp_path: Path) -> None:
    """At TP2 x PP2, every rank's shards, by Megatron-Core's own layers and loader."""
    folder = make_source(tmp_path / "source", "llama", layers=2)
    run_ranks(1, to_megatron, str(folder), str(tmp_path / "megatron"), {"check": False})
    sizes = {"world_size": 4, "tp": 2, "pp": 2, "ep": 1}
    loaded = vanilla(tmp_path / "out", tmp_path / "megatron", folder, sizes)
    topology = Topology(4, tp=2, pp=2)
    for rank, expected in enumerate(
        megatron_reference(load_shape(folder), topology, hf_tensors(folder))
    ):
        assert_same({f"0.{name}": t for name, t in loaded[rank].items()}, expected)


@pytest.mark.slow
def test_megatron_core_answers_as_transformers(tmp_path: Path) -> None:
    """C11: from the checkpoint alone, with biases, a tied head, and its own attention."""
    folder = source("qwen2")
    run_ranks(1, to_megatron, str(folder), str(tmp_path / "megatron"), {"check": False})
    tokens = list(range(3, 40))
    sizes = {"world_size": 1, "tp": 1, "pp": 1, "ep": 1}
    vanilla(tmp_path / "out", tmp_path / "megatron", folder, sizes, tokens)
    found = torch.load(tmp_path / "out" / "logits.pt")[:, :103]
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([tokens])).logits[0]
    assert float(expected.abs().max()) > 1
    assert float((found - expected).abs().max()) <= 1e-4


def test_megatron_core_loads_experts_alone(tmp_path: Path) -> None:
    """At EP2: each rank its own two experts, whole, and the router."""
    folder = source("qwen3_moe")
    run_ranks(2, to_megatron, str(folder), str(tmp_path / "megatron"), {"check": False})
    sizes = {"world_size": 2, "tp": 1, "pp": 1, "ep": 2}
    loaded = vanilla(tmp_path / "out", tmp_path / "megatron", folder, sizes)
    weights = hf_tensors(folder)
    for rank, tensors in enumerate(loaded):
        assert not any(t.isnan().any() for t in tensors.values())
        for layer in range(3):
            hf, here = f"model.layers.{layer}", f"decoder.layers.{layer}"
            for e in range(2):
                expert = f"{hf}.mlp.experts.{2 * rank + e}"
                gate_up = torch.cat([weights[f"{expert}.{x}_proj.weight"] for x in ("gate", "up")])
                local = f"{here}.mlp.experts.local_experts.{e}"
                assert torch.equal(tensors[f"{local}.linear_fc1.weight"], gate_up)
                down = weights[f"{expert}.down_proj.weight"]
                assert torch.equal(tensors[f"{local}.linear_fc2.weight"], down)
            router = weights[f"{hf}.mlp.gate.weight"]
            assert torch.equal(tensors[f"{here}.mlp.router.weight"], router)
            norm = weights[f"{hf}.self_attn.q_norm.weight"]
            assert torch.equal(tensors[f"{here}.self_attention.q_layernorm.weight"], norm)


def train_and_save(number: int, folder: str, hf: str, topology: Topology) -> None:
    """A training checkpoint of actor and critic, and what the run itself exports."""
    rank = MeshRank(number, topology, MeshSettings())
    adam = OptimizerSettings(lr=1e-3)
    rank.add_role(RoleSettings("actor", hf, "lm", adam, PolicyLossSettings()))
    rank.add_role(RoleSettings("critic", hf, "value", adam, ValueLossSettings()))
    for role in ("actor", "critic"):
        target = rank.roles[role]
        for module in target.modules:
            for parameter in module.parameters():
                parameter.data.mul_(1.5)
        path = Path(folder) / "step_1" / role
        save_role(path, target.modules, target.optimizer, target.scheduler)
        if number == 0:
            head = target.settings.head
            write_model_files(path, Path(hf), head=head, topology=topology)
        rank.export_hf(role, Path(folder) / f"{role}_exported")


@pytest.mark.parametrize(
    ("family", "topology"),
    [("llama", Topology(4, tp=2, pp=2)), ("qwen3_moe", Topology(2, ep=2))],
    ids=["tp2pp2", "ep2"],
)
def test_training_checkpoints_are_exported_alike(
    family: str, topology: Topology, tmp_path: Path
) -> None:
    """C1, C6: of any mesh, optimizer state left out; as the run itself exports the model."""
    options = {**SPECIAL.get(family, {}), "kv_heads": 2}
    folder = make_source(tmp_path / "source", family, **options, tied=True)
    run_ranks(topology.world_size, train_and_save, str(tmp_path), str(folder), topology)
    for role in ("actor", "critic"):
        out = tmp_path / f"{role}_converted"
        run_ranks(1, to_hf, str(tmp_path / "step_1" / role), str(out), {})
        expected = tmp_path / f"{role}_exported"
        assert_same(hf_tensors(out), hf_tensors(expected))
        assert other_files(out) == other_files(expected)
