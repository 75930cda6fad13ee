"""The same conversion by mbridge (0.15), where it is installed, for a figure to compare with.

mbridge expects CUDA and TransformerEngine. What it is given instead, as it has no option for it:
plain torch layers with their names of the norms, and the rotary base where transformers keeps
it now. It converts into a live Megatron model and from it; no distributed checkpoint is written.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from checkpoint_tools.process import mesh, one_thread
from megappo.models.spec import local_spec

_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


def available() -> bool:
    """Whether mbridge can be imported."""
    return importlib.util.find_spec("mbridge") is not None


def load_and_save(source: Path, target: Path, dtype: torch.dtype) -> None:
    """Hugging Face folder to a Megatron model in memory, and from there to another folder."""
    with mesh(), one_thread():
        bridge = _bridge(source, dtype)
        model = bridge.get_model(weight_path=str(source), bf16=dtype == torch.bfloat16)
        bridge.save_weights(model, str(target))


def _bridge(source: Path, dtype: torch.dtype) -> Any:
    llama: Any = importlib.import_module("mbridge.models.llama").LLaMABridge
    config: Any = AutoConfig.from_pretrained(source)
    config.rope_theta = config.rope_parameters["rope_theta"]
    bridge = llama(config, dtype=dtype)
    bridge.set_extra_args(
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        use_cpu_initialization=True,
        perform_initialization=False,
    )
    names_in_files = bridge._weight_name_mapping_mcore_to_hf
    bridge._weight_name_mapping_mcore_to_hf = lambda name: names_in_files(_their_name(name))
    bridge._get_transformer_layer_spec = lambda vp_stage=None: local_spec(bridge.config)
    return bridge


def _their_name(name: str) -> str:
    for theirs, ours in _NORMS.items():
        name = name.replace(ours, theirs)
    return name
