"""Where a run goes on from: the checkpoint that ``ckpt.load_enable`` asks for.

Read and checked in the driver before any rank starts; what the ranks hold in it is theirs to
load.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megappo.checkpoint.run_state import RunState, read_run_state
from megappo.checkpoint.store import CheckpointStore
from megappo.config.schema import Config
from megappo.trainer.inputs import load_inputs, needs_critic


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint that fits the configuration: its folder and the driver's part of it."""

    folder: Path
    state: RunState


def checkpoint_store(args: Config) -> CheckpointStore:
    """The run's checkpoints: ``ckpt.path``, or ``checkpoints`` under ``output_dir``."""
    root = Path(args.ckpt.path) if args.ckpt.path else Path(args.output_dir) / "checkpoints"
    return CheckpointStore(root.resolve(), args.ckpt.max_num)


def resume_point(args: Config) -> ResumePoint | None:
    """The checkpoint to resume from; None when none is asked for, or there is none yet.

    Raises:
        ValueError: the checkpoint is not whole, or is one of a longer or another run.
    """
    folder = checkpoint_store(args).latest() if args.ckpt.load_enable else None
    if folder is None:
        return None
    state = read_run_state(folder)
    for role in ("actor", "critic") if needs_critic(args) else ("actor",):
        if not (folder / role).is_dir():
            raise ValueError(
                f"ckpt.load_enable: {folder} holds no {role}, which this run trains; set it to "
                "false to start anew"
            )
    prompts = len(load_inputs(args).prompts)
    if state.consumed_samples > prompts * args.train.num_episodes:
        raise ValueError(
            f"ckpt.load_enable: {folder} has used {state.consumed_samples} prompts, but this run "
            f"has {prompts * args.train.num_episodes} ({prompts} in data.prompt_dataset x "
            f"train.num_episodes = {args.train.num_episodes}); raise train.num_episodes, or set "
            "ckpt.load_enable to false"
        )
    return ResumePoint(folder, state)


def changed_keys(state: RunState, args: Config) -> list[str]:
    """Dotted names of the keys of the algorithm that differ from the saved run's."""
    now = json.loads(json.dumps(dataclasses.asdict(args)))  # tuples as the checkpoint has them
    sections = ("actor", "critic", "reward", "rollout", "algo", "train", "data")
    return [
        name
        for section in sections
        for name in _differing(section, state.config.get(section), now[section])
    ]


def _differing(name: str, saved: Any, now: Any) -> list[str]:
    if isinstance(saved, dict) and isinstance(now, dict):
        keys = [*now, *(key for key in saved if key not in now)]
        return [
            d for key in keys for d in _differing(f"{name}.{key}", saved.get(key), now.get(key))
        ]
    return [] if saved == now else [name]
