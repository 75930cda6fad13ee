"""The configuration: frozen dataclasses, one documented field per key.

Key names are OpenRLHF's dotted names where the meaning is the same, and Megatron's
argument names under ``megatron``. This module imports no torch, and checks nothing:
``checks.py`` holds the rules that need more than one field.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class AdamConfig:
    """AdamW, shared by actor and critic."""

    lr: float = 1e-6
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the first and second moments."""
    eps: float = 1e-8
    """Added to the denominator."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""


@dataclass(frozen=True)
class ActorConfig:
    """The policy that is trained."""

    model_name_or_path: str = ""
    """Hugging Face folder of the policy (required)."""
    adam: AdamConfig = AdamConfig()
    """Optimizer of the policy."""
    lr_scheduler: Literal["constant", "cosine_with_min_lr"] = "cosine_with_min_lr"
    """Learning-rate schedule after warm-up."""
    lr_warmup_ratio: float = 0.03
    """Share of all optimizer steps spent on linear warm-up."""
    min_lr_ratio: float = 0.1
    """Final learning rate of the cosine schedule, as a share of the peak."""
    max_norm: float = 1.0
    """Gradients are clipped to this global norm; 0 turns clipping off."""
    eps_clip: float = 0.2
    """PPO's clip range of the probability ratio, on both sides."""
    eps_clip_low_high: tuple[float, float] | None = None
    """Separate lower and upper clip ranges; overrides eps_clip."""
    dual_clip: float | None = None
    """Lower bound on the loss of negative advantages (dual-clip PPO); off by default."""
    entropy_coef: float | None = None
    """Weight of an entropy bonus; off by default, and entropy is not computed then."""
    offload: bool = False
    """Keep weights, gradients and optimizer in host memory outside of the policy's own phases."""


@dataclass(frozen=True)
class CriticConfig:
    """The value model."""

    model_name_or_path: str | None = None
    """Hugging Face folder of the critic; null starts from the policy with a fresh value head."""
    adam: AdamConfig = AdamConfig(lr=9e-6)
    """Optimizer of the critic."""
    lr_scheduler: Literal["constant", "cosine_with_min_lr"] = "cosine_with_min_lr"
    """Learning-rate schedule after warm-up."""
    lr_warmup_ratio: float = 0.03
    """Share of all optimizer steps spent on linear warm-up."""
    min_lr_ratio: float = 0.1
    """Final learning rate of the cosine schedule, as a share of the peak."""
    max_norm: float = 1.0
    """Gradients are clipped to this global norm; 0 turns clipping off."""
    value_clip: float | None = 0.5
    """Clip range of the value loss; null turns clipping off."""
    freezing_steps: int = -1
    """Steps at the start in which only the critic is trained."""
    offload: bool = False
    """Keep weights, gradients and optimizer in host memory outside of the critic's own phases."""


@dataclass(frozen=True)
class RefConfig:
    """The frozen policy that the KL penalty refers to."""

    offload: bool = False
    """Keep its weights in host memory outside of its own phase."""
    swap_with_actor: bool = False
    """Keep its weights in host memory, and put them into the actor's place for its phase: one
    copy on the device."""


@dataclass(frozen=True)
class RewardConfig:
    """Where scores come from."""

    remote_url: str | None = None
    """Python file with ``reward_func(samples)``, as ``path.py`` or ``path.py:name``; its score is
    added to those of the reward models, if both are given."""
    model_name_or_path: str | None = None
    """Hugging Face folder of a reward model (one ``score.weight``); several, comma-separated."""
    model_weights: tuple[float, ...] | None = None
    """Weight of each reward model in the sum; null for 1 each."""
    normalize_enable: bool = False
    """Bring each reward model's scores to mean 0 and deviation 1, by those of the run so far."""
    offload: bool = False
    """Keep the reward models' weights in host memory outside of their own phase."""
    clip_range: tuple[float, float] = (-10.0, 10.0)
    """Scores are clipped to this range."""


@dataclass(frozen=True)
class RolloutConfig:
    """How responses are generated."""

    batch_size: int = 1024
    """Prompts per step."""
    n_samples_per_prompt: int = 1
    """Responses per prompt."""
    max_new_tokens: int = 1024
    """Longest response, in tokens."""
    temperature: float = 1.0
    """Sampling temperature; the trainer divides its logits by it too."""
    top_p: float = 1.0
    """Nucleus sampling; only 1 (off) is supported."""
    top_k: int = -1
    """Top-k sampling; only -1 (off) is supported."""


@dataclass(frozen=True)
class VLLMConfig:
    """The inference engines."""

    num_engines: int | None = None
    """Number of engines; null fills the mesh, or is 1 with train.colocate_all = false."""
    tensor_parallel_size: int = 1
    """Tensor-parallel size of one engine, free of the trainer's."""
    enable_prefix_caching: bool = True
    """Reuse the KV cache of shared prompt prefixes; reset after every weight sync."""
    enforce_eager: bool = True
    """Run without CUDA graphs and compilation (the CPU always does)."""
    kv_cache_memory_bytes: int = 256 * 1024 * 1024
    """Size of one engine rank's KV cache, in bytes."""
    max_num_seqs: int = 256
    """Most sequences that an engine runs at once."""
    verify_weights: bool = False
    """Compare checksums after every sync."""


@dataclass(frozen=True)
class AdvantageConfig:
    """How advantages are estimated."""

    estimator: Literal["gae", "reinforce", "rloo", "group_norm"] = "gae"
    """gae needs a critic; the others do without."""
    gamma: float = 1.0
    """Discount per token."""
    lambd: float = 1.0
    """GAE's lambda."""


@dataclass(frozen=True)
class KLConfig:
    """The KL penalty to the reference policy, part of the token rewards."""

    init_coef: float = 0.01
    """Initial (or fixed) coefficient; 0 runs without a reference model."""
    target: float | None = None
    """Target KL of the adaptive controller; null keeps the coefficient fixed."""
    horizon: int = 10000
    """Horizon of the adaptive controller, in samples."""
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the per-token KL, for the reward and the log alike."""


@dataclass(frozen=True)
class AlgoConfig:
    """The algorithm."""

    advantage: AdvantageConfig = AdvantageConfig()
    """Advantage estimation."""
    kl: KLConfig = KLConfig()
    """KL penalty."""


@dataclass(frozen=True)
class TrainConfig:
    """The update."""

    batch_size: int = 128
    """Samples per optimizer step, over all replicas."""
    max_epochs: int = 1
    """PPO epochs: passes over each rollout batch."""
    num_episodes: int = 1
    """Passes over the prompt file."""
    max_steps: int | None = None
    """Stop after this many steps (one step = rollout, update, sync); null runs all prompts."""
    max_tokens_per_gpu: int = 16192
    """Token budget of one micro-batch on one replica."""
    seed: int = 42
    """Seed of shuffling, sampling and initialisation."""
    colocate_all: bool = True
    """Engines live inside the mesh's ranks; false starts processes of their own for them."""


@dataclass(frozen=True)
class DataConfig:
    """The prompts."""

    prompt_dataset: str = ""
    """JSON-lines file of prompts (required)."""
    input_key: str = "input"
    """Field that holds the prompt: text, or chat messages with apply_chat_template."""
    label_key: str | None = None
    """Field handed to the reward as the label."""
    input_template: str | None = None
    """Template with one ``{}`` that the prompt is put into."""
    apply_chat_template: bool = False
    """Render the prompt with the tokenizer's chat template."""
    max_len: int = 2048
    """Longest prompt plus response, in tokens; the engine's context length."""
    max_samples: int | None = None
    """Use only the first rows of the file."""
    overlong_prompts: Literal["error", "drop", "left", "right"] = "error"
    """A prompt longer than max_len - max_new_tokens: refuse, drop, or cut at that side."""
    invalid_rows: Literal["error", "skip"] = "error"
    """A row that cannot be used: refuse the file, or skip and count the row."""


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation during the run."""

    dataset: str | None = None
    """JSON-lines file of held-out prompts, with the keys of ``data``."""
    steps: int = -1
    """Evaluate every this many steps, and before the first and after the last; -1: only those."""
    temperature: float = 0.0
    """Sampling temperature; 0 is greedy."""
    n_samples_per_prompt: int = 1
    """Responses per prompt."""


@dataclass(frozen=True)
class CkptConfig:
    """Checkpoints to resume from."""

    path: str | None = None
    """Folder of the checkpoints; null puts them under output_dir."""
    save_steps: int = -1
    """Save every this many steps; -1 saves only when stopped by a signal."""
    load_enable: bool = False
    """Resume from the checkpoint that ``latest`` names, if there is one."""
    max_num: int = 3
    """Newest checkpoints to keep."""


@dataclass(frozen=True)
class WandbConfig:
    """Weights & Biases."""

    project: str | None = None
    """Project name; null turns W&B off."""
    run_name: str | None = None
    """Name of the run."""
    group: str | None = None
    """Group of the run."""
    org: str | None = None
    """Entity that owns the project."""
    mode: Literal["online", "offline"] = "online"
    """offline writes to output_dir only."""


@dataclass(frozen=True)
class LoggerConfig:
    """Where metrics go, besides output_dir/metrics.jsonl."""

    console: bool = True
    """Show live progress on the terminal."""
    tensorboard_dir: str | None = None
    """TensorBoard folder; null turns TensorBoard off."""
    wandb: WandbConfig = WandbConfig()
    """Weights & Biases."""


@dataclass(frozen=True)
class MegatronConfig:
    """The training mesh, in Megatron's words."""

    world_size: int = 1
    """Number of mesh ranks."""
    tensor_model_parallel_size: int = 1
    """Tensor-parallel size."""
    pipeline_model_parallel_size: int = 1
    """Pipeline-parallel size."""
    virtual_pipeline_model_parallel_size: int = 1
    """Model chunks of each pipeline stage, run interleaved: fewer idle moments, more messages."""
    expert_model_parallel_size: int = 1
    """Ranks of a stage over which the experts of every layer are spread; one is never cut."""
    sequence_parallel: bool = False
    """Split the activations between tensor-parallel regions along the sequence."""
    params_dtype: Literal["fp32", "bf16"] = "bf16"
    """Type of the model's parameters; gradients and main parameters are fp32."""
    use_distributed_optimizer: bool = True
    """Shard the optimizer state over the replicas."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """Recompute activations in the backward pass."""
    transformer_impl: Literal["local", "transformer_engine"] | None = None
    """Layers of plain torch, or of TransformerEngine (CUDA); null for the latter where it is."""
    fp8: Literal["hybrid", "e4m3"] | None = None
    """Linear layers of the decoder in FP8, hybrid with E5M2 gradients; emulated on a CPU."""
    fp8_recipe: Literal["tensorwise", "delayed", "blockwise", "mxfp8"] = "tensorwise"
    """How FP8's scales are chosen; mxfp8 needs a Blackwell GPU."""
    first_last_layers_bf16: bool = False
    """Leave the first and last layers in params_dtype where fp8 is on."""
    num_layers_at_start_in_bf16: int = 1
    """Layers at the start that first_last_layers_bf16 leaves."""
    num_layers_at_end_in_bf16: int = 1
    """Layers at the end that first_last_layers_bf16 leaves."""


@dataclass(frozen=True)
class RayConfig:
    """How ranks are placed under Ray."""

    num_cpus_per_rank: float = 0.25
    """CPU reserved by one rank (a share of a core lets 8 ranks run on 2 cores)."""
    num_gpus_per_rank: float = 1.0
    """GPU reserved by one rank where CUDA is used."""
    placement_timeout: float = 60.0
    """Seconds to wait for the resources of all ranks, of the mesh and of engines apart."""


@dataclass(frozen=True)
class Config:
    """Everything a run needs."""

    actor: ActorConfig = ActorConfig()
    """Policy."""
    critic: CriticConfig = CriticConfig()
    """Value model."""
    ref: RefConfig = RefConfig()
    """Reference policy."""
    reward: RewardConfig = RewardConfig()
    """Reward."""
    rollout: RolloutConfig = RolloutConfig()
    """Generation."""
    vllm: VLLMConfig = VLLMConfig()
    """Engines."""
    algo: AlgoConfig = AlgoConfig()
    """Algorithm."""
    train: TrainConfig = TrainConfig()
    """Update."""
    data: DataConfig = DataConfig()
    """Prompts."""
    eval: EvalConfig = EvalConfig()
    """Evaluation."""
    ckpt: CkptConfig = CkptConfig()
    """Checkpoints."""
    logger: LoggerConfig = LoggerConfig()
    """Metrics."""
    megatron: MegatronConfig = MegatronConfig()
    """Mesh."""
    ray: RayConfig = RayConfig()
    """Placement."""
    ray_address: str | None = None
    """Address of a running Ray cluster; null starts one on this machine."""
    output_dir: str = "runs/ppo"
    """Folder of everything the run leaves: metrics, samples, checkpoints, logs, hf."""
