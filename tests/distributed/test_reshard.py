"""The executor on gloo ranks: engines from a mesh, folders from a mesh, bounded and exact."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megappo.reshard import schedule as scheduling
from megappo.reshard.executor import Executor, TransferStats
from megappo.reshard.hf import export_hf, import_hf
from megappo.reshard.joint import joint_group
from megappo.runtime.host import Rendezvous, join_group
from megappo.topology import Topology
from megappo.weights.canonical import canonical_tensors
from megappo.weights.families import load_shape
from megappo.weights.hf_files import CheckpointReader
from megappo.weights.layout import shifted, widened
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


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that torch operations make, while they live, and the most.

    Views share a storage and count once; ``limit`` ignores those smaller, such as flags.
    """

    def __init__(self, limit: int) -> None:
        TorchDispatchMode.__init__(self)
        self._limit = limit
        self._live: dict[int, int] = {}
        self._outside: set[int] = set()
        self.most = 0

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """These were there before."""
        self._outside.update(t.untyped_storage().data_ptr() for t in tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        at = storage.data_ptr()
        if storage.nbytes() < self._limit or at in self._live or at in self._outside:
            return
        self._live[at] = storage.nbytes()
        weakref.finalize(storage, self._live.pop, at, None)
        self.most = max(self.most, sum(self._live.values()))


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One way to move the weights: engine size, staging, types, and what goes alone."""

    engine_tp: int
    staging_bytes: int
    to: torch.dtype
    of: torch.dtype = torch.float32
    alone_bytes: int = scheduling.ALONE_BYTES
    verify: bool = False


TRANSFERS = [
    Transfer(1, 2048, torch.float32),
    Transfer(1, 2048, torch.float32, alone_bytes=16),
    Transfer(2, 4096, torch.bfloat16),
    Transfer(2, 4096, torch.bfloat16, alone_bytes=64),
    Transfer(4, 1 << 20, torch.bfloat16, of=torch.bfloat16, alone_bytes=64),
    Transfer(4, 1 << 20, torch.float32, verify=True),
]


def _sync(
    rank: int, shape: ModelShape, transfers: list[Transfer]
) -> list[tuple[list[TransferStats], int, int]]:
    """For each transfer two runs: statistics, bytes that this rank owns, most live staging."""
    weights = numbered(shape)
    found = []
    for transfer in transfers:
        scheduling.ALONE_BYTES = transfer.alone_bytes
        source = megatron_reference(shape, TOPOLOGY, weights)[rank]
        source = {name: t.to(transfer.of) for name, t in source.items()}
        # Equal to a contiguous tensor in all but its strides.
        name = min(n for n in source if n.endswith("linear_fc2.weight"))
        source[name] = source[name].t().contiguous().t()
        engines = vllm_layout(shape, 4, transfer.engine_tp)
        executor = Executor(
            plan(megatron_layout(shape, TOPOLOGY), engines),
            rank,
            staging_bytes=transfer.staging_bytes,
            verify=transfer.verify,
        )
        expected = vllm_reference(shape, 4, transfer.engine_tp, weights)[rank]
        stats = []
        live = LiveBytes(limit=64)
        for counter in (live, contextlib.nullcontext()):
            destination = blank(engines, transfer.to)[rank]
            live.ignore([*source.values(), *destination.values()])
            with counter:
                stats.append(executor.run(source, destination))
            for name, tensor in expected.items():
                assert torch.equal(destination[name], tensor.to(transfer.of).to(transfer.to)), name
        found.append((stats, sum(t.nbytes for t in destination.values()), live.most))
    return found


def test_engines_receive_exactly_their_bytes() -> None:
    """C18: bit-equal whatever the buffer, which bounds what lives; received is what is owned."""
    results = run_ranks(4, _sync, tiny_shape(), TRANSFERS)
    for transfer, ranks in zip(TRANSFERS, zip(*results, strict=True), strict=True):
        for stats, owned, most in ranks:
            for run in stats:
                assert run.bytes_received + run.bytes_kept + run.bytes_zeroed == owned
            assert stats[0].num_rounds >= stats[0].bytes_received / transfer.staging_bytes
            # What is live beyond the buffers is the table of formats: a byte per tensor.
            assert most <= transfer.staging_bytes + 2048, transfer
            assert stats[0].bytes_staging <= min(most, transfer.staging_bytes), transfer
        sent = sum(stats[0].bytes_sent for stats, _, _ in ranks)
        assert sent == sum(stats[0].bytes_received for stats, _, _ in ranks) > 0


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
        elif fault == "other model":
            destination = {f"w{i}": torch.zeros(1) for i in range(12)}
        elif fault == "type":
            destination[name] = destination[name].int()
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
        (
            "absent",
            "only here: none; only in the layout: model.layers.1.mlp.gate_up_proj.weight",
        ),
        ("bias", "only here: model.layers.0.self_attn.qkv_proj.bias; only in the layout: none"),
        ("other model", "only here: w0, w1, w10, w11, w2, w3, w4, w5, w6, w7 and 2 more; only in"),
        ("type", "gate_up_proj.weight has type torch.int32; weights move as float32, bfloat16"),
        ("shape", "gate_up_proj.weight has shape (47, 20), the layout says (48, 20)"),
    ],
)
def test_tensors_unlike_the_layout_are_refused_on_all_ranks(fault: str, words: str) -> None:
    """A parameter that the layout would leave stale is an error everywhere, not a hang."""
    first, second = run_ranks(2, _wrong_tensors, 1, fault)
    assert words in second
    assert "on rank 1" in first


def _trainer_to_engine(rank: int, meetings: list[Rendezvous]) -> int:
    """Ranks 0, 1 are a trainer and 2, 3 an engine, each pair with a default group of its own."""
    dist.destroy_process_group()
    side, own_rank = divmod(rank, 2)
    meeting = meetings[side]
    join_group(own_rank, 2, meeting.address, meeting if own_rank == 0 else None)
    joint = meetings[2]
    group = joint_group(joint.address, rank, 4, listen_fd=joint.take() if rank == 0 else None)
    shape = tiny_shape()
    weights = numbered(shape)
    engine = vllm_layout(shape, 2, 2)
    trainer = megatron_layout(shape, Topology(2, 2))
    executor = Executor(plan(widened(trainer, 4), shifted(engine, 2, 4)), rank, group)
    source = megatron_reference(shape, Topology(2, 2), weights)[own_rank] if side == 0 else {}
    destination = blank(engine)[own_rank] if side == 1 else {}
    stats = executor.run(source, destination)
    for name, tensor in destination.items():
        assert torch.equal(tensor, vllm_reference(shape, 2, 2, weights)[own_rank][name]), name
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2, "the default group is the side's own"
    owned = sum(t.nbytes for t in destination.values())
    assert stats.bytes_received + stats.bytes_zeroed == owned
    assert stats.bytes_kept == 0
    return owned


def test_an_engine_in_other_processes_gets_its_bytes_over_a_joint_group() -> None:
    """Both sides keep their default group; every parameter of the engine is bit-equal."""
    owned = run_ranks(4, _trainer_to_engine, [Rendezvous("127.0.0.1") for _ in range(3)])
    assert owned[:2] == [0, 0] and owned[2] > 0


def _round_trip(
    rank: int, topology: Topology, source: Path, out: Path, value_head: bool, bucket_bytes: int
) -> None:
    shape = load_shape(source)
    layout = megatron_layout(shape, topology, value_head=value_head)
    tensors = blank(layout, torch.float32)[rank]
    if value_head and "0.output_layer.weight" in tensors:
        tensors["0.output_layer.weight"] = torch.arange(float(shape.hidden_size))[None]
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
    assert second == "OtherRankError: the export failed on rank 0"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source"]
    assert (tmp_path / "out/notes.txt").read_text() == "mine"
