"""Bad input and interruptions: one clear line, the right exit code, nothing left behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from megappo.cli import main
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
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that a run needs."""
    folder = tmp_path_factory.mktemp("inputs")
    make_inputs(folder)
    return folder


def _no_config(folder: Path) -> None:
    (folder / "policy" / "config.json").unlink()


def _no_model(folder: Path) -> None:
    shutil.rmtree(folder / "policy")


def _empty_prompts(folder: Path) -> None:
    (folder / "prompts.jsonl").write_text("")


def _blank_prompts(folder: Path) -> None:
    (folder / "prompts.jsonl").write_text("\n \n")


def _broken_prompt(folder: Path) -> None:
    with (folder / "prompts.jsonl").open("a") as file:
        file.write('{"input": "1+\n')


def _reward_without_function(folder: Path) -> None:
    (folder / "reward.py").write_text("x = 1\n")


def _reward_that_does_not_import(folder: Path) -> None:
    (folder / "reward.py").write_text("import no_such_module_here\n")


FILE_CASES = [
    (_no_model, ["actor.model_name_or_path", "policy"]),
    (_no_config, ["actor.model_name_or_path", "config.json"]),
    (_empty_prompts, ["data.prompt_dataset", "prompts.jsonl"]),
    (_blank_prompts, ["data.prompt_dataset", "prompts.jsonl"]),
    (_broken_prompt, ["prompts.jsonl:17"]),
    (_reward_without_function, ["reward.remote_url", "reward_func"]),
    (_reward_that_does_not_import, ["reward.py:1", "no_such_module_here"]),
]


@pytest.mark.parametrize(("damage", "named"), FILE_CASES)
def test_bad_files_are_one_line(
    inputs: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: object,
    named: list[str],
) -> None:
    """The key or file:line is named before anything starts."""
    assert callable(damage)
    shutil.copytree(inputs, tmp_path / "in")
    config = (tmp_path / "in" / "ppo.yaml").read_text().replace(str(inputs), str(tmp_path / "in"))
    (tmp_path / "in" / "ppo.yaml").write_text(config)
    damage(tmp_path / "in")
    _refused(["--config", str(tmp_path / "in" / "ppo.yaml")], tmp_path, capsys, named)


VALUE_CASES = [
    (
        {"megatron.world_size": 3, "megatron.tensor_model_parallel_size": 3},
        ["tensor_model_parallel_size = 3", "num_attention_heads = 4"],
    ),
    (
        {"megatron.world_size": 4, "megatron.expert_model_parallel_size": 2},
        ["expert_model_parallel_size = 2", "no model of this run has experts"],
    ),
    (
        {"megatron.world_size": 4, "megatron.pipeline_model_parallel_size": 4},
        ["pipeline_model_parallel_size = 4", "num_hidden_layers = 2"],
    ),
    ({"megatron.world_size": 3, "megatron.tensor_model_parallel_size": 2}, ["world_size"]),
    ({"megatron.world_size": 2, "vllm.num_engines": 1}, ["vllm.num_engines", "2"]),
    (
        {"data.max_len": 512, "train.max_tokens_per_gpu": 512},
        ["data.max_len = 512", "max_position_embeddings = 256"],
    ),
    ({"megatron.world_size": 3, "vllm.tensor_parallel_size": 3}, ["vllm.tensor_parallel_size"]),
    (
        {"train.colocate_all": False, "vllm.tensor_parallel_size": 3},
        ["vllm.tensor_parallel_size = 3", "num_attention_heads = 4"],
    ),
    ({"rollout.top_p": 0.9}, ["rollout.top_p"]),
    ({"no.such_key": 1}, ["no.such_key"]),
    ({"train.batch_size": "many"}, ["train.batch_size"]),
]


@pytest.mark.parametrize(("overrides", "named"), VALUE_CASES)
def test_bad_values_are_one_line(
    inputs: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    overrides: dict[str, object],
    named: list[str],
) -> None:
    """The key and the numbers are named before anything starts."""
    argv = ["--config", str(inputs / "ppo.yaml"), *flags(overrides)]
    _refused(argv, tmp_path, capsys, named)


def _refused(
    argv: list[str], folder: Path, capsys: pytest.CaptureFixture[str], named: list[str]
) -> None:
    code = main(["train", *argv, "--output_dir", str(folder / "out")])
    captured = capsys.readouterr()
    lines = captured.err.strip().splitlines()
    assert code == 2
    assert len(lines) == 1 and lines[0].startswith("megappo: error: "), captured.err
    for text in named:
        assert text in lines[0], lines[0]
    assert not (folder / "out").exists()


RAISING = """
def reward_func(samples):
    raise RuntimeError("no answer key")
"""
TOO_FEW = """
def reward_func(samples):
    return [0.0] * (len(samples) - 1)
"""


@pytest.mark.parametrize(
    ("source", "named"),
    [
        (RAISING, ["reward.py:3", "RuntimeError: no answer key"]),
        pytest.param(TOO_FEW, ["15 scores for 16 samples"], marks=pytest.mark.slow),
    ],
)
def test_a_reward_that_fails_ends_the_run(
    inputs: Path, tmp_path: Path, source: str, named: list[str]
) -> None:
    """Found when it is first asked: one last line, exit code 2, no process left."""
    (tmp_path / "reward.py").write_text(source)
    out = tmp_path / "out"
    overrides = flags({"reward.remote_url": tmp_path / "reward.py"})
    result = train(inputs / "ppo.yaml", out, *overrides)
    assert result.code == 2, result.errors
    last = result.errors.strip().splitlines()[-1]
    assert last.startswith("megappo: error: ")
    for text in named:
        assert text in last
    assert "Traceback" not in result.errors
    assert result.leftovers == []


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM]
)
def test_a_signal_saves_and_ends(inputs: Path, tmp_path: Path, number: signal.Signals) -> None:
    """The current phase ends, a checkpoint is written; meanwhile only loopback was listened on."""
    out = tmp_path / "out"
    long_run = flags({"train.num_episodes": 100})
    process = start(inputs / "ppo.yaml", out, *long_run)
    _wait_for_steps(process, out)
    hosts = {host.removeprefix("::ffff:") for host in listening(out)}
    assert hosts == {"127.0.0.1"}, hosts
    os.kill(process.pid, number)
    result = finish(process, out)
    assert result.code == 128 + number, result.errors
    assert "Traceback" not in result.errors
    assert result.leftovers == []
    done = metrics(out)[-1]["step"]
    assert (out / "checkpoints" / "latest").read_text().strip() == f"step_{done}"


def test_a_signal_while_starting_ends(inputs: Path, tmp_path: Path) -> None:
    """SIGTERM before the first step, with Ray and the ranks coming up: one line, nothing left."""
    out = tmp_path / "out"
    process = start(inputs / "ppo.yaml", out)
    wait_for(lambda: any("RankActor" in " ".join(p.cmdline()) for p in processes(out)))
    os.kill(process.pid, signal.SIGTERM)
    result = finish(process, out)
    assert result.code == 128 + signal.SIGTERM, result.errors
    assert result.errors.strip().splitlines()[-1] == "megappo: SIGTERM: stopped, nothing was saved"
    assert result.leftovers == []


def test_a_rank_that_dies_is_named(inputs: Path, tmp_path: Path) -> None:
    """SIGKILL on one rank ends the run: role, rank and log file in the last line."""
    out = tmp_path / "out"
    process = start(
        inputs / "ppo.yaml", out, *flags({"train.num_episodes": 100, "megatron.world_size": 2})
    )
    _wait_for_steps(process, out)
    os.kill(_rank_pid(out), signal.SIGKILL)
    result = finish(process, out)
    assert result.code == 1, result.errors
    last = result.errors.strip().splitlines()[-1]
    assert "rank" in last and "died" in last and "rank_" in last
    assert result.leftovers == []


def _wait_for_steps(process: subprocess.Popen[str], out: Path) -> None:
    """Wait until the run has done a step; one that ends or hangs before is ended here."""

    def stepped() -> bool:
        assert process.poll() is None, process.communicate()
        return (out / "metrics.jsonl").exists() and len(metrics(out)) >= 2

    try:
        wait_for(stepped)
    except AssertionError:
        kill(out)
        raise


def _rank_pid(out: Path) -> int:
    """Process of one of the ranks: Ray names actors' processes after their class."""
    return next(int(p.pid) for p in processes(out) if "RankActor" in " ".join(p.cmdline()))
