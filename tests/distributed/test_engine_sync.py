"""Weights from a Megatron mesh into engines: after a sync an engine equals a fresh one.

Each case is one fork: an engine starts on old weights, takes new ones by plan and executor
from tensors in Megatron's layout, and is compared with an engine started on the exported
folder, in the same process and at the same tensor-parallel size.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.distributed as dist

from megappo.records import Rollouts
from megappo.reshard.executor import Executor
from megappo.reshard.hf import export_hf, import_hf
from megappo.rollout.engine import EngineUnusableError
from megappo.rollout.process import import_vllm
from megappo.rollout.vllm_engine import VLLMEngine
from megappo.topology import Topology
from megappo.weights.families import load_shape
from megappo.weights.hf_files import CheckpointReader
from megappo.weights.layout import box_index
from megappo.weights.megatron import megatron_layout
from megappo.weights.plan import plan
from megappo.weights.vllm import vllm_layout
from tests.support.engines import generate, start_engine
from tests.support.models import make_model
from tests.support.ranks import run_ranks

VOCAB = 101
TEMPERATURES = (0.0, 0.7)


@dataclass(frozen=True)
class Case:
    """A mesh, engines on it, and a model."""

    mesh: Topology
    engine_tp: int
    tied: bool
    kv_heads: int = 2
    dtype: Literal["fp32", "bf16"] = "fp32"
    family: str = "llama"

    def __str__(self) -> str:
        mesh = f"{self.mesh.world_size}ranks-tp{self.mesh.tp}pp{self.mesh.pp}"
        model = f"{self.family}-{'tied' if self.tied else 'untied'}"
        return f"{model}-{mesh}-engine{self.engine_tp}-{self.dtype}"


CASES = [
    Case(Topology(1), 1, tied=False),
    Case(Topology(1), 1, tied=True, dtype="bf16"),
    Case(Topology(2, tp=2), 1, tied=True),
    Case(Topology(2, pp=2), 2, tied=True, kv_heads=1),
    Case(Topology(4, tp=2, pp=2), 2, tied=False),
    Case(Topology(2, ep=2), 2, tied=False, family="mixtral"),
]


@dataclass
class Outcome:
    """What one rank saw. Rollouts are by temperature."""

    before: dict[float, Rollouts]
    synced: dict[float, Rollouts]
    fresh: dict[float, Rollouts]
    back: dict[float, Rollouts]
    refusals: list[str]
    versions: list[int]
    largest_padded_weight: float
    shapes_are_the_layouts: bool


def load_mesh(folder: Path, mesh: Topology) -> dict[str, torch.Tensor]:
    """This rank's tensors in Megatron's layout; rows of the padded vocabulary hold 50 (C16)."""
    layout = megatron_layout(load_shape(folder), mesh)
    shapes = layout.local_shapes(dist.get_rank())
    tensors = {name: torch.empty(shape) for name, shape in shapes.items()}
    import_hf(CheckpointReader(folder), layout, dist.get_rank(), tensors)
    names = {i: name for name, i in layout.local_ids(dist.get_rank()).items()}
    zeros = zip(layout.zero_local, layout.zero_start, layout.zero_extent, strict=True)
    for local, start, extent in zeros:
        if local in names:
            tensors[names[local]][box_index(start, extent, 2)] += 50
    return tensors


def draw_all(engine: VLLMEngine) -> dict[float, Rollouts]:
    """Greedy and sampled responses to the same prompts, engine by engine alike."""
    return {t: generate(engine, temperature=t)[0] for t in TEMPERATURES}


def refusal(engine: VLLMEngine) -> str:
    """Why the engine will not generate."""
    try:
        generate(engine)
    except EngineUnusableError as error:
        return str(error)
    raise AssertionError("the engine generated between two versions")


def padded_rows(engine: VLLMEngine, written: dict[str, torch.Tensor]) -> float:
    """Largest weight in vocabulary rows that no token has."""
    first = dist.get_rank() % engine.settings.tensor_parallel_size
    largest = 0.0
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in written:
            rows = written[name][max(0, VOCAB - first * len(written[name])) :]
            largest = max(largest, float(rows.abs().max()) if len(rows) else 0.0)
    return largest


def sync(rank: int, old: Path, new: Path, exported: Path, case: Case) -> Outcome:
    """Start on ``old``, sync ``new``, go back to ``old``; meet half-written weights between."""
    shape = load_shape(new)
    source, destination = (
        megatron_layout(shape, case.mesh),
        vllm_layout(shape, case.mesh.world_size, case.engine_tp),
    )
    executor = Executor(plan(source, destination), rank, staging_bytes=1 << 16)
    weights_old, weights_new = load_mesh(old, case.mesh), load_mesh(new, case.mesh)
    engine = start_engine(old, case.engine_tp, case.dtype)
    versions, refusals = [engine.version], []
    same_shapes = engine.load_time_shapes() == destination.local_shapes(rank)
    before = draw_all(engine)

    written = engine.begin_update()
    refusals.append(refusal(engine))
    next(iter(written.values())).fill_(7.0)  # a sync that breaks off
    written = engine.begin_update()
    executor.run(weights_new, written)
    largest = padded_rows(engine, written)
    refusals.append(refusal(engine))
    engine.finish_update(1)
    versions.append(engine.version)
    synced = draw_all(engine)

    export_hf(source, shape, rank, weights_new, exported, source_dir=new)
    fresh = draw_all(start_engine(exported, case.engine_tp, case.dtype))

    executor.run(weights_old, engine.begin_update())
    engine.finish_update(2)
    versions.append(engine.version)
    back = draw_all(engine)
    return Outcome(before, synced, fresh, back, refusals, versions, largest, same_shapes)


@pytest.fixture(scope="module", params=CASES, ids=str)
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Case, list[Outcome]]:
    """A case, carried out on all its ranks."""
    import_vllm()
    case: Case = request.param
    base = tmp_path_factory.mktemp("sync")
    old, new = (
        make_model(
            base / f"seed{seed}",
            case.family,
            vocab=VOCAB,
            seed=seed,
            tied=case.tied,
            layers=2,
            kv_heads=case.kv_heads,
        )
        for seed in (1, 2)
    )
    world_size = case.mesh.world_size
    return case, run_ranks(world_size, sync, old, new, base / "exported", case)


def difference(a: Rollouts, b: Rollouts) -> float:
    """Largest difference of log-probs where both drew the same tokens; infinite where not."""
    if not torch.equal(a.tokens, b.tokens):
        return float("inf")
    return float((a.log_probs - b.log_probs).abs().max())


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_a_synced_engine_equals_a_fresh_one(
    outcomes: tuple[Case, list[Outcome]], temperature: float
) -> None:
    """Same tokens, log-probs within 1e-5 of an engine started on the export; unlike before."""
    for outcome in outcomes[1]:
        assert difference(outcome.synced[temperature], outcome.fresh[temperature]) <= 1e-5
        assert difference(outcome.before[temperature], outcome.synced[temperature]) > 0.1


def test_nothing_of_older_weights_is_left(outcomes: tuple[Case, list[Outcome]]) -> None:
    """Back on the first weights it draws as at first: no stale prefix, no stale packing (C13)."""
    for outcome in outcomes[1]:
        for temperature in TEMPERATURES:
            assert difference(outcome.before[temperature], outcome.back[temperature]) == 0


def test_padded_vocabulary_never_reaches_the_engine(
    outcomes: tuple[Case, list[Outcome]],
) -> None:
    """With 50 in the trainer's padded rows, the engine's are zero and no id >= 101 is drawn."""
    for outcome in outcomes[1]:
        assert outcome.largest_padded_weight == 0
        for drawn in (*outcome.synced.values(), *outcome.back.values()):
            assert int(drawn.tokens.max()) < VOCAB


def test_an_engine_between_two_versions_refuses(outcomes: tuple[Case, list[Outcome]]) -> None:
    """Half-written, or written but not finished: it says so; then the version counts on (C14)."""
    for outcome in outcomes[1]:
        assert outcome.versions == [0, 1, 2]
        assert len(outcome.refusals) == 2
        assert all("update that follows version 0 has not finished" in r for r in outcome.refusals)


def test_the_planned_shapes_are_the_engines(outcomes: tuple[Case, list[Outcome]]) -> None:
    """Names and shapes of ``vllm_layout`` are those of the loaded model, rank by rank."""
    assert all(outcome.shapes_are_the_layouts for outcome in outcomes[1])
