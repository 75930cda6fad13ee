"""Builds this rank's part of a model: a GPTModel with a language-model head or a value head.

Needs ``parallel.initialize``. Weights are uninitialised memory (norms and a fresh value head
aside) until an import writes them.
"""

from __future__ import annotations

from typing import Literal

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

from megappo.device.platform import device
from megappo.models.config import Recompute, transformer_config
from megappo.models.heads import ValueHead
from megappo.models.rotary import PackedRotary, inverse_frequencies
from megappo.models.spec import layer_spec
from megappo.topology import Topology
from megappo.weights.megatron import check_divisible, padded_vocab_size
from megappo.weights.shape import ModelShape

Head = Literal["lm", "value"]


def build_model(
    shape: ModelShape,
    topology: Topology,
    *,
    head: Head,
    dtype: torch.dtype,
    sequence_parallel: bool,
    recompute: Recompute | None,
    seed: int = 0,
) -> list[GPTModel]:
    """Build the model chunks of this rank, one for now.

    Args:
        shape: the model.
        topology: the mesh that ``parallel.initialize`` was given.
        head: "lm" for logits, "value" for one float per token (never tied).
        dtype: parameters and activations; a value head is always float32.
        sequence_parallel: see ``transformer_config``.
        recompute: see ``transformer_config``.
        seed: of a fresh value head.

    Raises:
        ValueError: when the mesh cannot cut the model evenly.
    """
    check_divisible(shape, topology)
    config = transformer_config(
        shape,
        topology,
        dtype=dtype,
        sequence_parallel=sequence_parallel,
        recompute=recompute,
    )
    last = parallel_state.is_pipeline_last_stage()
    model = GPTModel(
        config=config,
        transformer_layer_spec=layer_spec(config),
        vocab_size=padded_vocab_size(shape, topology.tp),
        max_sequence_length=shape.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=last,
        parallel_output=True,
        share_embeddings_and_output_weights=shape.tied and head == "lm",
        position_embedding_type="rope",
    )
    model.rotary_pos_emb = PackedRotary(inverse_frequencies(shape), device())
    if head == "value" and last:
        model.output_layer = ValueHead(config, seed)
    return [model.to(device())]
