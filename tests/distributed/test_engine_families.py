"""Engines of every family: refreshed by plan, an engine equals one started on the new folder.

Trainer ranks are pretended: their tensors, in every trainer layout, come from a folder by the
import, and a plan is applied copy by copy. So one pair of forked ranks per engine size sees
all families and layouts; ``test_engine_sync`` sends weights for real.

An engine starts on the old folder and goes to the new one and back, from another layout each
time, so that every refresh has something to change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from math import lcm
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest
import torch

from megappo.records import Rollouts
from megappo.reshard.hf import import_hf
from megappo.rollout.engine import EngineUnusableError
from megappo.rollout.process import import_vllm
from megappo.rollout.vllm_engine import VLLMEngine
from megappo.topology import Topology
from megappo.weights.families import load_shape
from megappo.weights.hf_files import CheckpointReader
from megappo.weights.megatron import megatron_layout
from megappo.weights.plan import plan
from megappo.weights.vllm import vllm_layout
from tests.support.engines import (
    REQUESTS,
    generate,
    layer_outputs,
    loaded_parameters,
    model_of,
    start_engine,
    transformers_log_probs,
)
from tests.support.models import FAMILIES, make_model
from tests.support.ranks import run_ranks
from tests.support.weights import Tensors, apply_plan, blank

WINDOW = 8
NEW_TOKENS = 8
ASKED = (REQUESTS[0], *REQUESTS[3:5])  # a short prompt, and one far longer than the window twice
EXPERTS = [name for name, (_, fields) in FAMILIES.items() if "num_experts_per_tok" in fields]


@dataclass(frozen=True)
class Case:
    """A model: family, fields of its configuration, type of the engine's weights."""

    family: str
    special: tuple[tuple[str, Any], ...] = ()
    dtype: Literal["fp32", "bf16"] = "fp32"

    def __str__(self) -> str:
        return "-".join((self.family, *(name for name, _ in self.special), self.dtype))


SPECIAL = {
    Case("llama", (("kv_heads", 1),)),
    Case("mistral", (("sliding_window", WINDOW),)),
    Case("qwen2", (("tied", False),), "bf16"),
    Case("qwen3", (("tied", True),)),
    Case("qwen3_moe", (("norm_topk_prob", False),), "bf16"),
}
PLAIN = set(map(Case, FAMILIES)) - {Case("llama"), Case("mistral"), Case("qwen3")}
# vLLM makes its group for experts with the first engine of a process: families with come first.
CASES = sorted(SPECIAL | PLAIN, key=lambda case: (case.family not in EXPERTS, str(case)))
# A change of the configuration that must show in transformers' log-probs.
CONTROLS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "mixtral": {"num_experts_per_tok": 1},
    "qwen3_moe": {"norm_topk_prob": False},
}
ANY_CONTROL = {"rms_norm_eps": 1e-1}


def few_meshes(family: str) -> tuple[Topology, ...]:
    """Three trainer layouts, one after the other."""
    if family in EXPERTS:
        return (
            Topology(2, ep=2),
            Topology(4, tp=2, pp=2, vpp=2),
            Topology(2, tp=2, ep=2),
        )
    return (Topology(2), Topology(4, tp=2, pp=2), Topology(2, pp=2, vpp=2))


def all_meshes(family: str) -> tuple[Topology, ...]:
    """Every tensor, pipeline and expert size that divides the tiny models."""
    return tuple(
        Topology(pp * lcm(tp, ep, 2), tp, pp, ep, vpp)
        for tp, (pp, vpp), ep in product(
            (1, 2, 4), ((1, 1), (2, 1), (2, 2)), (1, 2) if family in EXPERTS else (1,)
        )
    )


@dataclass(frozen=True)
class State:
    """What an engine rank holds and does."""

    parameters: Tensors
    outputs: Tensors
    rollouts: Rollouts


@dataclass
class Seen:
    """One engine rank of one case. The first refresh is to the new folder, then in turn."""

    old: State
    new: State
    refreshed: list[State] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Prepared:
    """A case, its folders, and per refresh what each engine rank is to be given."""

    case: Case
    old: Path
    new: Path
    destinations: tuple[tuple[Tensors, ...], ...]


def trainer_weights(folder: Path, mesh: Topology) -> list[Tensors]:
    """The tensors of every pretended trainer rank, as Megatron holds them."""
    layout = megatron_layout(load_shape(folder), mesh)
    reader, ranks = CheckpointReader(folder), blank(layout, torch.float32)
    for rank, tensors in enumerate(ranks):
        import_hf(reader, layout, rank, tensors)
    return ranks


def planned_weights(
    folder: Path, mesh: Topology, engine_tp: int, dtype: torch.dtype
) -> tuple[Tensors, ...]:
    """What the plan gives every rank of the first engine; the others must get the same."""
    shape = load_shape(folder)
    destination = vllm_layout(shape, mesh.world_size, engine_tp)
    written = blank(destination, dtype)
    apply_plan(
        plan(megatron_layout(shape, mesh), destination), trainer_weights(folder, mesh), written
    )
    for rank in range(engine_tp, mesh.world_size):
        for name, tensor in written[rank - engine_tp].items():
            assert torch.equal(written[rank][name], tensor), (rank, name)
    return tuple(written[:engine_tp])


def prepare(base: Path, case: Case, meshes: tuple[Topology, ...], engine_tp: int) -> Prepared:
    """Write the folders of a case and carry out its plans."""
    old, new = (
        make_model(base / f"{case}-{seed}", case.family, layers=5, seed=seed, **dict(case.special))
        for seed in (0, 1)
    )
    dtype = torch.float32 if case.dtype == "fp32" else torch.bfloat16
    destinations = tuple(
        planned_weights(old if i % 2 else new, mesh, engine_tp, dtype)
        for i, mesh in enumerate(meshes)
    )
    return Prepared(case, old, new, destinations)


def state(engine: VLLMEngine, parameters: Tensors) -> State:
    """What the engine computes now, beside the parameters that it was given."""
    greedy, _ = generate(engine, ASKED, temperature=0.0, new=NEW_TOKENS)
    return State(parameters, layer_outputs(engine), greedy)


def started(folder: Path, case: Case, engine_tp: int) -> tuple[VLLMEngine, State]:
    """An engine fresh from a folder."""
    with loaded_parameters() as parameters:
        engine = start_engine(folder, engine_tp, case.dtype)
    return engine, state(engine, parameters)


def refusal(engine: VLLMEngine) -> str:
    """Why the engine will not generate."""
    try:
        generate(engine, ASKED)
    except EngineUnusableError as error:
        return str(error)
    raise AssertionError("the engine generated between two versions")


def break_off_writing(engine: VLLMEngine) -> str:
    """A refresh that ends while it writes; the engine's refusal."""
    written = engine.begin_update()
    for name in list(written)[::2]:
        written[name].fill_(7.0)
    return refusal(engine)


def break_off_converting(engine: VLLMEngine) -> str:
    """A refresh whose conversion fails in the last layer; the engine's refusal."""
    for tensor in engine.begin_update().values():
        tensor.fill_(0.5)
    last: Any = model_of(engine).get_submodule("model.layers.4.self_attn.o_proj")
    with (
        mock.patch.object(
            last.quant_method, "process_weights_after_loading", side_effect=MemoryError
        ),
        pytest.raises(MemoryError),
    ):
        engine.finish_update(99)
    return refusal(engine)


def refresh_in_turn(rank: int, prepared: Prepared, engine_tp: int) -> Seen:
    """One engine, refreshed again and again; two refreshes break off on the way."""
    case = prepared.case
    _, new = started(prepared.new, case, engine_tp)
    engine, old = started(prepared.old, case, engine_tp)
    seen = Seen(old, new)
    for i, destinations in enumerate(prepared.destinations):
        if i < 2:
            break_off = (break_off_writing, break_off_converting)[i]
            seen.refusals.append(break_off(engine))
        engine.require_parameters({n: tuple(t.shape) for n, t in destinations[rank].items()})
        written = engine.begin_update()
        for name, tensor in destinations[rank].items():
            written[name].copy_(tensor)
        before_conversion = {name: tensor.clone() for name, tensor in written.items()}
        engine.finish_update(i + 1)
        seen.refreshed.append(state(engine, before_conversion))
    return seen


def refresh_all(rank: int, cases: tuple[Prepared, ...], engine_tp: int) -> dict[Case, Seen]:
    """Every case in the same process; no engine may have vLLM look at a class elsewhere."""
    from vllm.model_executor.models import registry

    with mock.patch.object(registry, "_run_in_subprocess", side_effect=AssertionError):
        return {prepared.case: refresh_in_turn(rank, prepared, engine_tp) for prepared in cases}


@dataclass(frozen=True)
class Run:
    """All cases at one engine size; per case the ranks of the engine."""

    prepared: dict[Case, Prepared]
    ranks: list[dict[Case, Seen]]


def run(
    base: Path, engine_tp: int, meshes: Callable[[str], tuple[Topology, ...]], timeout: float
) -> Run:
    """Prepare and fork."""
    cases = tuple(prepare(base, case, meshes(case.family), engine_tp) for case in CASES)
    import_vllm()
    ranks = run_ranks(engine_tp, refresh_all, cases, engine_tp, timeout=timeout)
    return Run({prepared.case: prepared for prepared in cases}, ranks)


pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module", params=[1, 2], ids="engine{}".format)
def few(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Three layouts of each case."""
    return run(tmp_path_factory.mktemp("few"), request.param, few_meshes, 600)


def differing(a: Tensors, b: Tensors) -> list[str]:
    """Names of tensors that are not equal bit for bit, type included."""
    assert set(a) == set(b)
    return [n for n in a if a[n].dtype != b[n].dtype or not torch.equal(a[n], b[n])]


def assert_equals_fresh(run: Run, case: Case) -> None:
    """After each refresh: parameters, layers, tokens and log-probs are the fresh engine's."""
    for rank in run.ranks:
        seen = rank[case]
        assert len(seen.refreshed) == len(run.prepared[case].destinations)
        for i, found in enumerate(seen.refreshed):
            expected = seen.old if i % 2 else seen.new
            assert differing(found.parameters, expected.parameters) == []
            assert differing(found.outputs, expected.outputs) == []
            assert torch.equal(found.rollouts.tokens, expected.rollouts.tokens)
            assert torch.equal(found.rollouts.log_probs, expected.rollouts.log_probs)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_refreshed_engine_equals_a_fresh_one(few: Run, case: Case) -> None:
    """From three trainer layouts in turn, also after a refresh that broke off (C14)."""
    assert_equals_fresh(few, case)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("engine_tp", [1, 2])
def test_every_trainer_layout(tmp_path: Path, engine_tp: int) -> None:
    """All tensor, pipeline and expert sizes, one after the other."""
    every = run(tmp_path, engine_tp, all_meshes, 3000)
    for case in CASES:
        assert_equals_fresh(every, case)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_folders_differ_in_everything(few: Run, case: Case) -> None:
    """Without the refresh every parameter, layer and response would be another."""
    for rank in few.ranks:
        old, new = rank[case].old, rank[case].new
        assert set(differing(old.parameters, new.parameters)) == set(old.parameters)
        assert set(differing(old.outputs, new.outputs)) == set(old.outputs)
        assert not torch.equal(old.rollouts.tokens, new.rollouts.tokens)
        layers = {name.split(".")[-1] for name in old.outputs}
        mlp = (
            {"gate", "routed_experts"} if case.family in EXPERTS else {"gate_up_proj", "down_proj"}
        )
        assert layers == {"embed_tokens", "lm_head", "qkv_proj", "o_proj"} | mlp


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_engine_between_two_versions_refuses(few: Run, case: Case) -> None:
    """After a refresh that broke off while writing, and one while converting."""
    for rank in few.ranks:
        writing, converting = rank[case].refusals
        assert "update that follows version 0 has not finished" in writing
        assert "update that follows version 1 has not finished" in converting


@pytest.mark.parametrize("case", [c for c in CASES if c.dtype == "fp32"], ids=str)
def test_log_probs_are_those_of_transformers(few: Run, case: Case) -> None:
    """To 1e-4, also past the sliding window; another configuration would show."""
    folder, last = few.prepared[case].new, few.ranks[0][case].refreshed[2].rollouts
    assert last.log_probs.min() < -0.01
    expected = transformers_log_probs(folder, last, 0.0)
    assert float((last.log_probs - expected).abs().max()) <= 1e-4
    control = CONTROLS.get(case.family, ANY_CONTROL)
    otherwise = transformers_log_probs(folder, last, 0.0, **control)
    assert float((last.log_probs - otherwise).abs().max()) > 1e-2
