"""Every family's config.json: known models are read right, what a table cannot hold is refused.

The oracle is the number of parameters that the published models have.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest

from megappo.topology import Topology
from megappo.weights.canonical import canonical_tensors
from megappo.weights.families import FAMILIES, shape_from_config
from megappo.weights.layout import Layout
from megappo.weights.megatron import megatron_layout
from megappo.weights.vllm import vllm_layout

LLAMA_3_1_8B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "tie_word_embeddings": False,
}
LLAMA_3_2_1B = LLAMA_3_1_8B | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
SMOLLM2_135M: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
MISTRAL_7B: dict[str, Any] = {
    "model_type": "mistral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "vocab_size": 32000,
}
QWEN2_5_05B: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_window_layers": 21,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rope_theta": 1e6,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_06B: dict[str, Any] = {
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_window_layers": 28,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rope_scaling": None,
    "rope_theta": 1e6,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
MIXTRAL_8X7B: dict[str, Any] = MISTRAL_7B | {
    "model_type": "mixtral",
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rope_theta": 1e6,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
}
QWEN3_30B_A3B: dict[str, Any] = QWEN3_06B | {
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize(
    ("config", "num_parameters"),
    [
        (LLAMA_3_1_8B, 8_030_261_248),
        (LLAMA_3_2_1B, 1_235_814_400),
        (SMOLLM2_135M, 134_515_008),
        (MISTRAL_7B, 7_241_732_096),
        (QWEN2_5_05B, 494_032_768),
        (QWEN3_06B, 596_049_920),
        (MIXTRAL_8X7B, 46_702_792_704),
        (QWEN3_30B_A3B, 30_532_122_624),
    ],
)
def test_published_models_have_their_number_of_parameters(
    config: dict[str, Any], num_parameters: int
) -> None:
    """A missing or doubled row, or a wrong dimension, changes the sum."""
    tensors = canonical_tensors(shape_from_config(config))
    assert sum(prod(size) for size in tensors.values()) == num_parameters


def test_what_makes_a_family_special() -> None:
    """Bias, norms on heads, windows and experts come from the configuration."""
    assert shape_from_config(QWEN2_5_05B).qkv_bias
    assert shape_from_config(QWEN3_06B).qk_norm
    assert shape_from_config(QWEN3_06B).head_dim == 128 != 1024 // 16
    assert shape_from_config(MISTRAL_7B).sliding_window == 4096
    without = {k: v for k, v in MISTRAL_7B.items() if k != "sliding_window"}
    assert shape_from_config(without).sliding_window == 4096  # transformers' default
    assert shape_from_config(MISTRAL_7B | {"sliding_window": None}).sliding_window is None
    mixtral = shape_from_config(MIXTRAL_8X7B)
    assert (mixtral.num_experts, mixtral.experts_per_token, mixtral.renormalized) == (8, 2, True)
    qwen = shape_from_config(QWEN3_30B_A3B)
    assert (qwen.num_experts, qwen.experts_per_token, qwen.ffn_hidden_size) == (128, 8, 768)
    assert qwen.renormalized
    assert not shape_from_config(QWEN3_30B_A3B | {"norm_topk_prob": False}).renormalized
    renamed = {k: v for k, v in QWEN3_30B_A3B.items() if k != "num_experts"}
    assert shape_from_config(renamed | {"num_local_experts": 128}) == qwen


@pytest.mark.parametrize(
    ("config", "fields", "words"),
    [
        (MISTRAL_7B, {"sliding_window": 0}, "sliding_window must be a positive integer, found 0"),
        (MISTRAL_7B, {"sliding_window": "all"}, "sliding_window must be .* found 'all'"),
        (MISTRAL_7B, {"layer_types": ["full_attention"]}, "does not know .* layer_types"),
        (MISTRAL_7B, {"attention_bias": True}, "does not know .* attention_bias = True"),
        (QWEN2_5_05B, {"use_sliding_window": True}, "use_sliding_window = True is not supported"),
        (QWEN2_5_05B, {"layer_types": ["sliding_attention"] * 24}, "layer_types = .*only 'full_"),
        (QWEN2_5_05B, {"use_mrope": True}, "use_mrope = True is not supported"),
        (QWEN2_5_05B, {"layer_types": 3}, "layer_types = 3"),
        (QWEN2_5_05B, {"hidden_act": "gelu_new"}, "hidden_act = 'gelu_new'"),
        (QWEN3_06B, {"attention_bias": True}, "attention_bias = True is not supported"),
        (QWEN3_06B, {"use_sliding_window": True}, "use_sliding_window = True is not supported"),
        (QWEN3_06B, {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type = 'yarn'"),
        (QWEN3_06B, {"qk_norm": False}, "does not know .* qk_norm = False"),
        (
            MIXTRAL_8X7B,
            {"num_experts_per_tok": 9},
            "= 9 is more than the 8 experts",
        ),
        (MIXTRAL_8X7B, {"num_experts_per_tok": 1}, "num_experts_per_tok = 1 .* no gradient"),
        (
            QWEN3_30B_A3B,
            {"num_experts_per_tok": 1, "norm_topk_prob": True},
            "num_experts_per_tok = 1 .* no gradient",
        ),
        (MIXTRAL_8X7B, {"num_local_experts": None}, "num_experts .* must be one number"),
        (MIXTRAL_8X7B, {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1 is not supported"),
        (MIXTRAL_8X7B, {"num_experts": 16}, "num_experts .* must be one number"),
        (QWEN3_30B_A3B, {"decoder_sparse_step": 2}, "decoder_sparse_step = 2 is not supported"),
        (QWEN3_30B_A3B, {"mlp_only_layers": [0]}, r"mlp_only_layers = \[0\] is not supported"),
        (QWEN3_30B_A3B, {"n_shared_experts": 1}, "does not know .* n_shared_experts = 1"),
        (QWEN3_30B_A3B, {"moe_intermediate_size": None}, "moe_intermediate_size must be"),
        (LLAMA_3_1_8B, {"model_type": "gemma3_text"}, "model_type = 'gemma3_text' .* only llama"),
        (LLAMA_3_1_8B, {"model_type": "deepseek_v3"}, "model_type = 'deepseek_v3'"),
        (LLAMA_3_1_8B, {"model_type": None}, "model_type = None is not supported"),
    ],
)
def test_what_a_family_cannot_express_is_refused(
    config: dict[str, Any], fields: dict[str, Any], words: str
) -> None:
    """C11's kind: one line that names the field, before a weight is read."""
    with pytest.raises(ValueError, match=words) as error:
        shape_from_config(config | fields, where="m/config.json")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("config", [MIXTRAL_8X7B, QWEN3_30B_A3B])
@pytest.mark.parametrize("ep", [2, 4])
def test_no_expert_is_lost(config: dict[str, Any], ep: int) -> None:
    """C6: every expert is on some rank of the mesh and in every engine, under its own name."""
    shape = shape_from_config(config | {"num_hidden_layers": 1})
    expected = {n for n in canonical_tensors(shape) if ".experts." in n}
    assert len(expected) == 3 * shape.num_experts
    mesh = megatron_layout(shape, Topology(2 * ep, 2, 1, ep=ep))
    for layout, share in ((mesh, shape.num_experts // ep), (vllm_layout(shape, 2, 2), None)):
        assert held_experts(layout) >= expected
        if share is not None:
            for rank in range(layout.world_size):
                local = [n for n in layout.local_shapes(rank) if "linear_fc1" in n]
                assert len(local) == share


def test_expert_parallelism_does_not_concern_a_dense_model() -> None:
    """Its layout is the same whatever the mesh's expert parallel size."""
    shape = shape_from_config(QWEN3_06B)
    plain, spread = (megatron_layout(shape, Topology(4, 2, ep=ep)) for ep in (1, 2))
    for rank in range(4):
        assert plain.local_shapes(rank) == spread.local_shapes(rank)
    assert np.array_equal(plain.local_rank, spread.local_rank)
    assert np.array_equal(plain.box_local_start, spread.box_local_start)


def held_experts(layout: Layout) -> set[str]:
    """Canonical names that some piece of the layout holds."""
    return {layout.canonical_names[i] for i in layout.piece_canonical}


@pytest.mark.parametrize(
    ("config", "topology", "words"),
    [
        (MIXTRAL_8X7B, {"world_size": 3, "ep": 3}, "size = 3 .* number of experts = 8"),
        (QWEN3_30B_A3B, {"world_size": 12, "ep": 12}, "size = 12 .* number of experts = 128"),
        (QWEN2_5_05B, {"world_size": 4, "tp": 4}, "size = 4 .* num_attention_heads = 14"),
        (MISTRAL_7B, {"world_size": 8, "pp": 8, "vpp": 5}, "8 x 5 is more than .* = 32"),
    ],
)
def test_meshes_that_cannot_hold_the_model(
    config: dict[str, Any], topology: dict[str, int], words: str
) -> None:
    """C8: both numbers and the key, before a weight is read."""
    with pytest.raises(ValueError, match=words):
        megatron_layout(shape_from_config(config), Topology(**topology))


def test_a_family_file_is_short() -> None:
    """Adding a dense family takes under 80 lines in one file."""
    for name in ("llama", "mistral", "qwen2", "qwen3"):
        source = FAMILIES[name].translate.__code__.co_filename
        with open(source, encoding="utf-8") as file:
            assert len(file.readlines()) < 80, source
