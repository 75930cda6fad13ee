"""The whole program on larger meshes, and on a Ray cluster that somebody else started.

The same seed on every mesh gives the same prompts and the same requests; tokens are drawn by
engines of other sizes, so metrics agree to what their arithmetic allows.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import flags, kill, make_inputs, metrics, train, wait_for
from tests.support.ranks import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

MESHES: dict[str, dict[str, Any]] = {
    "tp2-pp2": {"megatron.world_size": 4, "vllm.tensor_parallel_size": 2},
    "tp2-pp2-dp2": {"megatron.world_size": 8, "vllm.tensor_parallel_size": 1},
}
SIZES = {
    "megatron.tensor_model_parallel_size": 2,
    "megatron.pipeline_model_parallel_size": 2,
    "megatron.sequence_parallel": True,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inputs, and the run of one rank in ``one``."""
    made = tmp_path_factory.mktemp("meshes")
    make_inputs(made)
    result = train(made / "ppo.yaml", made / "one", *flags({"train.max_steps": 2}))
    assert result.code == 0, result.errors
    return made


@pytest.mark.parametrize("name", MESHES)
def test_every_mesh_runs_the_same_program(folder: Path, name: str) -> None:
    """Rewards of the first rollouts are the one rank's, and so is the first update."""
    overrides = flags({"train.max_steps": 2} | SIZES | MESHES[name])
    result = train(folder / "ppo.yaml", folder / name, *overrides)
    assert result.code == 0, result.errors
    assert result.leftovers == []
    one, mesh = metrics(folder / "one"), metrics(folder / name)
    assert mesh[0] == pytest.approx(one[0], rel=1e-6)
    for key in ("train/reward", "train/policy_loss", "train/critic_loss", "train/actor_grad_norm"):
        assert mesh[1][key] == pytest.approx(one[1][key], rel=1e-3, abs=1e-5), key
    assert abs(mesh[1]["train/kl"]) < 1e-5
    assert mesh[1]["train/vllm_logprobs_diff"] < 1e-3


@pytest.fixture
def cluster() -> Iterator[str]:
    """A Ray cluster of its own, started from the command line."""
    address = f"127.0.0.1:{free_port()}"
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # a socket's path must be short
    ray = [sys.executable, "-m", "ray.scripts.scripts"]
    environment = os.environ | {"MEGAPPO_TEST_RUN": "cluster", "RAY_USAGE_STATS_ENABLED": "0"}
    head = subprocess.Popen(
        [*ray, "start", "--head", "--block", "--port", address.split(":")[1], "--num-cpus", "2"]
        + ["--include-dashboard", "false", "--object-store-memory", str(128 * 1024**2)]
        + ["--temp-dir", folder],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    host, port = address.split(":")
    wait_for(lambda: socket.socket().connect_ex((host, int(port))) == 0, timeout=60)
    yield address
    head.terminate()
    head.wait(timeout=30)
    kill(Path("cluster"))
    shutil.rmtree(folder, ignore_errors=True)


def test_a_run_joins_a_cluster_and_leaves_it_running(folder: Path, cluster: str) -> None:
    """``--ray_address``: the ranks run there, and the cluster is still there afterwards."""
    overrides = flags({"train.max_steps": 1, "ray_address": cluster})
    for name in ("joined", "joined_again"):
        result = train(folder / "ppo.yaml", folder / name, *overrides)
        assert result.code == 0, result.errors
        assert metrics(folder / name)[1] == metrics(folder / "joined")[1]


def test_an_address_where_nothing_answers_is_named(folder: Path) -> None:
    """One line with the key."""
    address = f"127.0.0.1:{free_port()}"
    result = train(folder / "ppo.yaml", folder / "nowhere", "--ray_address", address)
    assert result.code == 2
    assert f"ray_address = {address}" in result.errors.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("too_much", "named"),
    [
        ({"ray.num_cpus_per_rank": 64}, ["64", "megatron.world_size = 1 ranks of"]),
        (
            {"train.colocate_all": False, "vllm.num_engines": 40, "vllm.tensor_parallel_size": 2},
            ["20.25", "megatron.world_size = 1 ranks and 80 ranks of engines", "vllm.num_engines"],
        ),
    ],
)
def test_a_run_that_does_not_fit_is_refused_with_numbers(
    folder: Path, too_much: dict[str, Any], named: list[str]
) -> None:
    """Needed and available resources are named within the time allowed."""
    overrides = flags(too_much | {"ray.placement_timeout": 5})
    result = train(folder / "ppo.yaml", folder / "too_big", *overrides)
    assert result.code == 2
    last = result.errors.strip().splitlines()[-1]
    for text in [*named, "ray.placement_timeout", "offered"]:
        assert text in last, last
