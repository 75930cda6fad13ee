"""Makes what the quickstart needs: a byte-level tokenizer, a small policy, prompts.

The policy is a 1 M-parameter Llama, supervised on two-digit addition by a careless teacher
who mostly forgets to carry. So it can add but often does not, and PPO, which rewards right
sums, has something to improve. Everything is a function of the seed and is made once. This
module knows nothing about megappo: the result is an ordinary Hugging Face folder and two
JSON-lines files, as a user would bring them.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

VERSION = 3
"""Counts changes of what is made here; folders of another version are remade."""

NUM_EVAL = 200
NUM_TRAIN = 8192
ANSWER_DIGITS = 3
WARMUP_STEPS = 20

_BOS, _EOS, _PAD = "<bos>", "<eos>", "<pad>"


@dataclass(frozen=True)
class Assets:
    """Paths of the prepared files."""

    policy: Path
    """Hugging Face folder of the supervised policy, tokenizer included."""
    train: Path
    """Prompts to train on: JSON lines with ``input`` and ``label``."""
    eval: Path
    """200 held-out prompts, none of them in ``train`` or in the supervised data."""


@dataclass(frozen=True)
class Supervision:
    """How the policy is supervised before PPO; the defaults take about a minute."""

    max_steps: int = 600
    target_loss: float = 0.12
    """Stop when the mean loss of the last 10 batches is below this."""
    batch_size: int = 128
    lr: float = 2e-3
    """Learning rate, after 20 steps of warm-up."""
    carelessness: float = 0.8
    """Share of the sums with a carry in which the teacher forgets it."""


def prepare(folder: Path, seed: int, supervision: Supervision | None = None) -> Assets:
    """Makes the assets under ``folder``, or returns them if they are there.

    The folder is built under a temporary name and renamed when complete; one that was
    made by another version or with another seed is replaced.
    """
    assets = Assets(folder / "policy", folder / "train.jsonl", folder / "eval.jsonl")
    supervision = supervision or Supervision()
    key = {"version": VERSION, "seed": seed, "supervision": asdict(supervision)}
    if _made_with(folder) == key:
        return assets
    building = folder.with_name(f"{folder.name}.building-{os.getpid()}")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    train, held_out = split_problems(seed)
    write_prompts(building / "eval.jsonl", held_out)
    write_prompts(building / "train.jsonl", train[:NUM_TRAIN])
    tokenizer = byte_tokenizer()
    policy = new_policy(tokenizer, seed)
    print("Supervising a small policy on additions: once, about a minute", flush=True)
    supervise(policy, tokenizer, train, seed, supervision)
    policy.save_pretrained(building / "policy")
    tokenizer.save_pretrained(building / "policy")
    (building / "made_with.json").write_text(json.dumps(key))
    shutil.rmtree(folder, ignore_errors=True)
    building.rename(folder)
    return assets


def _made_with(folder: Path) -> object:
    """What the folder was made with; None if it is missing or incomplete."""
    path = folder / "made_with.json"
    return json.loads(path.read_text()) if path.exists() else None


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, then bos, eos and pad: 259 tokens. It adds no token by itself."""
    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), _BOS, _EOS, _PAD]
    backend = Tokenizer(models.BPE(vocab={s: i for i, s in enumerate(symbols)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=_BOS, eos_token=_EOS, pad_token=_PAD
    )


def split_problems(seed: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """All 10,000 two-digit problems, shuffled: (those to learn from, 200 held out)."""
    problems = [(a, b) for a in range(100) for b in range(100)]
    random.Random(seed).shuffle(problems)
    return problems[NUM_EVAL:], problems[:NUM_EVAL]


def prompt_and_answer(problem: tuple[int, int], *, carry: bool = True) -> tuple[str, str]:
    """``(7, 35)`` -> ``("07+35=", "042")``; without the carry into the tens, ``"032"``."""
    a, b = problem
    total = a + b - (10 if not carry and a % 10 + b % 10 >= 10 else 0)
    return f"{a:02d}+{b:02d}=", f"{total:0{ANSWER_DIGITS}d}"


def write_prompts(path: Path, problems: list[tuple[int, int]]) -> None:
    """Writes one JSON object a line, with keys ``input`` and ``label``."""
    rows = (prompt_and_answer(problem) for problem in problems)
    lines = (json.dumps({"input": prompt, "label": answer}) for prompt, answer in rows)
    path.write_text("".join(f"{line}\n" for line in lines))


def new_policy(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """A Llama of 1.05 M parameters with random weights, in fp32."""
    torch.manual_seed(seed)
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        initializer_range=0.06,  # learns in a third of the steps that 0.02 takes
        **ids,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(**ids)
    return model


def supervise(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    problems: list[tuple[int, int]],
    seed: int,
    settings: Supervision,
) -> None:
    """Trains the model with AdamW on the careless teacher's answers to random problems."""
    prompt_len = len(tokenizer(prompt_and_answer(problems[0])[0])["input_ids"])
    right = _tokens(tokenizer, problems, carry=True)
    wrong = _tokens(tokenizer, problems, carry=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    losses: deque[float] = deque(maxlen=10)
    model.train()
    for step in range(1, settings.max_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * min(1.0, step / WARMUP_STEPS)
        rows = torch.randint(len(problems), (settings.batch_size,), generator=generator)
        careless = torch.rand(settings.batch_size, generator=generator) < settings.carelessness
        batch = torch.where(careless[:, None], wrong[rows], right[rows])
        logits = model(input_ids=batch[:, :-1]).logits[:, prompt_len - 1 :]
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), batch[:, prompt_len:].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        mean_loss = sum(losses) / len(losses)
        if step % 50 == 0:
            print(f"  step {step}, loss {mean_loss:.3f}", flush=True)
        if len(losses) == losses.maxlen and mean_loss < settings.target_loss:
            break
    model.eval()


def _tokens(
    tokenizer: PreTrainedTokenizerFast, problems: list[tuple[int, int]], *, carry: bool
) -> torch.Tensor:
    """Prompt, answer and eos of each problem: int64 [problems, tokens], all of equal length."""
    texts = ["".join(prompt_and_answer(problem, carry=carry)) for problem in problems]
    return torch.tensor([ids + [tokenizer.eos_token_id] for ids in tokenizer(texts)["input_ids"]])
