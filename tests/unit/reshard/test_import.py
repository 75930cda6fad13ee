"""Import from safetensors: the right slices, cast, and a clear word when the folder is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megappo.reshard import hf
from megappo.reshard.hf import import_hf
from megappo.topology import Topology
from megappo.weights.canonical import canonical_tensors, files_layout
from megappo.weights.families import load_shape
from megappo.weights.hf_files import CheckpointReader
from megappo.weights.megatron import megatron_layout
from megappo.weights.plan import plan
from tests.support.models import make_llama
from tests.support.weights import (
    Tensors,
    apply_plan,
    assert_equal_ranks,
    blank,
    megatron_reference,
)


def _imported(
    folder: Path, topology: Topology, dtype: torch.dtype = torch.float32, value_head: bool = False
) -> list[Tensors]:
    layout = megatron_layout(load_shape(folder), topology, value_head=value_head)
    ranks = blank(layout, dtype)
    for rank, tensors in enumerate(ranks):
        import_hf(CheckpointReader(folder), layout, rank, tensors)
    return ranks


@pytest.mark.parametrize(
    ("options", "topology"),
    [
        ({}, Topology(4, 2, 2)),
        ({"tied": True, "vocab": 96}, Topology(4, 2, 2)),
        ({"kv_heads": 1, "vocab": 130}, Topology(4, 4, 1)),
        ({"max_shard_size": "50KB"}, Topology(2, 1, 2)),
    ],
)
def test_import_equals_the_reference(
    tmp_path: Path,
    options: dict[str, Any],
    topology: Topology,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """C1, C3: every rank holds its cut of every tensor, read in small parts; export inverts it."""
    monkeypatch.setattr(hf, "READ_ELEMENTS", 700)
    folder = make_llama(tmp_path, layers=2, **options)
    shape = load_shape(folder)
    weights = {k: t for f in folder.glob("*.safetensors") for k, t in load_file(f).items()}
    ranks = _imported(folder, topology)
    assert_equal_ranks(ranks, megatron_reference(shape, topology, weights))
    whole = files_layout(canonical_tensors(shape), world_size=topology.world_size)
    back = blank(whole, torch.float32)
    apply_plan(plan(megatron_layout(shape, topology), whole), ranks, back)
    assert_equal_ranks(back[:1], [weights])


def test_import_casts_to_the_type_of_the_model(tmp_path: Path) -> None:
    """A float32 folder fills a bfloat16 model."""
    folder = make_llama(tmp_path, layers=2)
    wide, narrow = (
        _imported(folder, Topology(2, 2), d)[1] for d in (torch.float32, torch.bfloat16)
    )
    assert all(torch.equal(narrow[name], t.bfloat16()) for name, t in wide.items())


def _drop(weights: Tensors) -> None:
    del weights["model.layers.1.post_attention_layernorm.weight"]


def _bias(weights: Tensors) -> None:
    weights["model.layers.0.self_attn.q_proj.bias"] = torch.ones(128)


def _reshape(weights: Tensors) -> None:
    weights["model.norm.weight"] = torch.ones(63)


def _transpose(weights: Tensors) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    weights[name] = weights[name].T.contiguous()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_drop, r"lacks 1 tensors: model\.layers\.1\.post_attention_layernorm\.weight"),
        (_bias, r"does not speak of: model\.layers\.0\.self_attn\.q_proj\.bias"),
        (_reshape, r"model\.norm\.weight has shape \(63,\), config\.json says \(64,\)"),
        (_transpose, r"down_proj\.weight has shape \(96, 64\), config\.json says \(64, 96\)"),
    ],
)
def test_folder_unlike_its_config(
    tmp_path: Path, damage: Callable[[Tensors], None], words: str
) -> None:
    """Nothing is left uninitialised, nothing is ignored, and no model is built from a misfit."""
    folder = make_llama(tmp_path, layers=2)
    weights = load_file(folder / "model.safetensors")
    damage(weights)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ValueError, match=words):
        _imported(folder, Topology(1))


@pytest.mark.parametrize(
    "extra", ["lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"]
)
def test_known_leftovers_are_no_error(tmp_path: Path, extra: str) -> None:
    """A tied folder with a copy of its head, and buffers that old versions saved."""
    folder = make_llama(tmp_path, layers=2, tied=True)
    weights = load_file(folder / "model.safetensors")
    weights[extra] = torch.zeros(101, 64)
    save_file(weights, folder / "model.safetensors")
    embedding = _imported(folder, Topology(1))[0]["0.embedding.word_embeddings.weight"]
    assert torch.equal(embedding[:101], weights["model.embed_tokens.weight"])


def test_value_head_is_read_or_stays_fresh(tmp_path: Path) -> None:
    """A critic starts from a policy with the head that it has, or from a scored checkpoint."""
    policy = make_llama(tmp_path / "policy", layers=2)
    scored = make_llama(tmp_path / "scored", layers=2, value_head=True)
    fresh = _imported(policy, Topology(1), value_head=True)[0]["0.output_layer.weight"]
    assert fresh.isnan().all()
    read = _imported(scored, Topology(1), value_head=True)[0]["0.output_layer.weight"]
    assert torch.equal(read, load_file(scored / "model.safetensors")["score.weight"])


def test_model_unlike_the_layout(tmp_path: Path) -> None:
    """A live parameter that no layout speaks of would keep random weights: refused."""
    folder = make_llama(tmp_path, layers=2)
    layout = megatron_layout(load_shape(folder), Topology(1))
    tensors = blank(layout)[0] | {"0.decoder.layers.0.mlp.linear_fc1.bias": torch.zeros(192)}
    with pytest.raises(ValueError, match=r"first: \('0\.decoder.*linear_fc1\.bias'"):
        import_hf(CheckpointReader(folder), layout, 0, tensors)


def test_old_configuration_reads_alike(tmp_path: Path) -> None:
    """A config.json of earlier transformers, rope at the top level, is the same model."""
    folder = make_llama(tmp_path, layers=2)
    before = load_shape(folder)
    config = json.loads((folder / "config.json").read_text())
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    config.update(rope_scaling=None, torch_dtype="float32", transformers_version="4.40.0")
    (folder / "config.json").write_text(json.dumps(config))
    assert load_shape(folder) == before
