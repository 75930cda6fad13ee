"""From the configuration's keys to what the models are told of FP8."""

from __future__ import annotations

from megappo.config.schema import MegatronConfig
from megappo.models.fp8 import Fp8


def fp8_settings(mesh: MegatronConfig) -> Fp8 | None:
    """What is computed in FP8; None if nothing is."""
    if mesh.fp8 is None:
        return None
    kept = mesh.first_last_layers_bf16
    return Fp8(
        mesh.fp8,
        mesh.fp8_recipe,
        mesh.num_layers_at_start_in_bf16 if kept else 0,
        mesh.num_layers_at_end_in_bf16 if kept else 0,
    )
