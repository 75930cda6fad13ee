"""What an optimizer step of the actor costs on a mesh, beside Megatron's bare training step.

    python -m benchmarks.mesh --layout tp1 tp2 pp2 pp2,vpp2 dp2 tp2,pp2
    python -m benchmarks.mesh --family mixtral --layout dp2,ep2

prints one JSON line for each layout. Forks gloo ranks, one thread each, that load a random
model and one batch of packed sequences of unequal lengths, and time two ways of the same
step, in turns, with the same model and optimizer:

- ours: ``MeshRank.update``, with PPO's loss and its statistics;
- ``bare_``: Megatron's forward-backward function with the negative log-probs as the loss,
  gradients zeroed before and the optimizer's step after.

Seconds are medians over ``--runs``, barrier to barrier, ``cpu_seconds`` those of all ranks. A
ratio is the median of those of each turn, ours to bare. ``tokens_per_second`` is of ours.
``memory_mb`` is the peak of anonymous memory beyond the imports, worst rank, from the loading of
the weights to the end of the first step. ``idle`` is the part of forward and backward passes in
which the busiest rank neither computes nor waits for a core, median of turns; it is right only
with a core for each rank. ``bubble`` is what the pipeline's schedule takes in theory.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func

from benchmarks.child import Watch, measured
from benchmarks.convert import write_model
from benchmarks.gloo_ranks import run_ranks
from benchmarks.models import num_parameters, shape_with
from benchmarks.sizes import mesh_sizes
from megappo.data.packing import plan_batch
from megappo.mesh.rank import MeshRank
from megappo.mesh.settings import (
    ExperienceSettings,
    MeshSettings,
    OptimizerSettings,
    PolicyLossSettings,
    RoleSettings,
)
from megappo.models.forward import forward_packed
from megappo.records import BatchPlan, PackedBatch, Rollouts
from megappo.topology import Topology
from megappo.weights.shape import ModelShape

KEY = "batch"
LONGEST = 256
WAYS = ("", "bare_")


@dataclass(frozen=True)
class Case:
    """What is measured on a layout."""

    folder: str
    topology: Topology
    settings: MeshSettings
    rollouts: Rollouts
    plan: BatchPlan
    runs: int


@dataclass
class Measured:
    """One rank's figures, of every turn of a way."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})
    cpu_seconds: dict[str, list[float]] = field(default_factory=lambda: {w: [] for w in WAYS})
    idle: list[float] = field(default_factory=list)
    peak_anonymous_bytes: int = 0


def make_batch(
    shape: ModelShape, num_tokens: int, replicas: int, budget: int
) -> tuple[Rollouts, BatchPlan]:
    """Rollouts of about so many tokens on rank 0, one optimizer step; and their plan."""
    random = np.random.default_rng(0)
    drawn = random.lognormal(np.log(LONGEST / 4), 0.8, num_tokens)
    lengths = np.clip(drawn, 8, LONGEST).astype(np.int64)
    lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), num_tokens)) + 1]
    prompts = lengths // 4
    total = int(lengths.sum())
    position = np.arange(total) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    mask = torch.from_numpy(position >= np.repeat(prompts, lengths))
    rollouts = Rollouts(
        sample_ids=torch.arange(len(lengths)),
        tokens=torch.from_numpy(random.integers(0, shape.vocab_size, total)),
        cu_seqlens=torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)])),
        prompt_lens=torch.from_numpy(prompts),
        action_mask=mask,
        log_probs=torch.where(mask, -9.0, 0.0),
    )
    plan = plan_batch(
        key=KEY,
        sample_ids=range(len(lengths)),
        prompt_lens=prompts,
        response_lens=lengths - prompts,
        holder_ranks=[0] * len(lengths),
        scores=random.normal(size=len(lengths)).astype(np.float32),
        train_batch_size=len(lengths),
        num_replicas=replicas,
        token_budget=budget,
        seed=0,
    )
    return rollouts, plan


def bare_step(rank: MeshRank) -> None:
    """Megatron's training step on the rank's micro-batches, with as little as it can do."""
    role = rank.roles["actor"]
    batches: list[PackedBatch] = rank.steps[0]

    def forward_step(iterator: Iterator[PackedBatch], model: Any) -> tuple[torch.Tensor, Any]:
        batch = next(iterator)

        def loss(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
            log_probs = role.log_probs(logits, batch)
            return -(log_probs * batch.action_mask).sum(), batch.action_mask.sum().int(), {}

        return forward_packed(model, batch), loss

    role.zero_gradients()
    iterators = [iter(batches) for _ in role.chunks]
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(iterators) > 1 else iterators[0],
        model=list(role.chunks),
        num_microbatches=len(batches),
        seq_length=0,
        micro_batch_size=1,
        forward_only=False,
    )
    role.optimizer.step()


def measure(number: int, case: Case) -> Measured:
    """One rank: load, one update of either way, then turns of both."""
    found = Measured()
    with Watch() as watch:
        rank = MeshRank(number, case.topology, case.settings)
        optimizer = OptimizerSettings(lr=1e-6)
        rank.add_role(RoleSettings("actor", case.folder, "lm", optimizer, PolicyLossSettings()))
        if number == 0:
            rank.store[KEY] = case.rollouts
        rank.load_batch(case.plan)
        rank.compute_log_probs("actor")
        rank.make_experience(ExperienceSettings(kl_coef=0.0, estimator="reinforce"))

        def update() -> None:
            begin, begin_busy = time.perf_counter(), busy_seconds()
            totals = rank.accumulate("actor", 0)
            busy = busy_seconds() - begin_busy
            found.idle.append(1 - busy / (time.perf_counter() - begin))
            rank.apply("actor", totals)

        update()
    found.peak_anonymous_bytes = watch.usage.peak_anonymous_bytes
    ways: dict[str, Callable[[], None]] = {"": update, "bare_": lambda: bare_step(rank)}
    ways["bare_"]()
    found.idle.clear()
    for turn in range(case.runs):
        for way in WAYS if turn % 2 else WAYS[::-1]:
            dist.barrier()
            begin, begin_cpu = time.perf_counter(), time.process_time()
            ways[way]()
            dist.barrier()
            found.seconds[way].append(time.perf_counter() - begin)
            found.cpu_seconds[way].append(time.process_time() - begin_cpu)
    return found


def busy_seconds() -> float:
    """Time that this thread has computed, or wanted to and had no core."""
    computed, waited, _ = Path("/proc/thread-self/schedstat").read_text().split()
    return (int(computed) + int(waited)) / 1e9


def bubble(topology: Topology, num_micro_batches: int) -> float:
    """Part of a step that a stage waits for others, all stages and chunks being alike."""
    waits = topology.pp - 1
    return waits / (num_micro_batches * topology.vpp + waits)


def figures(case: Case, ranks: Sequence[Measured]) -> dict[str, object]:
    """The line's measured fields."""
    seconds = {way: ranks[0].seconds[way] for way in WAYS}
    cpu = {
        way: [sum(turn) for turn in zip(*(r.cpu_seconds[way] for r in ranks), strict=True)]
        for way in WAYS
    }
    num_tokens = len(case.rollouts.tokens)
    micro_batches = int(case.plan.num_micro_batches[0])
    line: dict[str, object] = {
        "tokens": num_tokens,
        "micro_batches": micro_batches,
        "memory_mb": round(max(r.peak_anonymous_bytes for r in ranks) / 1e6, 1),
        "tokens_per_second": round(num_tokens / median(seconds[""])),
    }
    for way in WAYS:
        line[f"{way}seconds"] = round(median(seconds[way]), 3)
        line[f"{way}cpu_seconds"] = round(median(cpu[way]), 3)
    line["ratio"] = round(_ratio(seconds), 3)
    line["cpu_ratio"] = round(_ratio(cpu), 3)
    line["idle"] = round(min(median(rank.idle) for rank in ranks), 3)
    line["bubble"] = round(bubble(case.topology, micro_batches), 3)
    return line


def _ratio(times: dict[str, list[float]]) -> float:
    return median(one / other for one, other in zip(times[""], times["bare_"], strict=True))


def main(argv: Sequence[str] | None = None) -> None:
    """Measures each layout and prints its line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mesh", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--layout", nargs="+", default=["tp1"], help="of tp, pp, dp, ep, vpp")
    parser.add_argument("--family", choices=("llama", "mixtral"), default="llama")
    parser.add_argument("--hidden", type=int, default=256, help="a multiple of 256")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--tokens", type=int, default=2048, help="of the optimizer step")
    parser.add_argument("--micro-batch-tokens", type=int, default=256, help="the token budget")
    parser.add_argument("--runs", type=int, default=7)
    args = parser.parse_args(argv)
    shape = shape_with(args.family, args.hidden, args.layers, args.vocab)
    with tempfile.TemporaryDirectory(prefix="mesh-") as folder:
        model = Path(folder) / "model"
        measured(write_model, model, shape, torch.float32)
        for name in args.layout:
            sizes = mesh_sizes(name)
            tp, pp, dp, ep, vpp = (sizes[axis] for axis in ("tp", "pp", "dp", "ep", "vpp"))
            topology = Topology(tp * pp * dp, tp, pp, ep, vpp)
            settings = MeshSettings(dtype=args.dtype, sequence_parallel=tp > 1)
            rollouts, plan = make_batch(shape, args.tokens, dp, args.micro_batch_tokens)
            case = Case(str(model), topology, settings, rollouts, plan, args.runs)
            ranks = run_ranks(topology.world_size, measure, case)
            line = {"layout": name, "family": args.family, "params": num_parameters(shape)}
            print(json.dumps(line | {"dtype": args.dtype} | figures(case, ranks)), flush=True)


if __name__ == "__main__":
    main()
