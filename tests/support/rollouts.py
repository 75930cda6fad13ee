"""Synthetic rollouts and plans: random tokens put where an engine would have left them.

Every rank can make the same global batch from a seed and keep its own share, so tests of the
mesh need no engine. Engine log-probs are plain noise: nothing checks them against a model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from megappo.records import BatchPlan, Rollouts

Ints = Sequence[int] | npt.NDArray[np.int64]

KEY = "batch"


def make_rollouts(
    prompt_lens: Ints, response_lens: Ints, *, vocab: int = 101, seed: int = 0
) -> Rollouts:
    """A whole batch: sample ids 100, 101, …; every response token is an action."""
    generator = torch.Generator().manual_seed(seed)
    prompts, responses = np.array(prompt_lens), np.array(response_lens)
    lengths = prompts + responses
    total = int(lengths.sum())
    starts = np.cumsum(lengths) - lengths
    position = np.arange(total) - np.repeat(starts, lengths)
    mask = torch.from_numpy(position >= np.repeat(prompts, lengths))
    noise = -torch.rand(total, generator=generator)
    return Rollouts(
        sample_ids=torch.arange(len(lengths)) + 100,
        tokens=torch.randint(4, vocab, (total,), generator=generator),
        cu_seqlens=torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)])),
        prompt_lens=torch.from_numpy(prompts.astype(np.int64)),
        action_mask=mask,
        log_probs=torch.where(mask, noise, 0.0),
    )


def held_by(rollouts: Rollouts, rows: Sequence[int]) -> Rollouts:
    """The share of a rank that wrote the samples at ``rows``, in that order."""
    offsets = rollouts.cu_seqlens.tolist()
    index = torch.cat(
        [torch.arange(offsets[i], offsets[i + 1]) for i in rows] or [torch.empty(0).long()]
    )
    lengths = torch.tensor([0, *(offsets[i + 1] - offsets[i] for i in rows)])
    picked = torch.tensor(list(rows), dtype=torch.int64)
    return Rollouts(
        sample_ids=rollouts.sample_ids[picked],
        tokens=rollouts.tokens[index],
        cu_seqlens=lengths.cumsum(0),
        prompt_lens=rollouts.prompt_lens[picked],
        action_mask=rollouts.action_mask[index],
        log_probs=rollouts.log_probs[index],
    )


def make_plan(
    rollouts: Rollouts,
    *,
    holder_ranks: Ints,
    steps: Ints,
    replicas: Ints,
    micro_batches: Ints,
    num_micro_batches: Ints,
    scores: Sequence[float] | None = None,
) -> BatchPlan:
    """A plan written out by hand, one entry per sample."""
    lengths = rollouts.cu_seqlens.diff().numpy()
    prompt_lens = rollouts.prompt_lens.numpy()
    generator = np.random.default_rng(0)
    drawn = generator.normal(size=len(lengths)) if scores is None else np.array(scores)
    return BatchPlan(
        key=KEY,
        sample_ids=rollouts.sample_ids.numpy(),
        prompt_lens=prompt_lens,
        response_lens=lengths - prompt_lens,
        holder_ranks=np.array(holder_ranks, np.int64),
        scores=drawn.astype(np.float32),
        steps=np.array(steps, np.int64),
        replicas=np.array(replicas, np.int64),
        micro_batches=np.array(micro_batches, np.int64),
        num_micro_batches=np.array(num_micro_batches, np.int64),
    )
