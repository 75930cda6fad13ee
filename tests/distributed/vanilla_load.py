"""Loads a distributed checkpoint with Megatron-Core alone; ``vanilla_megatron`` starts it.

Forks gloo ranks, builds plain ``GPTModel``s of Megatron-Core's own layers, loads by
``dist_checkpointing.load`` and saves every rank's parameters; on one rank, given tokens, the
logits too.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer import TransformerConfig
from torch.nn import functional


def build(settings: dict[str, Any]) -> Any:
    """This rank's part of the model, as anybody who uses Megatron-Core would build it."""
    config = TransformerConfig(
        tensor_model_parallel_size=settings["tp"],
        pipeline_model_parallel_size=settings["pp"],
        expert_model_parallel_size=settings["ep"],
        expert_tensor_parallel_size=1,
        pipeline_dtype=torch.float32,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        **settings["config"],
    )
    spec = get_gpt_layer_local_spec(
        normalization="RMSNorm", moe_grouped_gemm=False, **settings["spec"]
    )
    if config.num_moe_experts:
        # Megatron-Core's two specs disagree about this key; the one on GPUs has no other name.
        del spec.submodules.sharded_state_dict_keys_map["pre_mlp_layernorm."]
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        **settings["model"],
    )


def load(rank: int, settings: dict[str, Any]) -> None:
    """One rank: build, load, save what it has."""
    parallel_state.initialize_model_parallel(
        settings["tp"],
        settings["pp"],
        expert_model_parallel_size=settings["ep"],
        expert_tensor_parallel_size=1,
    )
    model = build(settings)
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    state = dist_checkpointing.load(model.sharded_state_dict(), settings["checkpoint"])
    model.load_state_dict(state)
    out = Path(settings["out"])
    torch.save(
        {name: parameter.detach() for name, parameter in model.named_parameters()},
        out / f"rank_{rank}.pt",
    )
    if settings["tokens"]:
        tokens = torch.tensor([settings["tokens"]])
        length = tokens.shape[1]
        # No dropout: nothing is drawn, so no CUDA generator is needed.
        vars(get_cuda_rng_tracker()).update(fork=contextlib.nullcontext)
        mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
        with torch.no_grad():
            logits = model(tokens, torch.arange(length)[None], mask)
        torch.save(logits[0], out / "logits.pt")


def main(settings: dict[str, Any]) -> None:
    """Fork the ranks and wait for them."""
    world_size, children = settings["world_size"], []
    for rank in range(world_size):
        child = os.fork()
        if child == 0:
            meeting = f"file://{settings['out']}/meeting"
            dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world_size)
            load(rank, settings)
            sys.stdout.flush()
            dist.barrier()
            os._exit(0)
        children.append(child)
    failed = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert not any(failed), failed


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
