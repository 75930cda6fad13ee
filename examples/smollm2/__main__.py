"""Trains SmolLM2-135M-Instruct with PPO to give short, finished answers.

``python -m examples.smollm2 [--output_dir DIR] [--seed N] [--KEY VALUE ...]``, from the
repository's root; further keys override those of ``ppo.yaml``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from examples.outcome import first_and_last, greedy_responses
from examples.smollm2.model import ModelUnavailableError, fetch
from megappo.cli import main as megappo

CONFIG = Path(__file__).with_name("ppo.yaml")
MODEL = Path("runs/smollm2/model")
INSTRUCTION = "Answer in two sentences."  # as in prompts.jsonl
QUESTION = "Why do people like to visit Italy?"  # not in prompts.jsonl


def main(argv: Sequence[str]) -> int:
    """Runs the example; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.smollm2",
        description="Train SmolLM2-135M-Instruct with PPO on two processes.",
        epilog="Further --KEY VALUE pairs override examples/smollm2/ppo.yaml.",
        allow_abbrev=False,
    )
    parser.add_argument("--output_dir", type=Path, default=Path("runs/smollm2"))
    parser.add_argument("--seed", type=int, default=42)
    options, overrides = parser.parse_known_args(argv)

    disable_progress_bar()
    try:
        model = fetch(MODEL)
    except ModelUnavailableError as error:
        print(f"examples.smollm2: error: {error}", file=sys.stderr)
        return 1
    keys = {
        "output_dir": options.output_dir,
        "train.seed": options.seed,
        "actor.model_name_or_path": model,
    }
    arguments = [f"--{key}={value}" for key, value in keys.items()]
    exit_code = megappo(["train", "--config", str(CONFIG), *arguments, *overrides])
    if exit_code:
        return exit_code

    trained = options.output_dir / "hf"
    print(f"Answers of transformers to {QUESTION!r}")
    for name, folder in (("before", model), ("after", trained)):
        [answer] = greedy_responses(folder, [QUESTION], max_new_tokens=64, instruction=INSTRUCTION)
        print(f"  {name}: {answer!r}")
    print(f"The trained policy is in {trained}")
    before, after = first_and_last(options.output_dir, "eval/reward_mean")
    print(f"reward before={before:.2f} after={after:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
