"""FP8's keys: what they make of a rank, and what of them is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megappo.config import ConfigError, check, load
from megappo.config.schema import Config
from megappo.models.fp8 import Fp8
from megappo.trainer.inputs import load_inputs
from megappo.trainer.settings import host_settings
from tests.e2e.runs import flags, make_inputs


def args_of(folder: Path, **mesh: Any) -> Config:
    """A configuration with some keys of the mesh changed."""
    make_inputs(folder)
    keys = {f"megatron.{name}": value for name, value in mesh.items()}
    argv = ["--config", str(folder / "ppo.yaml"), "--output_dir", str(folder / "out")]
    return load([*argv, *flags(keys)])


@pytest.mark.parametrize(
    ("mesh", "expected"),
    [
        ({}, None),
        ({"fp8": "hybrid"}, Fp8("hybrid", "tensorwise", 0, 0)),
        ({"fp8": "e4m3", "fp8_recipe": "delayed"}, Fp8("e4m3", "delayed", 0, 0)),
        (
            {"fp8": "hybrid", "fp8_recipe": "blockwise", "first_last_layers_bf16": True},
            Fp8("hybrid", "blockwise", 1, 1),
        ),
        (
            {
                "fp8": "hybrid",
                "first_last_layers_bf16": True,
                "num_layers_at_start_in_bf16": 0,
                "num_layers_at_end_in_bf16": 2,
            },
            Fp8("hybrid", "tensorwise", 0, 2),
        ),
    ],
)
def test_the_keys_reach_the_ranks(
    tmp_path: Path, mesh: dict[str, Any], expected: Fp8 | None
) -> None:
    """Nothing is in FP8 unless asked for; layers are kept only where the switch says so."""
    args = args_of(tmp_path, **mesh)
    check(args)
    load_inputs(args)
    assert host_settings(args).mesh.fp8 == expected


@pytest.mark.parametrize(
    ("mesh", "expected"),
    [
        ({"fp8_recipe": "delayed"}, "megatron.fp8_recipe = 'delayed': needs megatron.fp8"),
        (
            {"first_last_layers_bf16": True},
            "megatron.first_last_layers_bf16 = True: needs megatron.fp8",
        ),
        (
            {"fp8": "hybrid", "num_layers_at_start_in_bf16": 2},
            "megatron.num_layers_at_start_in_bf16 = 2: needs megatron.first_last_layers_bf16",
        ),
        (
            {"fp8": "hybrid", "num_layers_at_end_in_bf16": 0},
            "megatron.num_layers_at_end_in_bf16 = 0: needs megatron.first_last_layers_bf16",
        ),
        (
            {"fp8": "hybrid", "fp8_recipe": "delayed", "first_last_layers_bf16": True},
            "megatron.first_last_layers_bf16 = True: Megatron cannot with megatron.fp8_recipe",
        ),
        ({"fp8": "e5m2"}, "megatron.fp8"),
        ({"fp8": "hybrid", "fp8_recipe": "rowwise"}, "megatron.fp8_recipe"),
    ],
)
def test_combinations_that_mean_nothing(
    tmp_path: Path, mesh: dict[str, Any], expected: str
) -> None:
    """Refused in one line, before any file is read."""
    with pytest.raises(ConfigError) as error:
        check(args_of(tmp_path, **mesh))
    assert expected in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("mesh", "expected"),
    [
        ({"fp8_recipe": "mxfp8"}, "actor: megatron.fp8_recipe = mxfp8 needs a GPU"),
        (
            {"fp8_recipe": "delayed", "recompute_granularity": "full"},
            "megatron.recompute_granularity = full",
        ),
        (
            {"first_last_layers_bf16": True, "num_layers_at_end_in_bf16": 3},
            "megatron.num_layers_at_end_in_bf16 = 3 is more than",
        ),
    ],
)
def test_what_this_machine_or_model_cannot(
    tmp_path: Path, mesh: dict[str, Any], expected: str
) -> None:
    """Refused by the driver, before any rank starts."""
    args = args_of(tmp_path, fp8="hybrid", **mesh)
    check(args)
    with pytest.raises(ValueError) as error:
        load_inputs(args)
    assert expected in str(error.value) and "\n" not in str(error.value)
