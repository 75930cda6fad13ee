"""Reads a Hugging Face ``config.json`` field by field, and lets none pass unread.

A family's translation takes the fields it understands from ``ConfigFields``; ``finish``
refuses what is left, because a field that is ignored (``sliding_window``, say) is a model
that differs from its checkpoint. This module knows which fields no model's output depends
on, and how rotary embeddings are written; it knows no family.
"""

from __future__ import annotations

from typing import Any

# Fields that change no logit: tokens, generation defaults, bookkeeping, classifier labels.
HARMLESS = frozenset(
    """
    architectures bos_token_id eos_token_id pad_token_id use_cache torch_dtype dtype
    transformers_version _name_or_path initializer_range attention_dropout return_dict
    output_hidden_states output_attentions chunk_size_feed_forward is_encoder_decoder
    id2label label2id num_labels problem_type classifier_dropout _attn_implementation
    _attn_implementation_autoset attn_implementation is_llama_config transformers.js_config
    max_length max_new_tokens do_sample temperature top_p top_k repetition_penalty
    unsloth_fixed unsloth_version
    """.split()
)
ROPE_KEYS = {
    "default": frozenset[str](),
    "linear": frozenset({"factor"}),
    "llama3": frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    ),
}


class ConfigFields:
    """The fields of one ``config.json``, taken one by one.

    Args:
        config: The parsed file.
        where: What to call the file in errors.
    """

    def __init__(self, config: dict[str, Any], where: str) -> None:
        """Starts with every field that is not harmless."""
        self.where = where
        self._fields = {k: v for k, v in config.items() if k not in HARMLESS}
        self._fields.pop("model_type", None)

    def error(self, text: str) -> ValueError:
        """An error about this file, to be raised by the caller."""
        return ValueError(f"{self.where}: {text}")

    def size(self, name: str, default: int | None = None) -> int:
        """Takes a positive integer. Raises ValueError when absent (no default) or another thing."""
        value = self._fields.pop(name, None)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(f"{name} must be a positive integer, found {value!r}")
        return value

    def optional_size(self, name: str, default: int | None) -> int | None:
        """Takes a positive integer, or null for none; ``default`` when absent."""
        self._fields.setdefault(name, default)
        if self._fields[name] is None:
            del self._fields[name]
            return None
        return self.size(name)

    def number(self, name: str, default: float) -> float:
        """Takes a positive number."""
        value = self._fields.pop(name, None)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise self.error(f"{name} must be a positive number, found {value!r}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """Takes a boolean."""
        value = self._fields.pop(name, default)
        if not isinstance(value, bool):
            raise self.error(f"{name} must be true or false, found {value!r}")
        return value

    def only(self, name: str, *allowed: Any) -> None:
        """Takes a field for which megappo knows just these values (absent is allowed)."""
        value = self._fields.pop(name, allowed[0])
        if value not in allowed:
            raise self.error(f"{name} = {value!r} is not supported, only {allowed[0]!r}")

    def no_sliding_window(self) -> None:
        """Takes the fields of a window that Qwen's checkpoints carry and do not use.

        Raises:
            ValueError: when some layers are windowed: megappo knows windows of all layers only.
        """
        self.only("use_sliding_window", False)
        self._fields.pop("sliding_window", None)
        self._fields.pop("max_window_layers", None)
        kinds = self._fields.pop("layer_types", None) or []
        if not isinstance(kinds, list) or set(kinds) - {"full_attention"}:
            raise self.error(f"layer_types = {kinds!r}: only 'full_attention' is supported")

    def experts(self) -> dict[str, Any]:
        """Takes the experts' number (under either of its names) and use, as a shape has them.

        The loss by which a router learns to spread tokens, and its noise, belong to
        pre-training: PPO uses neither.

        Raises:
            ValueError: when a token goes to more experts than there are.
        """
        counts = {
            self.size(name)
            for name in ("num_experts", "num_local_experts")
            if self._fields.get(name) is not None
        }
        if len(counts) != 1:
            raise self.error(f"num_experts (or num_local_experts) must be one number: {counts}")
        [num_experts] = counts
        per_token = self.size("num_experts_per_tok")
        if per_token > num_experts:
            raise self.error(
                f"num_experts_per_tok = {per_token} is more than the {num_experts} experts"
            )
        for name in ("output_router_logits", "router_aux_loss_coef"):
            self._fields.pop(name, None)
        self.only("router_jitter_noise", 0.0, None)
        return {"num_experts": num_experts, "experts_per_token": per_token}

    def rope(self, default_theta: float) -> tuple[float, dict[str, Any] | None]:
        """Takes the rotary embedding from ``rope_parameters`` or the older top-level fields.

        Returns:
            theta, and the scaling as ``ModelShape.rope_scaling`` documents it.

        Raises:
            ValueError: for a scaling or a key inside it that megappo does not know.
        """
        top = self._fields.pop("rope_theta", None)
        older = self._fields.pop("rope_scaling", None) or {}
        newer = self._fields.pop("rope_parameters", None) or {}
        if not isinstance(older, dict) or not isinstance(newer, dict):
            raise self.error("rope_scaling and rope_parameters must be objects")
        name = "rope_parameters" if newer else "rope_scaling"
        rope = dict(newer or older)
        inner = rope.pop("rope_theta", None)
        if top is not None and inner is not None and top != inner:
            raise self.error(f"rope_theta is {top!r}, but {name}.rope_theta is {inner!r}")
        self._fields["rope_theta"] = inner if inner is not None else top
        theta = self.number("rope_theta", default_theta)
        older_type = rope.pop("type", "default")
        kind = rope.pop("rope_type", older_type)
        if kind not in ROPE_KEYS:
            raise self.error(f"{name}.rope_type = {kind!r} is not supported: {sorted(ROPE_KEYS)}")
        if set(rope) != ROPE_KEYS[kind]:
            odd = ", ".join(sorted(set(rope) ^ ROPE_KEYS[kind]))
            raise self.error(f"{name}: missing or unknown for rope_type {kind!r}: {odd}")
        for key, value in rope.items():
            if not isinstance(value, int | float) or value <= 0:
                raise self.error(f"{name}.{key} must be a positive number, found {value!r}")
        return theta, None if kind == "default" else {"rope_type": kind, **rope}

    def finish(self) -> None:
        """Refuses the fields that nobody took, by name."""
        if self._fields:
            fields = ", ".join(f"{k} = {v!r}" for k, v in sorted(self._fields.items()))
            raise self.error(f"megappo does not know these fields of the model: {fields}")
