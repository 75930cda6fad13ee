"""Real runs of ``megappo train`` in a process of their own, on a tiny random policy.

The folder that ``make_inputs`` fills has all that a run needs; ``train`` starts the program as
a user would, and ``leftovers`` finds the processes that a run should have ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml
from safetensors.torch import load_file

from tests.support.models import make_llama

MARK = "MEGAPPO_TEST_RUN"
"""Set in the environment of a run: its processes inherit it and are known by it."""

REWARD = '''
def reward_func(samples):
    """Share of digits in the response."""
    return [
        {"reward": sum(c.isdigit() for c in s.response) / max(len(s.response), 1), "seen": 1.0}
        for s in samples
    ]
'''


@dataclasses.dataclass(frozen=True)
class Finished:
    """How a run ended."""

    code: int
    output: str
    errors: str
    leftovers: list[str]


def make_inputs(folder: Path, *, prompts: int = 16, **model: Any) -> Path:
    """Write policy, prompts, reward function and ``ppo.yaml``; returns the latter."""
    make_llama(folder / "policy", layers=2, vocab=101, **model)
    rows = [{"input": f"{i}+{i}=", "label": str(2 * i)} for i in range(prompts)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    config = {
        "actor": {
            "model_name_or_path": str(folder / "policy"),
            "adam": {"lr": 1e-3},
            "lr_warmup_ratio": 0.25,
        },
        "critic": {"adam": {"lr": 1e-3}},
        "reward": {"remote_url": str(folder / "reward.py")},
        "rollout": {"batch_size": 4, "n_samples_per_prompt": 2, "max_new_tokens": 6},
        "train": {"batch_size": 4, "max_epochs": 2, "max_tokens_per_gpu": 64},
        "algo": {"kl": {"init_coef": 0.05, "target": 0.1, "horizon": 100}},
        "data": {
            "prompt_dataset": str(folder / "prompts.jsonl"),
            "label_key": "label",
            "max_len": 32,
        },
        "eval": {"dataset": str(folder / "prompts.jsonl")},
        "vllm": {
            "kv_cache_memory_bytes": 16 * 2**20,
            "max_num_seqs": 16,
            "verify_weights": True,
        },
        "megatron": {"params_dtype": "fp32"},
        "logger": {"console": False},
    }
    (folder / "ppo.yaml").write_text(yaml.safe_dump(config))
    return folder / "ppo.yaml"


def start(config: Path, output_dir: Path, *overrides: str) -> subprocess.Popen[str]:
    """Start ``megappo train`` in a session of its own."""
    environment = os.environ | {MARK: str(output_dir)}
    return subprocess.Popen(
        [sys.executable, "-m", "megappo", "train", "--config", str(config)]
        + ["--output_dir", str(output_dir), *overrides],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], output_dir: Path, timeout: float = 420) -> Finished:
    """Wait for a run and look for what it left."""
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        kill(output_dir)
        raise
    deadline = time.monotonic() + 10  # Ray's processes take a moment to see their driver gone
    while (left := leftovers(output_dir)) and time.monotonic() < deadline:
        time.sleep(0.3)
    return Finished(process.returncode, output, errors, left)


def train(config: Path, output_dir: Path, *overrides: str) -> Finished:
    """Run ``megappo train`` to its end."""
    return finish(start(config, output_dir, *overrides), output_dir)


def processes(output_dir: Path) -> list[psutil.Process]:
    """The processes of a run that are there now."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == str(output_dir):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def kill(output_dir: Path) -> None:
    """End a run and everything that it started, at once."""
    for process in processes(output_dir):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def leftovers(output_dir: Path) -> list[str]:
    """Command lines of the processes of a run that are still there."""
    return [_command(process) for process in processes(output_dir)]


def listening(output_dir: Path) -> set[str]:
    """Addresses that the processes of a run listen on."""
    found = set()
    for process in processes(output_dir):
        with contextlib.suppress(psutil.NoSuchProcess):
            connections = process.net_connections()
            found |= {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN}
    return found


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return "(just ended)"


def wait_for(condition: Callable[[], bool], timeout: float = 240) -> None:
    """Wait until ``condition`` holds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.1)


def metrics(output_dir: Path) -> list[dict[str, Any]]:
    """Lines of ``metrics.jsonl`` without what depends on the machine's speed."""
    lines = (output_dir / "metrics.jsonl").read_text().splitlines()
    return [
        {name: value for name, value in json.loads(line).items() if not name.startswith("timing/")}
        for line in lines
    ]


def flags(values: Mapping[str, object]) -> Sequence[str]:
    """``{"train.max_steps": 2}`` as command-line arguments."""
    return [text for name, value in values.items() for text in (f"--{name}", str(value))]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a Hugging Face folder."""
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}
