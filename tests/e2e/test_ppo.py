"""Whole runs at TP=2 under Ray: metrics, first step, same seed, resume, sinks, what is left.

Two runs serve the tests of this module: four steps straight; and the same resumed from the
first one's checkpoint of step 2.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from tests.e2e.runs import Finished, flags, make_inputs, metrics, train, weights
from tests.support.models import make_model

MESH = {
    "megatron.world_size": 2,
    "megatron.tensor_model_parallel_size": 2,
    "vllm.tensor_parallel_size": 2,
    "rollout.temperature": 0.7,
    **{f"{role}.offload": True for role in ("actor", "critic", "ref", "reward")},
}
STEPS = 4


class Runs:
    """The runs and the folder that they are in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = make_inputs(folder)
        make_model(folder / "judge", "qwen3", layers=3, vocab=64, value_head=True, seed=3)
        self._judged = {
            "reward.model_name_or_path": folder / "judge",
            "reward.model_weights": "[0.5]",
            "reward.normalize_enable": True,
        }
        self.results: dict[str, Finished] = {}

    def train(self, name: str, *overrides: str) -> None:
        """Run into ``folder/name``."""
        keys = flags(MESH | self._judged)
        self.results[name] = train(self.config, self.folder / name, *keys, *overrides)
        result = self.results[name]
        assert result.code == 0, result.errors + _logs(self.folder / name)


def _logs(output_dir: Path) -> str:
    return "".join(p.read_text()[-3000:] for p in sorted(output_dir.glob("logs/*.log")))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """Train, and go on from a checkpoint."""
    made = Runs(tmp_path_factory.mktemp("ppo"))
    sinks = flags(
        {
            "logger.tensorboard_dir": made.folder / "tensorboard",
            "logger.wandb.project": "test",
            "logger.wandb.mode": "offline",
        }
    )
    saving = flags({"ckpt.save_steps": 2})
    made.train("straight", *sinks, *saving)
    saved = made.folder / "resumed" / "checkpoints"
    shutil.copytree(made.folder / "straight" / "checkpoints" / "step_2", saved / "step_2")
    (saved / "latest").write_text("step_2\n")
    made.train("resumed", *saving, *flags({"ckpt.load_enable": True}))
    yield made


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Equal names and bits."""
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


@pytest.mark.timeout(600)
def test_every_step_is_logged(runs: Runs) -> None:
    """Step 0 is the evaluation before; then one line per step with everything in it."""
    lines = metrics(runs.folder / "straight")
    assert [line["step"] for line in lines] == list(range(STEPS + 1))
    assert set(lines[0]) >= {"eval/reward_mean", "eval/seen"}
    for line in lines[1:]:
        assert set(line) >= {
            "train/policy_loss",
            "train/critic_loss",
            "train/kl",
            "train/reward",
            "train/actor_lr",
            "train/critic_lr",
            "rollout/seen",
            "rollout/reward_model",
        }
    assert "eval/reward_mean" in lines[-1]


def test_first_step_starts_from_the_reference(runs: Runs) -> None:
    """KL is 0, and engine and trainer agree at a temperature that is not 1."""
    first = metrics(runs.folder / "straight")[1]
    assert abs(first["train/kl"]) < 1e-6
    assert first["train/vllm_logprobs_diff"] < 1e-3
    assert first["train/kl_coef"] == 0.05


def test_training_moves_the_policy(runs: Runs) -> None:
    """Later steps have a KL, and the exported weights differ from the first ones."""
    assert metrics(runs.folder / "straight")[-1]["train/kl"] != 0
    assert not same(weights(runs.folder / "straight" / "hf"), weights(runs.folder / "policy"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_same_seed_gives_the_same_run(runs: Runs) -> None:
    """Every metric but the timings, bit for bit; and the weights."""
    runs.train("again", *flags({"ckpt.save_steps": 2}))
    assert metrics(runs.folder / "again") == metrics(runs.folder / "straight")
    assert same(weights(runs.folder / "again" / "hf"), weights(runs.folder / "straight" / "hf"))


def test_two_and_two_steps_equal_four(runs: Runs) -> None:
    """The resumed run logs steps 3 and 4 exactly as the straight one, and ends at its weights."""
    straight = metrics(runs.folder / "straight")
    assert metrics(runs.folder / "resumed") == straight[3:]
    assert same(weights(runs.folder / "resumed" / "hf"), weights(runs.folder / "straight" / "hf"))
    assert "resumed from" in runs.results["resumed"].errors


def test_exported_folder_is_a_hugging_face_model(runs: Runs) -> None:
    """Plain transformers loads it, tokenizer and all, and its engine was the same policy."""
    folder = runs.folder / "straight" / "hf"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([tokenizer("1+1=")["input_ids"]])
    with torch.no_grad():
        assert model(ids).logits.isfinite().all()
    source = json.loads((runs.folder / "policy" / "config.json").read_text())
    assert json.loads((folder / "config.json").read_text()) == source


def test_the_judge_scores_what_was_written(runs: Runs) -> None:
    """Function plus half the reward model, in deviations of the scores so far; as transformers."""
    judge = runs.folder / "judge"
    model = AutoModelForSequenceClassification.from_pretrained(judge, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(judge)
    seen: list[float] = []
    for step in range(1, STEPS + 1):
        lines = (runs.folder / "straight" / "samples" / f"step_{step}.jsonl").read_text()
        rows: list[dict[str, Any]] = [json.loads(line) for line in lines.splitlines()]
        seen += [row["named"]["reward_model"] for row in rows]
        for row in rows:
            ids = tokenizer(row["prompt"] + row["response"])["input_ids"]
            ids += [tokenizer.eos_token_id] if row["finish_reason"] == "stop" else []
            with torch.no_grad():
                expected = float(model(torch.tensor([ids])).logits[0, 0])
            assert row["named"]["reward_model"] == pytest.approx(expected, abs=1e-4)
            digits = sum(c.isdigit() for c in row["response"]) / max(len(row["response"]), 1)
            judged = (row["named"]["reward_model"] - np.mean(seen)) / np.std(seen)
            assert row["reward"] == pytest.approx(digits + 0.5 * judged, abs=1e-4)


def test_samples_of_every_step_are_kept(runs: Runs) -> None:
    """Prompt, response, label, reward and finish reason of every sample."""
    for step in range(1, STEPS + 1):
        lines = (runs.folder / "straight" / "samples" / f"step_{step}.jsonl").read_text()
        rows: list[dict[str, Any]] = [json.loads(line) for line in lines.splitlines()]
        assert len(rows) == 8
        for row in rows:
            number = row["prompt"].removeprefix("<s>").split("+")[0]
            assert row["label"] == str(2 * int(number))
            assert row["finish_reason"] in ("stop", "length")
            assert row["response_len"] <= 6 and isinstance(row["response"], str)


def test_tensorboard_and_wandb_have_the_metrics(runs: Runs) -> None:
    """The same numbers as in metrics.jsonl, and an offline W&B run."""
    events = EventAccumulator(str(runs.folder / "tensorboard"))
    events.Reload()
    logged = [event.value for event in events.Scalars("train/kl")]
    kl = [line["train/kl"] for line in metrics(runs.folder / "straight")[1:]]
    assert logged == pytest.approx(kl, rel=1e-6)
    assert list((runs.folder / "straight").glob("wandb/offline-run-*/*.wandb"))


def test_the_start_says_what_every_role_takes(runs: Runs) -> None:
    """On both ranks alike: roles that leave the device are counted as they are on it."""
    table = (runs.folder / "straight" / "logs" / "memory.txt").read_text()
    rows = [line.replace("\u2502", " ").split() for line in table.splitlines()]
    assert [row[-6] for row in rows if len(row) >= 6 and row[-1] != "counted)"][-5:] == [
        "actor",
        "critic",
        "ref",
        "reward",
        "all",
    ]
    assert all(float(row[-1]) > 0 for row in rows if row[-6:-5] in (["actor"], ["ref"]))


def test_no_process_is_left(runs: Runs) -> None:
    """Ray and the ranks are gone after each run."""
    assert {"straight", "resumed"} <= runs.results.keys()
    assert all(result.leftovers == [] for result in runs.results.values())
