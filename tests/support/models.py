"""Tiny random Hugging Face folders: the real classes and files, made in a fraction of a second.

``make_llama`` writes what ``save_pretrained`` of transformers writes, with weights large
enough that a swapped or stale tensor changes every output, and a character-level tokenizer
with a chat template. Nothing here knows megappo.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

PAD, BOS, EOS, UNK = 0, 1, 2, 3
SPECIALS = ["<pad>", "<s>", "</s>", "<unk>"]
CHARACTERS = (
    "0123456789+-*/=?.,:;!'\" \nabcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ()[]{}<>"
    "#$%&@\\^_`|~"
)
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


# Each family's configuration class, and what makes a tiny model of it unlike a Llama.
FAMILIES: dict[str, tuple[Callable[..., PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "mistral": (MistralConfig, {"sliding_window": 8}),
    "qwen2": (Qwen2Config, {"head_dim": None, "tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, {}),
    "mixtral": (MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
        },
    ),
}


def make_tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """A tokenizer of ``vocab`` entries with one token per character; digits come first."""
    words = [*SPECIALS, *CHARACTERS][:vocab]
    words += [f"<extra_{i}>" for i in range(vocab - len(words))]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def randomize(model: PreTrainedModel, seed: int) -> None:
    """Give every weight a size that matters: unit-scale activations, norm weights unlike 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.copy_(1 + 0.3 * noise if "norm" in name else 0.3 * noise)
            else:
                gain = 2.0 if "embed" in name or "head" in name else 1.0
                parameter.copy_(noise * gain / parameter.shape[1] ** 0.5)


def make_llama(
    directory: str | Path, *, rope: dict[str, Any] | None = None, **options: Any
) -> Path:
    """``make_model`` of a Llama; ``rope`` is transformers' ``rope_parameters``."""
    return make_model(directory, "llama", rope_parameters=rope, **options)


def make_model(
    directory: str | Path,
    family: str,
    *,
    tied: bool | None = None,
    vocab: int = 101,
    layers: int = 4,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = 32,
    ffn: int = 96,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    eos: int | list[int] = EOS,
    max_position_embeddings: int = 256,
    value_head: bool = False,
    max_shard_size: str = "5GB",
    **special: Any,
) -> Path:
    """Write a random folder of a family and return it.

    ``eos`` goes to the configuration and the generation configuration; ``value_head`` writes a
    sequence classifier with one label; ``special`` are further fields of the configuration.
    """
    directory = Path(directory)
    config_class, defaults = FAMILIES[family]
    fields: dict[str, Any] = {
        "head_dim": head_dim,
        "tie_word_embeddings": False,
        **defaults,
        **({} if tied is None else {"tie_word_embeddings": tied}),
        **special,
    }
    if fields["head_dim"] is None:  # Qwen2 has none: heads fill the hidden size
        del fields["head_dim"]
        hidden = heads * 32
    config = config_class(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=max_position_embeddings,
        bos_token_id=BOS,
        eos_token_id=eos,
        pad_token_id=PAD,
        **fields,
    )
    config.num_labels = 1 if value_head else 2
    auto: Any = AutoModelForSequenceClassification if value_head else AutoModelForCausalLM
    model = auto.from_config(config)
    randomize(model, seed)
    model.generation_config = GenerationConfig(bos_token_id=BOS, eos_token_id=eos, pad_token_id=PAD)
    torch.nn.Module.to(model, dtype)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    model.generation_config.save_pretrained(directory)
    make_tokenizer(vocab).save_pretrained(directory)
    return directory
