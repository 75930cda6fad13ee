"""What a model says of a few tokens, computed twice: by transformers and by Megatron.

Both in float32 on whole models, so that their largest difference shows whether weights *and*
configuration were carried over. For models that fit twice into memory; the caller asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from megappo.models.build import Head
from megappo.models.forward import forward_packed
from megappo.records import PackedBatch


@torch.no_grad()
def transformers_outputs(
    hf_dir: Path,
    sequences: Sequence[torch.Tensor],
    *,
    dtype: torch.dtype,
    score: torch.Tensor | None = None,
) -> torch.Tensor:
    """Logits, or values, of all positions by transformers; code in the folder is never run.

    Args:
        hf_dir: checkpoint folder.
        sequences: token ids int64 [T_i].
        dtype: type that the weights are rounded to first.
        score: weight [1, hidden_size] of the value head, None for a language model.

    Returns:
        float32 [sum of T_i, vocabulary] or [sum of T_i, 1].
    """
    transformers_logging.disable_progress_bar()
    auto: Any = AutoModelForCausalLM if score is None else AutoModel
    model = auto.from_pretrained(
        str(hf_dir),
        dtype=dtype,
        attn_implementation="eager",
        local_files_only=True,
        trust_remote_code=False,
    )
    model = model.float().eval()
    outputs = []
    for tokens in sequences:
        out = model(tokens[None], use_cache=False)
        if score is None:
            outputs.append(out.logits[0])
        else:
            outputs.append(out.last_hidden_state[0] @ score.float().t())
    return torch.cat(outputs)


@torch.no_grad()
def megatron_outputs(
    model: torch.nn.Module, sequences: Sequence[torch.Tensor], *, head: Head, vocab_size: int
) -> torch.Tensor:
    """The same by a Megatron model that is not cut.

    Args:
        model: the one chunk, in float32.
        sequences: token ids int64 [T_i].
        head: the model's.
        vocab_size: columns that are no padding.
    """
    device = next(model.parameters()).device
    lengths = torch.tensor([0, *(len(tokens) for tokens in sequences)])
    tokens = torch.cat(list(sequences))
    batch = PackedBatch(
        tokens=tokens.to(device),
        cu_seqlens=lengths.cumsum(0).int().to(device),
        action_mask=torch.zeros(len(tokens), dtype=torch.bool, device=device),
        engine_log_probs=torch.zeros(len(tokens), device=device),
        samples=torch.arange(len(sequences), device=device),
    )
    output = forward_packed(model.eval(), batch).float().cpu()
    return output[:, None] if head == "value" else output[:, :vocab_size]
