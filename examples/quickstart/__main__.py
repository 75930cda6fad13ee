"""The quickstart: prepare, train with PPO, check the result with plain transformers.

``python -m examples.quickstart [--output_dir DIR] [--seed N] [--KEY VALUE ...]``, from the
repository's root; further keys override those of ``ppo.yaml``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from examples.outcome import first_and_last, greedy_responses
from examples.quickstart.prepare import ANSWER_DIGITS, prepare
from megappo.cli import main as megappo

CONFIG = Path(__file__).with_name("ppo.yaml")
ASSETS = Path("runs/quickstart/assets")
DEFAULT_SEED = 42


def main(argv: Sequence[str]) -> int:
    """Runs the example; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.quickstart",
        description="Train a small policy to add, with PPO on two processes.",
        epilog="Further --KEY VALUE pairs override examples/quickstart/ppo.yaml.",
        allow_abbrev=False,
    )
    parser.add_argument("--output_dir", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--seed", type=int, default=DEFAULT_SEED, help="of the policy and of PPO")
    options, overrides = parser.parse_known_args(argv)

    disable_progress_bar()
    assets = prepare(ASSETS / f"seed{options.seed}", options.seed)
    keys = {
        "output_dir": options.output_dir,
        "train.seed": options.seed,
        "actor.model_name_or_path": assets.policy,
        "data.prompt_dataset": assets.train,
        "eval.dataset": assets.eval,
    }
    arguments = [f"--{key}={value}" for key, value in keys.items()]
    exit_code = megappo(["train", "--config", str(CONFIG), *arguments, *overrides])
    if exit_code:
        return exit_code

    before, after = first_and_last(options.output_dir, "eval/accuracy")
    in_transformers = accuracy(options.output_dir / "hf", assets.eval)
    print(f"The trained policy is in {options.output_dir / 'hf'}")
    print(f"accuracy before={before:.2f} after={after:.2f} transformers={in_transformers:.2f}")
    return 0


def accuracy(policy: Path, problems: Path) -> float:
    """Share of the problems that the policy gets right in plain transformers, greedily."""
    rows = [json.loads(line) for line in problems.read_text().splitlines()]
    prompts = [row["input"] for row in rows]
    answers = greedy_responses(policy, prompts, max_new_tokens=ANSWER_DIGITS + 1)
    right: list[bool] = [answer == row["label"] for answer, row in zip(answers, rows, strict=True)]
    return sum(right) / len(right)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
