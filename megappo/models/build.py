"""Builds this rank's part of a model: a GPTModel with a language-model head or a value head.

Needs ``parallel.initialize``. Weights are uninitialised memory (norms and a fresh value head
aside) until an import writes them.
"""

from __future__ import annotations

from typing import Literal

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megappo.device.platform import Implementation, device, layer_implementation
from megappo.models.config import Recompute, transformer_config
from megappo.models.fp8 import Fp8
from megappo.models.fp8_emulation import emulate_fp8
from megappo.models.heads import ValueHead
from megappo.models.rotary import PackedRotary, inverse_frequencies
from megappo.models.spec import LAYER_SPECS
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
    fp8: Fp8 | None = None,
    implementation: Implementation | None = None,
) -> list[GPTModel]:
    """Build the model chunks of this rank, ``topology.vpp`` of them.

    Args:
        shape: the model.
        topology: the mesh that ``parallel.initialize`` was given.
        head: "lm" for logits, "value" for one float per token (never tied).
        dtype: parameters and activations; a value head computes in float32 all the same.
        sequence_parallel: see ``transformer_config``.
        recompute: see ``transformer_config``.
        seed: of a fresh value head.
        fp8: what is computed in FP8: by TransformerEngine, or emulated in plain layers.
        implementation: whose layers; TransformerEngine's where they can be, if None.

    Raises:
        ValueError: when the mesh cannot cut the model evenly, or needs sequence parallelism;
            when FP8 is asked for what cannot be done here, or layers that cannot be had.
    """
    check_divisible(shape, topology)
    made_of = layer_implementation(implementation)
    emulated = made_of == "local"
    if fp8 is not None:
        fp8.check(shape.num_layers, topology, recompute=recompute, emulated=emulated)
    config = transformer_config(
        shape,
        topology,
        dtype=dtype,
        sequence_parallel=sequence_parallel,
        recompute=recompute,
        fp8=None if emulated else fp8,
    )
    chunks = []
    for chunk in range(topology.vpp):
        spec = LAYER_SPECS[made_of](config, chunk if topology.vpp > 1 else None)
        model = _chunk(shape, topology, config, spec, chunk, tied=shape.tied and head == "lm")
        if head == "value" and model.post_process:
            model.output_layer = ValueHead(config, seed)
        _reduce_experts_apart(model)
        chunks.append(model.to(device()))
        if fp8 is not None and emulated:
            emulate_fp8(model, fp8)
    return chunks


def _chunk(
    shape: ModelShape,
    topology: Topology,
    config: TransformerConfig,
    spec: TransformerBlockSubmodules,
    chunk: int,
    *,
    tied: bool,
) -> GPTModel:
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=padded_vocab_size(shape, topology.tp),
        max_sequence_length=shape.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage() and chunk == 0,
        post_process=parallel_state.is_pipeline_last_stage() and chunk == topology.vpp - 1,
        parallel_output=True,
        share_embeddings_and_output_weights=tied,
        position_embedding_type="rope",
        vp_stage=chunk if topology.vpp > 1 else None,
    )
    model.rotary_pos_emb = PackedRotary(inverse_frequencies(shape), device())
    return model


def _reduce_experts_apart(model: GPTModel) -> None:
    """Mark the experts' weights, so that their gradients are summed over all that hold them.

    Megatron does so itself, but only where experts are spread over ranks. Where they are not,
    it takes them for dense weights, and leaves out the other tensor ranks, each of which has
    seen its own part of the sequence.
    """
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            vars(parameter).update(allreduce=False)
