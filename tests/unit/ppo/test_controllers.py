"""KL controllers: the numbers of case C43, bounds, state, and refused settings."""

from __future__ import annotations

import json
import math

import pytest

from megappo.ppo.controllers import (
    AdaptiveKLController,
    FixedKLController,
    make_kl_controller,
)


def test_c43_update_and_resume() -> None:
    """C43: the coefficient after one update survives a round trip through JSON."""
    controller = AdaptiveKLController(0.2, target=6, horizon=10000)
    controller.update(kl=12, num_samples=256)
    assert controller.value == pytest.approx(0.201024, abs=1e-12)
    resumed = AdaptiveKLController(0.2, target=6, horizon=10000)
    resumed.load_state_dict(json.loads(json.dumps(controller.state_dict())))
    assert resumed.value == controller.value
    controller.update(3.0, 512)
    resumed.update(3.0, 512)
    assert resumed.value == controller.value


@pytest.mark.parametrize(
    ("kl", "num_samples", "factor"),
    [
        (6.0, 256, 1.0),
        (6.6, 1000, 1 + 0.1 * 0.1),
        (5.4, 1000, 1 - 0.1 * 0.1),
        (-3.0, 256, 1 - 0.2 * 0.0256),
        (1e30, 256, 1 + 0.2 * 0.0256),
        (0.0, 10**6, 0.8),
    ],
)
def test_c43_varied(kl: float, num_samples: int, factor: float) -> None:
    """C43 varied: on target, above, below, negative, huge, and more samples than the horizon."""
    controller = AdaptiveKLController(0.2, target=6, horizon=10000)
    controller.update(kl, num_samples)
    assert controller.value == pytest.approx(0.2 * factor, rel=1e-9)


@pytest.mark.parametrize(
    ("target", "horizon", "key"),
    [
        (6, 0, "algo.kl.horizon is 0"),
        (0, 10000, "algo.kl.target is 0"),
        (-1, 10000, "algo.kl.target is -1"),
        (6, -5, "algo.kl.horizon is -5"),
        (math.nan, 10000, "algo.kl.target is nan"),
    ],
)
def test_c43_target_and_horizon_must_be_positive(target: float, horizon: float, key: str) -> None:
    """C43: a zero that would be divided by is refused at the start, by name."""
    with pytest.raises(ValueError, match=key):
        AdaptiveKLController(0.2, target, horizon)


def test_fixed_controller_keeps_the_configured_coefficient() -> None:
    """Updates and a checkpoint of another coefficient change nothing."""
    controller = FixedKLController(0.05)
    controller.update(100.0, 256)
    controller.load_state_dict({"kl_coef": 0.9})
    assert controller.value == 0.05
    assert controller.state_dict() == {"kl_coef": 0.05}


@pytest.mark.parametrize("coef", [-0.1, math.inf, math.nan])
def test_coefficient_out_of_range_is_refused(coef: float) -> None:
    """Neither controller starts from, or resumes with, a negative or infinite coefficient."""
    for target in (None, 6.0):
        with pytest.raises(ValueError, match=r"algo\.kl\.init_coef"):
            make_kl_controller(coef, target, 10000)
    with pytest.raises(ValueError, match=r"algo\.kl\.init_coef"):
        AdaptiveKLController(0.2, 6, 10000).load_state_dict({"kl_coef": coef})


@pytest.mark.parametrize("kl", [math.nan, math.inf])
def test_a_kl_that_is_not_finite_is_refused(kl: float) -> None:
    """A broken step does not poison the coefficient."""
    controller = AdaptiveKLController(0.2, 6, 10000)
    with pytest.raises(ValueError, match="the KL of this step"):
        controller.update(kl, 256)
    assert controller.value == 0.2


def test_factory_chooses_by_target() -> None:
    """A target makes the controller adaptive."""
    assert isinstance(make_kl_controller(0.1, None, 0), FixedKLController)
    assert isinstance(make_kl_controller(0.1, 6.0, 10000), AdaptiveKLController)
