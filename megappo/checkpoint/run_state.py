"""The driver's part of a checkpoint: one JSON file of plain numbers and names.

Everything that the ranks do not hold and that the rest of the run depends on. Floats are
written so that they read back bit-equal.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RUN_STATE = "run_state.json"


@dataclass(frozen=True)
class RunState:
    """Where a run stands after a whole number of steps.

    Attributes:
        step: steps done (rollout, update and sync).
        consumed_samples: prompts consumed, over all episodes.
        kl_coef: coefficient of the KL penalty for the next step.
        reward_moments: what each reward model's scores are normalised by.
        wandb_run_id: run to continue in W&B, if it was used.
        config: the run's configuration, as plain values.
    """

    step: int
    consumed_samples: int
    kl_coef: float
    reward_moments: list[list[float]]
    wandb_run_id: str | None
    config: dict[str, Any]


def write_run_state(folder: Path, state: RunState) -> None:
    """Write ``folder/run_state.json``."""
    (folder / RUN_STATE).write_text(json.dumps(dataclasses.asdict(state), indent=1) + "\n")


def read_run_state(folder: Path) -> RunState:
    """Read ``folder/run_state.json``.

    Raises:
        ValueError: the file is missing or is not a run state.
    """
    path = folder / RUN_STATE
    try:
        return RunState(**json.loads(path.read_text()))
    except FileNotFoundError as error:
        raise ValueError(f"{folder} is not a checkpoint: it has no {RUN_STATE}") from error
    except (json.JSONDecodeError, TypeError) as error:
        raise ValueError(f"{path} is not a run state: {error}") from error
