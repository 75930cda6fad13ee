"""What it takes to plan the refresh of a large model's engines, and what the plan would move.

    python -m benchmarks.plan --model llama-3.1-405b --source tp8,pp16,dp8 --target tp16x64

prints one JSON line. Layouts and plan are made from the model's real shapes in one process,
without a weight. Engine ranks are the mesh ranks of the same number; ``--disaggregated`` puts
them behind the mesh. Bytes are those of bf16 weights.

- ``seconds`` and ``cpu_seconds``: both layouts and the plan;
- ``received_ratio``: bytes that are written at a rank to bytes that it owns, worst rank;
- ``source_imbalance``: bytes that leave the busiest of the ranks that hold the same tensors,
  to the mean over these ranks, worst set of ranks;
- ``bytes_in`` and ``bytes_out``: between different ranks, per rank;
- ``kept_ratio``: part of all bytes that need no transfer; ``between_nodes_ratio``: part that
  goes from node to node, with ``--ranks-per-node``.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from itertools import pairwise

import numpy as np

from benchmarks.published_models import MODELS
from benchmarks.sizes import engine_sizes, mesh_sizes
from megappo.topology import Topology
from megappo.weights.families import shape_from_config
from megappo.weights.layout import Ints, Layout, shifted, widened
from megappo.weights.megatron import megatron_layout
from megappo.weights.plan import Plan, plan
from megappo.weights.vllm import vllm_layout

ITEMSIZE = 2
# Copies whose figures are made at a time, so that the plan is what takes the memory.
CHUNK = 1_000_000


def main() -> None:
    """Plans one case and prints its line."""
    options = _options()
    begin, begin_cpu = time.perf_counter(), time.process_time()
    source, target = layouts(
        options.model, options.source, *options.target, disaggregated=options.disaggregated
    )
    the_plan = plan(source, target, ranks_per_node=options.ranks_per_node)
    line = {
        "model": options.model,
        "source": ",".join(f"{axis}{n}" for axis, n in options.source.items() if n > 1),
        "target": "tp{}x{}".format(*options.target),
        "disaggregated": options.disaggregated,
        "ranks_per_node": options.ranks_per_node,
        "seconds": round(time.perf_counter() - begin, 2),
        "cpu_seconds": round(time.process_time() - begin_cpu, 2),
        **figures(the_plan, options.ranks_per_node),
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }
    print(json.dumps(line), flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", choices=MODELS, default="llama-3.1-405b")
    parser.add_argument("--source", type=mesh_sizes, default="tp8,pp16,dp8")
    parser.add_argument("--target", type=engine_sizes, default="tp16x64")
    parser.add_argument("--disaggregated", action="store_true")
    parser.add_argument("--ranks-per-node", type=int)
    return parser.parse_args()


def layouts(
    model: str,
    sizes: dict[str, int],
    engine_tp: int,
    num_engines: int,
    *,
    disaggregated: bool = False,
) -> tuple[Layout, Layout]:
    """The layouts of a published model on a mesh and in engines.

    Raises:
        ValueError: when colocated engines do not fill the mesh, or sizes do not divide.
    """
    shape = shape_from_config(MODELS[model], where=model)
    tp, pp, dp, ep, vpp = (sizes[axis] for axis in ("tp", "pp", "dp", "ep", "vpp"))
    mesh = megatron_layout(shape, Topology(tp * pp * dp, tp, pp, ep, vpp))
    engines = vllm_layout(shape, engine_tp * num_engines, engine_tp)
    if disaggregated:
        world_size = mesh.world_size + engines.world_size
        return widened(mesh, world_size), shifted(engines, mesh.world_size, world_size)
    if mesh.world_size != engines.world_size:
        raise ValueError(
            f"{num_engines} engines of {engine_tp} ranks do not fill a mesh of {mesh.world_size}; "
            "--disaggregated puts them beside it"
        )
    return mesh, engines


def figures(the_plan: Plan, ranks_per_node: int | None = None) -> dict[str, object]:
    """What a plan moves, in bytes of bf16."""
    source, target = the_plan.source, the_plan.destination
    sent = np.zeros(len(source.local_rank), dtype=np.int64)
    received = np.zeros(target.world_size, dtype=np.int64)
    written = _per_rank(target, target.zero_local, target.zero_extent.prod(axis=1))
    between_nodes = 0
    num_copies = the_plan.ends.shape[1]
    for first in range(0, num_copies, CHUNK):
        part = the_plan.part(slice(first, first + CHUNK))
        size = part.extent.prod(axis=1) * ITEMSIZE
        written += _sums(part.destination_rank, size, len(written))
        moved = part.source_rank != part.destination_rank
        sent += _sums(part.source_local[moved], size[moved], len(sent))
        received += _sums(part.destination_rank[moved], size[moved], len(received))
        if ranks_per_node:
            nodes = (part.source_rank // ranks_per_node, part.destination_rank // ranks_per_node)
            between_nodes += int(size[nodes[0] != nodes[1]].sum())
    everything = np.arange(len(target.local_rank))
    owned = _per_rank(target, everything, target.local_shape.prod(axis=1))
    out = _sums(source.local_rank, sent, source.world_size)
    total = int(written.sum())
    takes = owned > 0
    return {
        "num_copies": num_copies,
        "received_ratio": round(float((written[takes] / owned[takes]).max()), 4),
        "source_imbalance": round(_imbalance(source, sent), 4),
        "bytes_in": _spread(received[np.unique(target.local_rank)]),
        "bytes_out": _spread(out[np.unique(source.local_rank)]),
        "kept_ratio": round(1 - int(received.sum()) / total, 4),
        "between_nodes_ratio": round(between_nodes / total, 4) if ranks_per_node else None,
    }


def _sums(index: Ints, values: Ints, length: int) -> Ints:
    return np.bincount(index, weights=values, minlength=length).astype(np.int64)


def _per_rank(layout: Layout, local: Ints, elements: Ints) -> Ints:
    return _sums(layout.local_rank[local], elements * ITEMSIZE, layout.world_size)


def _imbalance(source: Layout, sent: Ints) -> float:
    """The worst of max / mean over the ranks that hold the same tensors."""
    by_ranks: dict[bytes, Ints] = {}
    for first, last in pairwise(source.first_local.tolist()):
        ranks = source.local_rank[first:last].tobytes()
        by_ranks[ranks] = by_ranks.get(ranks, np.int64(0)) + sent[first:last]
    ratios = [float(load.max() / load.mean()) for load in by_ranks.values() if load.any()]
    return max(ratios, default=1.0)


def _spread(values: Ints) -> dict[str, int]:
    return {"min": int(values.min()), "mean": int(values.mean()), "max": int(values.max())}


if __name__ == "__main__":
    main()
