"""The executor on gloo ranks: engines from a mesh, folders from a mesh, bounded and exact."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megappo.reshard.executor import Executor, TransferStats
from megappo.reshard.hf import export_hf, import_hf
from megappo.topology import Topology
from megappo.weights.canonical import canonical_tensors
from megappo.weights.families import load_shape
from megappo.weights.hf_files import CheckpointReader
from megappo.weights.megatron import megatron_layout
from megappo.weights.plan import plan
from megappo.weights.shape import ModelShape
from megappo.weights.vllm import vllm_layout
from tests.support.models import make_llama
from tests.support.ranks import run_ranks
from tests.support.weights import (
    Tensors,
    blank,
    megatron_reference,
    numbered,
    tiny_shape,
    vllm_reference,
)

TOPOLOGY = Topology(4, 2, 2)


def _sync(
    rank: int, shape: ModelShape, engine_tp: int, staging_bytes: int, dtype: torch.dtype
) -> tuple[list[TransferStats], int]:
    """Two syncs in a row; returns the statistics and the bytes that this rank owns."""
    weights = numbered(shape)
    source = megatron_reference(shape, TOPOLOGY, weights)[rank]
    source = {name: t.float() for name, t in source.items()}
    engines = vllm_layout(shape, 4, engine_tp)
    executor = Executor(
        plan(megatron_layout(shape, TOPOLOGY), engines), rank, staging_bytes=staging_bytes
    )
    expected = vllm_reference(shape, 4, engine_tp, weights)[rank]
    stats = []
    for _ in range(2):
        destination = blank(engines, dtype)[rank]
        stats.append(executor.run(source, destination))
        for name, tensor in expected.items():
            assert torch.equal(destination[name], tensor.float().to(dtype)), name
    return stats, sum(t.nbytes for t in destination.values())


@pytest.mark.parametrize(
    ("engine_tp", "staging_bytes", "dtype"),
    [(1, 256, torch.float32), (2, 1024, torch.bfloat16), (4, 1 << 20, torch.float32)],
)
def test_engines_receive_exactly_their_bytes(
    engine_tp: int, staging_bytes: int, dtype: torch.dtype
) -> None:
    """Bit-equal to the reference whatever the buffer; what is received is what is owned."""
    results = run_ranks(4, _sync, tiny_shape(), engine_tp, staging_bytes, dtype)
    for stats, owned in results:
        for run in stats:
            assert run.bytes_received + run.bytes_kept + run.bytes_zeroed == owned
        assert stats[0].num_rounds >= stats[0].bytes_received / staging_bytes
    total = [sum(stats[0].bytes_sent for stats, _ in results)]
    assert total == [sum(stats[0].bytes_received for stats, _ in results)]
    assert total[0] > 0


def _wrong_tensors(rank: int, odd_rank: int, fault: str) -> str:
    shape = tiny_shape()
    engines = vllm_layout(shape, 2, 1)
    executor = Executor(plan(megatron_layout(shape, Topology(2, 2)), engines), rank)
    source = megatron_reference(shape, Topology(2, 2), numbered(shape))[rank]
    destination = blank(engines)[rank]
    if rank == odd_rank:
        name = "model.layers.1.mlp.gate_up_proj.weight"
        if fault == "absent":
            del destination[name]
        elif fault == "bias":
            destination["model.layers.0.self_attn.qkv_proj.bias"] = torch.zeros(4)
        else:
            destination[name] = destination[name][1:]
    try:
        executor.run(source, destination)
    except ValueError as error:
        dist.barrier()
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("absent", "model.layers.1.mlp.gate_up_proj.weight has no such tensor"),
        ("bias", "model.layers.0.self_attn.qkv_proj.bias is not in the layout"),
        ("shape", "gate_up_proj.weight has shape (47, 20), the layout says (48, 20)"),
    ],
)
def test_tensors_unlike_the_layout_are_refused_on_all_ranks(fault: str, words: str) -> None:
    """A parameter that the layout would leave stale is an error everywhere, not a hang."""
    first, second = run_ranks(2, _wrong_tensors, 1, fault)
    assert words in second
    assert "on 1" in first


def _round_trip(
    rank: int, topology: Topology, source: Path, out: Path, value_head: bool, bucket_bytes: int
) -> None:
    shape = load_shape(source)
    layout = megatron_layout(shape, topology, value_head=value_head)
    tensors = blank(layout, torch.float32)[rank]
    if value_head and "output_layer.weight" in tensors:
        tensors["output_layer.weight"] = torch.arange(float(shape.hidden_size))[None]
    import_hf(CheckpointReader(source), layout, rank, tensors)
    export_hf(
        layout,
        shape,
        rank,
        tensors,
        out,
        source,
        bucket_bytes=bucket_bytes,
        staging_bytes=4096,
        max_shard_bytes=50_000,
    )


def _tensors(folder: Path) -> Tensors:
    return {k: t for file in folder.glob("*.safetensors") for k, t in load_file(file).items()}


@pytest.mark.parametrize(
    ("options", "topology", "bucket_bytes"),
    [
        ({"tied": True, "vocab": 96}, Topology(1), 100_000),
        ({"tied": True, "vocab": 101}, Topology(4, 2, 2), 100_000),
        ({"kv_heads": 1}, Topology(2, 2), 1),
        ({"dtype": torch.bfloat16}, Topology(4, 2, 1), 1 << 30),
    ],
)
def test_import_then_export_gives_the_same_folder(
    tmp_path: Path, options: dict[str, Any], topology: Topology, bucket_bytes: int
) -> None:
    """C1, C3, C10: every bit, name and other file comes back, whatever the bucket (C18)."""
    source = make_llama(tmp_path / "source", layers=2, **options)
    (source / "README.md").write_text("a model")
    out = tmp_path / "out"
    run_ranks(topology.world_size, _round_trip, topology, source, out, False, bucket_bytes)
    expected, found = _tensors(source), _tensors(out)
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            assert (out / file.name).read_bytes() == file.read_bytes()
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) >= 3
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith("out")] == ["out"]


@pytest.mark.parametrize("fresh", [True, False])
def test_value_model_round_trip(tmp_path: Path, fresh: bool) -> None:
    """A critic's head is kept when the folder has none, read when it has; both are exported."""
    source = make_llama(tmp_path / "source", layers=2, value_head=not fresh)
    run_ranks(4, _round_trip, TOPOLOGY, source, tmp_path / "out", True, 1)
    shape = load_shape(tmp_path / "out")
    assert shape == dataclasses.replace(load_shape(source), value_head=True)
    found, expected = _tensors(tmp_path / "out"), _tensors(source)
    assert set(found) == set(canonical_tensors(shape, value_head=True))
    head = found.pop("score.weight")
    wanted = torch.arange(64.0)[None] if fresh else expected["score.weight"]
    assert torch.equal(head, wanted)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert config["id2label"] == {"0": "LABEL_0"}


def _export_error(rank: int, source: Path, out: Path) -> str:
    shape = load_shape(source)
    layout = megatron_layout(shape, Topology(2, 2))
    tensors = blank(layout, torch.float32)[rank]
    try:
        export_hf(layout, shape, rank, tensors, out, source)
    except (ValueError, RuntimeError) as error:
        dist.barrier()
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_failed_export_is_known_to_all_ranks(tmp_path: Path) -> None:
    """A target that may not be replaced: rank 0 says why, nobody waits, nothing is touched."""
    source = make_llama(tmp_path / "source", layers=2)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/notes.txt").write_text("mine")
    first, second = run_ranks(2, _export_error, source, tmp_path / "out")
    assert first.startswith("ValueError") and "choose another" in first
    assert second == "RuntimeError: the export failed on rank 0"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source"]
    assert (tmp_path / "out/notes.txt").read_text() == "mine"
