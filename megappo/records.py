"""Records that cross stage boundaries: what each stage of PPO hands to the next.

All of them are frozen. Ragged data is stored end to end in flat arrays with offsets
(``cu_seqlens``); nothing here is padded. The records know nothing about devices,
process groups or models.

Shape legend: ``N`` samples, ``S`` sequences in a micro-batch, ``T`` tokens laid end to end.

Per-token arrays are aligned with *tokens*: entry ``t`` belongs to the token at position
``t``, so ``log_probs[t] = log p(tokens[t] | earlier tokens of its sequence)`` and
``values[t] = V(earlier tokens of its sequence)``, the value of the state in which token
``t`` was chosen.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Prompt:
    """One row of the prompt file, rendered and tokenised.

    ``prompt_id`` is the 0-based row number in the file; ``text`` the rendered prompt
    (after template or chat template); ``label`` the row's label, if any; ``messages`` the chat
    that was rendered, None without a chat template.
    """

    prompt_id: int
    token_ids: tuple[int, ...]
    text: str
    label: Any = None
    messages: tuple[dict[str, Any], ...] | None = None


@dataclass(frozen=True)
class SampleRequest:
    """One response to generate. ``sample_id`` is unique within a rollout batch."""

    sample_id: int
    prompt_ids: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class SamplingParams:
    """How responses are drawn. ``temperature`` 0 is greedy. ``stop_token_ids`` end a response."""

    temperature: float
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class GenerateRequest:
    """What one engine is asked to do: the requests, and the store key for their tokens.

    With ``key=None`` nothing is kept on the engine rank (evaluation).
    """

    requests: tuple[SampleRequest, ...]
    sampling: SamplingParams
    key: str | None


@dataclass(frozen=True)
class SampleInfo:
    """What the driver learns of one generated sample: lengths and text, no token tensors.

    ``holder_rank`` is the mesh rank whose store holds the tokens under the request's key.
    """

    sample_id: int
    prompt_len: int
    response_len: int
    finish_reason: FinishReason
    response: str
    holder_rank: int


@dataclass(frozen=True)
class ScoreText:
    """What a reward model is shown of one sample.

    Attributes:
        prompt: the rendered prompt, for a model that is shown plain text.
        messages: the chat, for one that renders it with its own template; else None.
        response: the policy's answer, without the token that ended it; may be empty.
        ended: whether the policy ended it, rather than the length limit.
    """

    prompt: str
    messages: tuple[dict[str, Any], ...] | None
    response: str
    ended: bool


@dataclass(frozen=True)
class ScoreRequest:
    """The samples of one replica that its reward models shall score.

    ``token_budget`` is the most tokens in a micro-batch; a longer sample is alone in one.
    """

    samples: tuple[ScoreText, ...]
    token_budget: int


@dataclass(frozen=True)
class Rollouts:
    """Generated samples on the rank that wrote them.

    Attributes:
        sample_ids: int64 [N].
        tokens: int64 [T], prompt and response of each sample end to end.
        cu_seqlens: int64 [N + 1], offsets of the samples in ``tokens``.
        prompt_lens: int64 [N].
        action_mask: bool [T], True on tokens that the policy chose.
        log_probs: float32 [T], the engine's log-probabilities at the sampling temperature;
            0 where ``action_mask`` is False.
    """

    sample_ids: torch.Tensor
    tokens: torch.Tensor
    cu_seqlens: torch.Tensor
    prompt_lens: torch.Tensor
    action_mask: torch.Tensor
    log_probs: torch.Tensor


@dataclass(frozen=True)
class BatchPlan:
    """Where every sample of a rollout batch goes. Made once by the driver, sent to all ranks.

    All arrays are numpy and of length N, one entry per sample.

    Attributes:
        key: store key of the rollouts.
        sample_ids: int64, the samples' ids.
        prompt_lens: int64.
        response_lens: int64 (0 for an empty response).
        holder_ranks: int64, the mesh rank that holds each sample's tokens.
        scores: float32, the reward of each sample after shaping by its group's baseline.
        steps: int64, the optimizer step (mini-batch) of each sample.
        replicas: int64, the data-parallel replica.
        micro_batches: int64, index of the micro-batch within its (step, replica).
        num_micro_batches: int64 [steps], the count in each step, equal on every replica.
    """

    key: str
    sample_ids: np.ndarray
    prompt_lens: np.ndarray
    response_lens: np.ndarray
    holder_ranks: np.ndarray
    scores: np.ndarray
    steps: np.ndarray
    replicas: np.ndarray
    micro_batches: np.ndarray
    num_micro_batches: np.ndarray

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps in one PPO epoch."""
        return len(self.num_micro_batches)


@dataclass(frozen=True)
class PackedBatch:
    """One micro-batch on one rank: sequences end to end, no padding between them.

    A tail of dummy tokens, its own sequence, may round T up to a multiple that sequence
    parallelism needs; a micro-batch of dummies alone has no real sample. Dummies have
    ``action_mask`` False and so never enter a statistic or a loss.

    Attributes:
        tokens: int64 [T]. Zeros on pipeline stages that need none.
        cu_seqlens: int32 [S + 1] with the dummy tail as its last sequence, if there is one.
        action_mask: bool [T]. All False on stages that compute no loss.
        engine_log_probs: float32 [T], 0 where ``action_mask`` is False.
        samples: int64 [S'] row of each real sequence in the ``BatchPlan`` (S' <= S).
    """

    tokens: torch.Tensor
    cu_seqlens: torch.Tensor
    action_mask: torch.Tensor
    engine_log_probs: torch.Tensor
    samples: torch.Tensor

    @property
    def max_seqlen(self) -> int:
        """Length of the longest sequence, in tokens."""
        return int((self.cu_seqlens[1:] - self.cu_seqlens[:-1]).max())


@dataclass(frozen=True)
class Experience:
    """Everything the two losses need for one micro-batch; lives on last-stage ranks only.

    All tensors are float32 [T], aligned with tokens, 0 where ``action_mask`` is False.
    ``values`` and ``returns`` are None without a critic.
    """

    log_probs: torch.Tensor
    ref_log_probs: torch.Tensor | None
    values: torch.Tensor | None
    advantages: torch.Tensor
    returns: torch.Tensor | None


@dataclass(frozen=True)
class RoleMemory:
    """Bytes that a role's tensors take on one rank, activations not counted.

    Attributes:
        role: its name.
        parameters: in the model's type, buffers included.
        gradients: in float32.
        main_parameters: the optimizer's copies in float32, where the model's type is another.
        optimizer_state: the moments.
    """

    role: str
    parameters: int
    gradients: int
    main_parameters: int
    optimizer_state: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.parameters + self.gradients + self.main_parameters + self.optimizer_state


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of one PPO step, with OpenRLHF's names (``train/kl``, ``timing/generation``)."""

    step: int
    values: dict[str, float] = field(default_factory=dict)
