"""The examples as a user runs them: the quickstart whole, SmolLM2 for two steps."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.runs import flags, metrics, weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]
ONE_PROBLEM = 1 / 200


def example(name: str, output_dir: Path, *overrides: str) -> list[str]:
    """Run ``python -m examples.NAME`` from the repository's root; lines of its output."""
    result = subprocess.run(
        [sys.executable, "-m", f"examples.{name}", "--output_dir", str(output_dir), *overrides],
        cwd=ROOT,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.strip().splitlines()


def test_quickstart_teaches_the_policy(tmp_path: Path) -> None:
    """Accuracy rises by 15 points, and plain transformers sees the same policy."""
    last = example("quickstart", tmp_path)[-1]
    match = re.fullmatch(
        r"accuracy before=(\d\.\d\d) after=(\d\.\d\d) transformers=(\d\.\d\d)", last
    )
    assert match, last
    rows = [row for row in metrics(tmp_path) if "eval/accuracy" in row]
    before, after = rows[0]["eval/accuracy"], rows[-1]["eval/accuracy"]
    assert after - before >= 0.15
    assert [float(match[1]), float(match[2])] == pytest.approx([before, after], abs=0.0051)
    assert abs(float(match[3]) - after) <= ONE_PROBLEM + 0.0051


def test_quickstart_resumes_bit_for_bit(tmp_path: Path) -> None:
    """2 + 2 steps equal 4: metrics and exported weights."""
    four = flags({"train.max_steps": 4, "ckpt.save_steps": 2})
    example("quickstart", tmp_path / "four", *four)
    saved = tmp_path / "resumed" / "checkpoints"
    shutil.copytree(tmp_path / "four" / "checkpoints" / "step_2", saved / "step_2")
    (saved / "latest").write_text("step_2\n")
    policy = next((ROOT / "runs" / "quickstart" / "assets").glob("seed42*/policy"))
    keys = {
        "config": ROOT / "examples" / "quickstart" / "ppo.yaml",
        "output_dir": tmp_path / "resumed",
        "actor.model_name_or_path": policy,
        "ckpt.load_enable": True,
    }
    command = [sys.executable, "-m", "megappo", "train", *flags(keys), *four]
    subprocess.run(command, cwd=ROOT, check=True, stdin=subprocess.DEVNULL)
    assert metrics(tmp_path / "resumed") == metrics(tmp_path / "four")[3:]
    resumed, straight = weights(tmp_path / "resumed" / "hf"), weights(tmp_path / "four" / "hf")
    assert resumed.keys() == straight.keys()
    assert all(resumed[name].equal(straight[name]) for name in straight)


def test_smollm2_takes_two_steps(tmp_path: Path) -> None:
    """The real model trains at PP=2, is evaluated twice, and answers in transformers."""
    small = {"train.max_steps": 2, "rollout.batch_size": 8, "train.batch_size": 8}
    lines = example("smollm2", tmp_path, *flags(small))
    assert re.fullmatch(r"reward before=\d\.\d\d after=\d\.\d\d", lines[-1]), lines[-1]
    assert any(line.startswith("  after: ") and len(line) > 15 for line in lines)
    rows = metrics(tmp_path)
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows[1:]:
        assert abs(row["train/kl"]) < 1 and row["train/actor_grad_norm"] > 0
    assert abs(rows[1]["train/kl"]) < 1e-4
    assert rows[1]["train/vllm_logprobs_diff"] < 1e-3
