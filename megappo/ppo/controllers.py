"""The weight of the KL penalty from step to step: fixed, or steered towards a target.

A controller holds one number, ``value``. The driver owns it, calls ``update`` once per step
with that step's mean KL, and keeps ``state_dict`` in the checkpoint. It does not know how the
KL was estimated.
"""

from __future__ import annotations

import math

# The relative error is bounded, so that one odd step moves the coefficient by 20 % at most.
MAX_RELATIVE_ERROR = 0.2


class FixedKLController:
    """A constant coefficient."""

    def __init__(self, init_coef: float) -> None:
        """Hold ``init_coef``, at least 0.

        Raises:
            ValueError: The coefficient is negative or not finite.
        """
        self.value = _checked_coef(init_coef)

    def update(self, kl: float, num_samples: int) -> None:
        """Change nothing."""

    def state_dict(self) -> dict[str, float]:
        """The state to keep in a checkpoint."""
        return {"kl_coef": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Keep the coefficient of the configuration: a fixed one has no state of its own."""


class AdaptiveKLController:
    """A coefficient that grows while the KL is above its target and shrinks below it.

    ``value *= 1 + clip(kl / target - 1, ±0.2) * num_samples / horizon``
    (Ziegler et al. 2019, section 2.2). A step of more samples than the horizon counts as the
    horizon, so that the coefficient cannot become negative.
    """

    def __init__(self, init_coef: float, target: float, horizon: float) -> None:
        """Start a controller.

        Args:
            init_coef: The coefficient at the start, at least 0.
            target: The KL to hold, above 0.
            horizon: Samples over which the coefficient reacts, above 0.

        Raises:
            ValueError: A number is out of range.
        """
        for key, number in (("algo.kl.target", target), ("algo.kl.horizon", horizon)):
            if not (math.isfinite(number) and number > 0):
                raise ValueError(f"{key} is {number}; the adaptive KL controller needs it above 0")
        self.value = _checked_coef(init_coef)
        self.target = float(target)
        self.horizon = float(horizon)

    def update(self, kl: float, num_samples: int) -> None:
        """Move the coefficient after a step.

        Args:
            kl: Mean KL of the step, by the estimator of the rewards.
            num_samples: Samples in the step.

        Raises:
            ValueError: The KL is not finite.
        """
        if not math.isfinite(kl):
            raise ValueError(
                f"the KL of this step is {kl}; the adaptive KL controller cannot use it"
            )
        bound = MAX_RELATIVE_ERROR
        error = min(max(kl / self.target - 1, -bound), bound)
        self.value *= 1 + error * min(num_samples / self.horizon, 1.0)

    def state_dict(self) -> dict[str, float]:
        """The state to keep in a checkpoint."""
        return {"kl_coef": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Take up the coefficient of a checkpoint.

        Raises:
            ValueError: The coefficient is negative or not finite.
        """
        self.value = _checked_coef(state["kl_coef"])


KLController = FixedKLController | AdaptiveKLController


def make_kl_controller(init_coef: float, target: float | None, horizon: float) -> KLController:
    """The controller that the configuration asks for: adaptive if there is a target.

    Raises:
        ValueError: A number is out of range.
    """
    if target is None:
        return FixedKLController(init_coef)
    return AdaptiveKLController(init_coef, target, horizon)


def _checked_coef(coef: float) -> float:
    if not (math.isfinite(coef) and coef >= 0):
        raise ValueError(f"the KL coefficient (algo.kl.init_coef) is {coef}; it must be at least 0")
    return float(coef)
