"""The dimensions and options of a model, as read from its Hugging Face configuration.

``ModelShape`` says everything that layouts and model building need to know of a checkpoint;
it knows no tensor names (``families/`` does) and nothing of Megatron.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelShape:
    """One decoder-only model.

    Attributes:
        family: Key of the family table, the configuration's ``model_type``.
        num_layers: Decoder layers.
        hidden_size: Width of the residual stream.
        ffn_hidden_size: Width of the gated MLP; of one expert's, where there are experts.
        num_heads: Query heads.
        num_kv_heads: Key/value heads; divides ``num_heads``.
        head_dim: Width of one head; need not be ``hidden_size / num_heads``.
        vocab_size: Rows of the embedding in the checkpoint, without padding.
        tied: Whether the output head is the embedding.
        norm_eps: Epsilon of every RMSNorm.
        rope_theta: Base of the rotary embedding.
        rope_scaling: None, or ``{"rope_type": "linear", "factor"}``, or ``{"rope_type":
            "llama3", "factor", "low_freq_factor", "high_freq_factor",
            "original_max_position_embeddings"}``.
        max_position_embeddings: Longest sequence of the checkpoint.
        value_head: Whether the checkpoint has a scalar head ``score.weight`` [1, hidden_size].
        qkv_bias: Whether queries, keys and values have a bias.
        qk_norm: Whether an RMSNorm over ``head_dim`` follows the query and key projections.
        sliding_window: Tokens that a token sees, itself included; None for all before it.
        num_experts: Experts of each layer's MLP; 0 for a dense model.
        experts_per_token: Experts that each token goes to.
        renormalized: Whether the chosen experts' probabilities are scaled to sum to 1.
    """

    family: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool
    norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    max_position_embeddings: int
    value_head: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    num_experts: int = 0
    experts_per_token: int = 0
    renormalized: bool = True
