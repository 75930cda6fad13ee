"""Looks at what a finished run left: its evaluations, and its policy in plain transformers.

Used by the examples to report on themselves. It knows nothing of how the run was made.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def first_and_last(output_dir: Path, name: str) -> tuple[float, float]:
    """First and last logged value of a metric, say ``eval/reward_mean``.

    Raises:
        ValueError: the run logged no such metric.
    """
    path = output_dir / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    values = [row[name] for row in rows if name in row]
    if not values:
        raise ValueError(f"{path} has no {name}")
    return values[0], values[-1]


def greedy_responses(
    policy: Path, prompts: Sequence[str], *, max_new_tokens: int, instruction: str | None = None
) -> list[str]:
    """Greedy responses of a Hugging Face folder, by transformers alone.

    Args:
        policy: the folder.
        prompts: what to answer; all at once, padded on the left.
        max_new_tokens: longest response, in tokens.
        instruction: if given, each prompt is a user's message after this system message, as
            the chat template renders them.
    """
    tokenizer = AutoTokenizer.from_pretrained(policy, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(policy)
    texts = list(prompts)
    if instruction is not None:
        system = {"role": "system", "content": instruction}
        chats = [[system, {"role": "user", "content": prompt}] for prompt in prompts]
        texts = [
            str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
            for chat in chats
        ]
    inputs = tokenizer(
        texts, return_tensors="pt", padding=True, add_special_tokens=instruction is None
    )
    with torch.no_grad():
        output = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=max_new_tokens,
            do_sample=False,
        )
    new_tokens = output[:, inputs["input_ids"].shape[1] :]
    return list(tokenizer.batch_decode(new_tokens, skip_special_tokens=True))
