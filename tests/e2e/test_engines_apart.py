"""Engines in processes of their own: whole steps, what a sync sends, and an engine that dies.

The trainer is a mesh of two ranks; weights reach the engine and tokens the mesh over the
communicator that joins all processes. The tests of the first runtime run in order: the last
two kill what it has.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from megappo.config import load
from megappo.records import GenerateRequest, SampleRequest, SamplingParams
from megappo.reshard.executor import TransferStats
from megappo.runtime.groups import RankError
from megappo.runtime.ray import RayRuntime
from megappo.trainer import PPOTrainer
from megappo.trainer.build import make_runtime
from megappo.trainer.inputs import load_inputs
from megappo.weights.vllm import vllm_layout
from tests.e2e.runs import (
    finish,
    flags,
    kill,
    listening,
    make_inputs,
    metrics,
    processes,
    start,
    train,
    wait_for,
    weights,
)

APART: dict[str, Any] = {"train.colocate_all": False, "rollout.temperature": 0.7}
TP2 = {"megatron.world_size": 2, "megatron.tensor_model_parallel_size": 2}
PP2 = {"megatron.world_size": 2, "megatron.pipeline_model_parallel_size": 2}
STEPS = 3
pytestmark = pytest.mark.slow
FLOAT32_BYTES = 4
REQUEST = GenerateRequest((SampleRequest(0, (5, 6), seed=1),), SamplingParams(1.0, 2, ()), None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Policy, prompts, reward and configuration."""
    made = tmp_path_factory.mktemp("apart")
    make_inputs(made)
    return made


@pytest.fixture(scope="module")
def arguments(folder: Path) -> list[str]:
    """A mesh at TP2 and one engine rank in a process of its own."""
    overrides = flags(APART | TP2 | {"train.max_steps": STEPS, "vllm.verify_weights": True})
    return ["--config", str(folder / "ppo.yaml"), "--output_dir", str(folder / "out"), *overrides]


@pytest.fixture(scope="module")
def runtime(arguments: list[str]) -> Iterator[RayRuntime]:
    """Two mesh ranks and an engine."""
    made = make_runtime(load(arguments))
    yield made
    made.shutdown()


def ray_processes(word: str) -> list[psutil.Process]:
    """Processes started by this one whose command line has ``word``."""
    children = psutil.Process().children(recursive=True)
    return [p for p in children if p.is_running() and word in " ".join(p.cmdline())]


@pytest.mark.timeout(300)
def test_engine_and_trainer_agree_before_and_after_a_sync(
    arguments: list[str], runtime: RayRuntime, folder: Path
) -> None:
    """The engine draws with the trainer's weights in every step; the mesh got its very tokens."""
    args = load(arguments)
    trainer = PPOTrainer(
        actor_model_group=runtime.role_group("actor"),
        critic_model_group=runtime.role_group("critic"),
        reward_model_group=None,
        ref_model_group=runtime.role_group("ref"),
        vllm_engines=runtime.engine_group(),
        strategy=runtime,
        args=args,
    )
    trainer.fit(args)
    steps = metrics(folder / "out")[1:]
    assert [line["step"] for line in steps] == [1, 2, 3]
    for line in steps:
        assert line["train/vllm_logprobs_diff"] < 1e-3
    assert abs(steps[0]["train/kl"]) < 1e-5
    assert steps[-1]["train/kl"] != 0


def test_an_engine_is_sent_exactly_its_own_bytes(arguments: list[str], runtime: RayRuntime) -> None:
    """From both tensor ranks, and nothing twice; vocabulary padding is not sent at all."""
    stats: TransferStats = runtime.engine_group().broadcast("sync_weights", STEPS + 1)[0]
    shapes = vllm_layout(load_inputs(load(arguments)).policy, 1, 1).local_shapes(0)
    sizes = [FLOAT32_BYTES * _elements(shape) for shape in shapes.values()]
    assert stats.bytes_received + stats.bytes_zeroed == sum(sizes)
    assert stats.bytes_kept == 0 and stats.bytes_zeroed > 0


def _elements(shape: tuple[int, ...]) -> int:
    total = 1
    for length in shape:
        total *= length
    return total


def test_a_sync_that_fails_leaves_the_engine_refusing(runtime: RayRuntime) -> None:
    """A mesh rank dies: it is named though others fail too, and no half-new weights are used."""
    trainer = ray_processes("RankActor")
    assert len(trainer) == 2
    trainer[0].send_signal(signal.SIGKILL)
    trainer[0].wait(timeout=30)
    with pytest.raises(RankError, match=r"^actor rank [01] died: killed by SIGKILL"):
        runtime.engine_group().broadcast("sync_weights", STEPS + 2)
    with pytest.raises(RankError, match=r"^engine rank 0 failed: EngineUnusable.* refuses"):
        runtime.engine_group().call("generate", [REQUEST])


def test_an_engine_that_dies_is_named(runtime: RayRuntime) -> None:
    """By its rank among the engines; afterwards everything is taken down."""
    (engine,) = ray_processes("EngineActor")
    engine.send_signal(signal.SIGKILL)
    engine.wait(timeout=30)
    with pytest.raises(RankError, match=r"^engine rank 0 died: .*SIGKILL.*engine_0\.log$"):
        runtime.engine_group().call("generate", [REQUEST])
    runtime.shutdown()
    wait_for(lambda: not ray_processes("Actor"), timeout=20)


@pytest.mark.timeout(900)
def test_placement_changes_no_token(folder: Path) -> None:
    """Seeds decide the tokens, wherever the engines are.

    Two engines apart get the very requests of the two inside: the runs are equal bit for bit.
    One engine gets all of them in one batch, whose arithmetic may differ in the last bits.
    """
    runs: dict[str, dict[str, Any]] = {
        "inside": {"train.colocate_all": True},
        "two": {"train.colocate_all": False, "vllm.num_engines": 2},
        "one": {"train.colocate_all": False},
    }
    for name, placement in runs.items():
        overrides = flags(APART | TP2 | placement | {"train.max_steps": 2})
        result = train(folder / "ppo.yaml", folder / name, *overrides)
        assert result.code == 0, result.errors
        assert result.leftovers == []
    inside, two, one = (metrics(folder / name) for name in runs)
    assert two == inside
    trained = [weights(folder / name / "hf") for name in ("inside", "two")]
    assert all(torch.equal(trained[0][name], trained[1][name]) for name in trained[0])
    for step in (1, 2):
        assert _samples(folder / "two", step) == _samples(folder / "inside", step)
    assert _samples(folder / "one", 1) == _samples(folder / "inside", 1)
    assert one[0] == pytest.approx(inside[0], rel=1e-6)
    assert one[1] == pytest.approx(inside[1], rel=1e-3, abs=1e-6)
    assert one[2]["train/vllm_logprobs_diff"] < 1e-3


def _samples(output_dir: Path, step: int) -> list[dict[str, Any]]:
    lines = (output_dir / "samples" / f"step_{step}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.timeout(600)
def test_a_wider_engine_than_stage_and_its_death(folder: Path) -> None:
    """TP1 x PP2 trains, an engine of TP2 draws; killed, the run ends with one line naming it."""
    out = folder / "wider"
    overrides = flags(APART | PP2 | {"vllm.tensor_parallel_size": 2, "train.num_episodes": 100})
    process = start(folder / "ppo.yaml", out, *overrides)

    def stepped() -> bool:
        assert process.poll() is None, process.communicate()
        return (out / "metrics.jsonl").exists() and len(metrics(out)) >= 4

    try:
        wait_for(stepped)
        hosts = {host.removeprefix("::ffff:") for host in listening(out)}
        engines = [p.pid for p in processes(out) if "EngineActor" in " ".join(p.cmdline())]
        assert len(engines) == 2 and hosts == {"127.0.0.1"}
        os.kill(engines[0], signal.SIGKILL)
    except BaseException:
        kill(out)
        raise
    result = finish(process, out)
    for line in metrics(out)[1:]:
        assert line["train/vllm_logprobs_diff"] < 1e-3
    assert result.code == 1, result.errors
    last = result.errors.strip().splitlines()[-1]
    assert last.startswith("megappo: error: engine rank ") and "SIGKILL" in last
    assert "Traceback" not in result.errors
    assert result.leftovers == []
