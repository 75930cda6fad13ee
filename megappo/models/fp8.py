"""What is asked of FP8, in Megatron's words, and what of it this machine can do.

Knows neither torch nor Megatron: ``config`` hands it to TransformerEngine, ``fp8_emulation``
carries it out where there is none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megappo.topology import Topology

AMAX_HISTORY_LEN = 16
"""Largest magnitudes that delayed scaling looks back at, per tensor."""
TOKEN_MULTIPLE = 128
"""What TransformerEngine's FP8 products may need the number of tokens to be a multiple of."""


@dataclass(frozen=True)
class Fp8:
    """FP8 arithmetic in the linear layers of the decoder.

    Attributes:
        format: "e4m3" for all operands, or "hybrid": E5M2 for the gradients of outputs.
        recipe: how scales are chosen.
        layers_at_start: layers at the model's start that stay in the parameters' type.
        layers_at_end: the same at its end.
    """

    format: Literal["hybrid", "e4m3"] = "hybrid"
    recipe: Literal["tensorwise", "delayed", "blockwise", "mxfp8"] = "tensorwise"
    layers_at_start: int = 0
    layers_at_end: int = 0

    def covers(self, layer: int, num_layers: int) -> bool:
        """Whether a layer of the model, counted from 0, computes in FP8."""
        return self.layers_at_start <= layer < num_layers - self.layers_at_end

    def check(
        self,
        num_layers: int,
        topology: Topology,
        *,
        recompute: Literal["full", "selective"] | None,
        emulated: bool,
    ) -> None:
        """Refuse what cannot be done with this model here.

        Args:
            num_layers: of the model.
            topology: the mesh.
            recompute: what the backward pass recomputes.
            emulated: whether FP8 is emulated; TransformerEngine does the work otherwise.

        Raises:
            ValueError: with one line that names the key.
        """
        most = num_layers // topology.pp
        for end, count in (("start", self.layers_at_start), ("end", self.layers_at_end)):
            if count > most:
                raise ValueError(
                    f"megatron.num_layers_at_{end}_in_bf16 = {count} is more than the layers of a "
                    f"pipeline stage, {num_layers} / {topology.pp}: give at most {most}"
                )
        if emulated and self.recipe == "mxfp8":
            raise ValueError(
                "megatron.fp8_recipe = mxfp8 needs a GPU that has it (Blackwell) and "
                "TransformerEngine; without them give tensorwise, delayed or blockwise"
            )
        if emulated and self.recipe == "delayed" and recompute == "full":
            raise ValueError(
                "megatron.fp8_recipe = delayed cannot be emulated with "
                "megatron.recompute_granularity = full (the scales of a second forward pass are "
                "not those of the first); give null or selective, or fp8_recipe = tensorwise"
            )
