"""Builds the groups by hand and calls ``PPOTrainer.fit``, without ``megappo train``.

``python -m examples.build_groups --config examples/quickstart/ppo.yaml [--KEY VALUE ...]``,
after the quickstart has made its files. ``docs/contract.md`` explains each argument.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from megappo.config import check, load
from megappo.runtime.ray import RayRuntime
from megappo.trainer import PPOTrainer
from megappo.trainer.settings import host_settings, ray_settings


def main(argv: Sequence[str]) -> dict[str, float]:
    """Trains as the configuration says; returns the metrics of the last step."""
    args = load(argv)
    check(args)
    log_dir = Path(args.output_dir) / "logs"
    runtime = RayRuntime(host_settings(args), ray_settings(args), log_dir)
    try:
        runtime.start()
        trainer = PPOTrainer(
            actor_model_group=runtime.role_group("actor"),
            critic_model_group=runtime.role_group("critic"),
            reward_model_group=None,
            ref_model_group=runtime.role_group("ref"),
            vllm_engines=runtime.engine_group(),
            strategy=runtime,
            args=args,
        )
        return trainer.fit(args)
    finally:
        runtime.shutdown()


if __name__ == "__main__":
    print(f"reward of the last step: {main(sys.argv[1:])['train/reward']:.3f}")
