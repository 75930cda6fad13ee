"""How fast weights go from a mesh to engines, and how many bytes travel.

    python -m benchmarks.reshard --family llama --source tp2,pp2 --target tp2 --params 100M

prints one JSON line. Forks gloo ranks that hold random weights in the two layouts (no model
is built) and times three ways of the same refresh, in turns, in the same processes:

- ``seconds``: the executor with its plan;
- ``plain_copy_seconds``: as many bytes between the same pairs of ranks, as single contiguous
  messages, and one memory copy for what stays on a rank: nothing can be faster;
- ``gather_seconds``: what a full gather takes: every tensor is gathered on the ranks of its
  tensor- or expert-parallel group, broadcast to all engine ranks, and cut there.

Each is the median over ``--runs``, barrier to barrier; ``cpu_seconds`` are those of all ranks
together, which a busy machine disturbs less.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from statistics import median
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.gloo_ranks import run_ranks
from benchmarks.models import num_parameters, shape_of
from benchmarks.sizes import count, mesh_sizes
from benchmarks.transfers import FullGather, PlainCopy, Tensors, filled
from megappo.reshard.executor import STAGING_BYTES, Executor
from megappo.reshard.transport import Message, exchange
from megappo.topology import Topology
from megappo.weights.families import FAMILIES
from megappo.weights.layout import shifted, widened
from megappo.weights.megatron import megatron_layout
from megappo.weights.plan import Plan, plan
from megappo.weights.vllm import vllm_layout

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """What is measured; ``plan`` is over all ranks, trainers first where engines are apart."""

    plan: Plan
    dtype: torch.dtype
    staging_bytes: int
    runs: int
    topology: Topology


@dataclass(frozen=True)
class Measured:
    """One rank's figures; seconds, and those of its CPU, of every run of a way."""

    seconds: dict[str, list[float]]
    cpu_seconds: dict[str, list[float]]
    bytes_received: int
    bytes_owned: int
    gather_bytes_received: int


def main() -> None:
    """Measures one case and prints its line."""
    options = _options()
    shape = shape_of(options.family, options.params)
    sizes = options.source
    tp, pp, ep, vpp = (sizes[axis] for axis in ("tp", "pp", "ep", "vpp"))
    topology = Topology(tp * pp * sizes["dp"], tp, pp, ep, vpp)
    source = megatron_layout(shape, topology)
    engine_tp = options.target["tp"]
    if options.disaggregated:
        num_engine_ranks = engine_tp * options.num_engines
        world_size = source.world_size + num_engine_ranks
        target = vllm_layout(shape, num_engine_ranks, engine_tp)
        target = shifted(target, source.world_size, world_size)
        source = widened(source, world_size)
    else:
        target = vllm_layout(shape, source.world_size, engine_tp)
    case = Case(
        plan(source, target),
        TYPES[options.dtype],
        options.staging_bytes,
        options.runs,
        topology,
    )
    ranks: list[Measured] = run_ranks(source.world_size, measure, case)
    engines = [rank for rank in ranks if rank.bytes_owned]
    seconds = {way: median(times) for way, times in ranks[0].seconds.items()}
    cpu_seconds = {
        way: median(map(sum, zip(*(rank.cpu_seconds[way] for rank in ranks), strict=True)))
        for way in seconds
    }
    line = {
        "family": options.family,
        "params": num_parameters(shape),
        "source": ",".join(f"{axis}{n}" for axis, n in sizes.items() if n > 1) or "tp1",
        "target": f"tp{engine_tp}",
        "disaggregated": options.disaggregated,
        "dtype": options.dtype,
        "bytes_received": sum(rank.bytes_received for rank in engines),
        "bytes_owned": sum(rank.bytes_owned for rank in engines),
        "received_ratio": round(max(r.bytes_received / r.bytes_owned for r in engines), 4),
        "gather_received_ratio": round(
            max(r.gather_bytes_received / r.bytes_owned for r in engines), 2
        ),
        **{f"{way}seconds": round(value, 4) for way, value in seconds.items()},
        **{f"{way}cpu_seconds": round(value, 4) for way, value in cpu_seconds.items()},
        "to_plain_copy": round(seconds[""] / seconds["plain_copy_"], 2),
        "gather_to_ours": round(seconds["gather_"] / seconds[""], 2),
    }
    print(json.dumps(line), flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reshard", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--family", choices=FAMILIES, default="llama")
    parser.add_argument(
        "--source", type=mesh_sizes, default="tp2,pp2", help="of tp, pp, dp, ep, vpp"
    )
    parser.add_argument("--target", type=mesh_sizes, default="tp2", help="tp of an engine")
    parser.add_argument("--params", type=count, default="100M")
    parser.add_argument("--dtype", choices=TYPES, default="fp32")
    parser.add_argument(
        "--disaggregated", action="store_true", help="engines on ranks of their own"
    )
    parser.add_argument("--num-engines", type=int, default=1, help="with --disaggregated")
    parser.add_argument("--staging-bytes", type=int, default=STAGING_BYTES)
    parser.add_argument("--runs", type=int, default=7)
    return parser.parse_args()


def measure(rank: int, case: Case) -> Measured:
    """Checks executor and full gather against the target layout, then times all in turns."""
    whole = case.plan
    source = filled(whole.source, rank, case.dtype)
    target = filled(whole.destination, rank, case.dtype)
    expected = {name: checksum(tensor) for name, tensor in target.items()}
    executor = Executor(whole, rank, staging_bytes=case.staging_bytes)
    full = FullGather(whole, case.topology, rank, source, target)
    received = 0

    def counted(
        group: dist.ProcessGroup, receives: Sequence[Message], sends: Sequence[Message]
    ) -> list[dist.Work]:
        nonlocal received
        received += sum(tensor.nbytes for tensor, _ in receives)
        return exchange(group, receives, sends)

    with mock.patch("megappo.reshard.executor.exchange", counted):
        stats = executor.run(source, cleared(target))
    assert expected == {name: checksum(tensor) for name, tensor in target.items()}
    cleared(target)
    full()
    assert expected == {name: checksum(tensor) for name, tensor in target.items()}
    plain = PlainCopy(whole, rank, case.dtype)
    ways: dict[str, Callable[[], object]] = {
        "": lambda: executor.run(source, target),
        "plain_copy_": plain,
        "gather_": full,
    }
    seconds: dict[str, list[float]] = defaultdict(list)
    cpu_seconds: dict[str, list[float]] = defaultdict(list)
    for _ in range(case.runs):
        for way, action in ways.items():
            dist.barrier()
            begin, begin_cpu = time.perf_counter(), time.process_time()
            action()
            dist.barrier()
            seconds[way].append(time.perf_counter() - begin)
            cpu_seconds[way].append(time.process_time() - begin_cpu)
    owned = sum(t.nbytes for t in target.values()) - stats.bytes_zeroed
    return Measured(
        dict(seconds), dict(cpu_seconds), received + stats.bytes_kept, owned, full.bytes_received
    )


def cleared(tensors: Tensors) -> Tensors:
    """The same tensors, all of whose weights are lost."""
    for tensor in tensors.values():
        tensor.fill_(torch.nan)
    return tensors


def checksum(tensor: torch.Tensor) -> str:
    """Of the bits."""
    return sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()


if __name__ == "__main__":
    main()
