"""Records of the mesh: what a rank is told, and what its phases report.

Plain frozen values that the driver builds from the configuration and reads back; nothing
here knows torch's process groups or Megatron.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megappo.device.platform import Implementation
from megappo.models.fp8 import Fp8

ACTOR, CRITIC, REF, REWARD = "actor", "critic", "ref", "reward"
"""Names of the roles, the same in every layer above. ``REWARD`` may stand for several models."""


@dataclass(frozen=True)
class MeshSettings:
    """What all roles of a rank share.

    Attributes:
        dtype: type of the parameters; gradients and main parameters are fp32.
        sequence_parallel: split activations along the sequence between tensor ranks.
        recompute: activations to recompute in the backward pass.
        use_distributed_optimizer: shard optimizer state over the replicas.
        temperature: logits are divided by this before log-softmax; above 0.
        seed: initialises a fresh value head and Megatron's random state.
        fp8: what the linear layers compute in FP8, if anything.
        implementation: whose layers models have; TransformerEngine's where they can be, if None.
    """

    dtype: Literal["fp32", "bf16"] = "fp32"
    sequence_parallel: bool = False
    recompute: Literal["full", "selective"] | None = None
    use_distributed_optimizer: bool = True
    temperature: float = 1.0
    seed: int = 42
    fp8: Fp8 | None = None
    implementation: Implementation | None = None


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW with gradient clipping and a learning-rate schedule.

    ``warmup_steps`` and ``total_steps`` count optimizer steps; update number k (from 1) uses
    ``lr * k / warmup_steps`` up to warm-up's end. ``max_norm`` 0 turns clipping off.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_norm: float = 1.0
    lr_scheduler: Literal["constant", "cosine_with_min_lr"] = "constant"
    warmup_steps: int = 0
    total_steps: int = 1
    min_lr_ratio: float = 0.1


@dataclass(frozen=True)
class PolicyLossSettings:
    """The clipped policy loss; ``entropy_coef`` None does not compute entropy at all."""

    eps_clip_low: float = 0.2
    eps_clip_high: float = 0.2
    dual_clip: float | None = None
    entropy_coef: float | None = None


@dataclass(frozen=True)
class ValueLossSettings:
    """The clipped value loss; ``value_clip`` None turns clipping off."""

    value_clip: float | None = 0.5


@dataclass(frozen=True)
class RoleSettings:
    """One model on the mesh.

    Attributes:
        name: what the driver calls it ("actor", "critic", "ref"); reward models are "reward",
            "reward_2" and so on, and are called together as "reward".
        hf_dir: Hugging Face folder that the weights are read from.
        head: logits over the vocabulary, or one value per token.
        optimizer: None for a frozen role.
        loss: the loss of a trainable role; its type must fit ``head``.
        reads: the policy's tokens, or (reward models) texts or chats, encoded anew.
        offload: be in host memory while other roles, or engines, are at work.
        in_place_of: a role with the same model, added before and not trained yet, whose tensors
            hold this one's weights while it is at work; else they are in host memory.
    """

    name: str
    hf_dir: str
    head: Literal["lm", "value"]
    optimizer: OptimizerSettings | None = None
    loss: PolicyLossSettings | ValueLossSettings | None = None
    reads: Literal["tokens", "text", "chat"] = "tokens"
    offload: bool = False
    in_place_of: str | None = None


@dataclass(frozen=True)
class ExperienceSettings:
    """How token rewards become advantages.

    ``whiten`` normalises advantages over all action tokens of the rollout batch.
    """

    kl_coef: float
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    estimator: Literal["gae", "reinforce", "rloo", "group_norm"] = "gae"
    gamma: float = 1.0
    lambd: float = 1.0

    @property
    def whiten(self) -> bool:
        """Whether this estimator's advantages are normalised over the batch."""
        return self.estimator in ("gae", "reinforce")


@dataclass(frozen=True)
class ExperienceMetrics:
    """Statistics of a rollout batch, over all replicas; the same on every rank.

    Means over samples leave out samples without action tokens. All are 0 in a batch that
    has no action tokens at all.

    Attributes:
        num_action_tokens: action tokens of the batch.
        kl: mean over samples of the mean KL per action token, by the estimator in use.
        kl_reward: mean over samples of the sum of token rewards (score minus KL penalty).
        log_probs_diff: mean over action tokens of log-prob minus reference log-prob.
        advantage_mean: mean over action tokens, before whitening.
        advantage_std: standard deviation over action tokens, before whitening.
        value_mean: mean value of the action tokens' states; None without a critic.
        return_mean: mean return (the critic's target) over action tokens.
        engine_diff_mean: mean |engine log-prob - trainer log-prob| over action tokens.
        engine_diff_max: the largest such difference.
    """

    num_action_tokens: int
    kl: float
    kl_reward: float
    log_probs_diff: float
    advantage_mean: float
    advantage_std: float
    value_mean: float | None
    return_mean: float
    engine_diff_mean: float
    engine_diff_max: float


@dataclass(frozen=True)
class UpdateMetrics:
    """One optimizer step of one role, over all replicas; the same on every rank.

    Attributes:
        skipped: the step had no action tokens at all: nothing changed, other fields are 0.
        num_action_tokens: action tokens of the step.
        loss: mean over action tokens, without the entropy bonus.
        clip_frac: share of action tokens on which clipping was active.
        grad_norm: global norm before clipping.
        lr: learning rate of this very step.
        ratio_mean: mean probability ratio to the frozen log-probs (policy).
        ratio_max_diff: largest |ratio - 1| (policy).
        approx_kl: mean KL to the frozen log-probs, estimator k3 (policy).
        entropy: mean entropy over action tokens, where it is computed (policy).
        value_mean: mean of the new values (critic).
    """

    skipped: bool
    num_action_tokens: int
    loss: float = 0.0
    clip_frac: float = 0.0
    grad_norm: float = 0.0
    lr: float = 0.0
    ratio_mean: float | None = None
    ratio_max_diff: float | None = None
    approx_kl: float | None = None
    entropy: float | None = None
    value_mean: float | None = None
