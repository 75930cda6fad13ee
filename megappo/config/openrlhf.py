"""OpenRLHF's keys that megappo names otherwise or does without (as of OpenRLHF 0.11).

Keys that are in neither table have the same name in both. The tables make the error about
an unknown key helpful and the mapping in docs/configuration.md complete.
"""

from __future__ import annotations

import difflib

from megappo.config.keys import groups, keys

# OpenRLHF's key -> megappo's key, and how the value changes.
RENAMED: dict[str, tuple[str, str]] = {
    "actor.gradient_checkpointing_enable": ("megatron.recompute_granularity", "true is full"),
    "actor.num_gpus_per_node": ("megatron.world_size", "nodes x GPUs per node"),
    "actor.num_nodes": ("megatron.world_size", "nodes x GPUs per node"),
    "ckpt.output_dir": ("output_dir", "the final policy goes to its folder hf"),
    "ds.param_dtype": ("megatron.params_dtype", "bf16 or fp32"),
    "ds.tensor_parallel_size": ("megatron.tensor_model_parallel_size", "same value"),
    "ds.zero_stage": ("megatron.use_distributed_optimizer", "stage 1 is true, 0 is false"),
    "rollout.max_tokens_per_gpu": ("train.max_tokens_per_gpu", "one budget for all passes"),
    "rollout.micro_batch_size": ("train.max_tokens_per_gpu", "counted in tokens"),
    "train.micro_batch_size": ("train.max_tokens_per_gpu", "counted in tokens"),
    "vllm.gpu_memory_utilization": ("vllm.kv_cache_memory_bytes", "bytes, not a share"),
}

_SHARED_MESH = "all roles share the mesh of megatron.world_size ranks"
_ALWAYS = "always so"
_MESH = "the Megatron mesh takes its place"
_PACKED = "sequences are always packed and cut into micro-batches by tokens"
_NOT_YET = "not supported yet"
_TEXT_ONLY = "text models only"

# OpenRLHF's key -> why megappo has none.
WITHOUT: dict[str, str] = {
    "actor.aux_loss_coef": _NOT_YET,
    "actor.freeze_visual_encoder": _TEXT_ONLY,
    "actor.gradient_checkpointing_reentrant": _MESH,
    "actor.loss_agg_mode": "the mean over the action tokens of the whole optimizer step",
    "actor.muon.lr": "AdamW only",
    "actor.muon.momentum": "AdamW only",
    "actor.muon.nesterov": "AdamW only",
    "actor.muon.no_nesterov": "AdamW only",
    "actor.muon.ns_steps": "AdamW only",
    "actor.optim": "AdamW only",
    "actor.policy_loss_type": "PPO's clipped loss only",
    "algo.advantage.is_correction_gating": _NOT_YET,
    "algo.advantage.is_correction_level": _NOT_YET,
    "algo.advantage.is_correction_mode": _NOT_YET,
    "algo.advantage.is_correction_threshold": _NOT_YET,
    "algo.advantage.no_std_norm": _NOT_YET,
    "algo.dynamic_filtering_enable": _NOT_YET,
    "algo.dynamic_filtering_range": _NOT_YET,
    "algo.kl.unbiased_gradient": "the KL penalty is part of the reward",
    "algo.kl.use_loss": "the KL penalty is part of the reward",
    "ckpt.best_metric_key": _NOT_YET,
    "ckpt.disable_ds": "ckpt.save_steps = -1 saves only on a signal",
    "ckpt.max_mem": "ckpt.max_num bounds the checkpoints by number",
    "ckpt.save_hf": "the final policy is always exported",
    "critic.muon.lr": "AdamW only",
    "critic.muon.momentum": "AdamW only",
    "critic.muon.nesterov": "AdamW only",
    "critic.muon.no_nesterov": "AdamW only",
    "critic.muon.ns_steps": "AdamW only",
    "critic.num_gpus_per_node": _SHARED_MESH,
    "critic.num_nodes": _SHARED_MESH,
    "critic.optim": "AdamW only",
    "critic.save_value_network": _NOT_YET,
    "data.dataloader_num_workers": "prompts are tokenised once, at the start",
    "data.disable_fast_tokenizer": "the tokenizer of the model's folder is used as it is",
    "data.image_key": _TEXT_ONLY,
    "data.max_images_per_prompt": _TEXT_ONLY,
    "data.prompt_probs": "one prompt file",
    "data.prompt_split": "a prompt file has no splits",
    "ds.adam_offload": _NOT_YET,
    "ds.attn_implementation": "chosen by the device",
    "ds.deepcompile": _MESH,
    "ds.enable_sleep": _NOT_YET,
    "ds.experts_implementation": _NOT_YET,
    "ds.grad_accum_dtype": "gradients are fp32",
    "ds.load_in_4bit": _NOT_YET,
    "ds.lora.alpha": _NOT_YET,
    "ds.lora.dropout": _NOT_YET,
    "ds.lora.rank": _NOT_YET,
    "ds.lora.target_modules": _NOT_YET,
    "ds.overlap_comm": _MESH,
    "ds.packing_samples": _PACKED,
    "ds.ring_attn_head_stride": _NOT_YET,
    "ds.ring_attn_size": _NOT_YET,
    "ds.use_liger_kernel": _MESH,
    "ds.use_universal_ckpt": "checkpoints load at any mesh",
    "ds.value_head_prefix": "a critic's folder holds its head as score.weight",
    "ds.zpg": _MESH,
    "eval.split": "a prompt file has no splits",
    "local_rank": "set by the runtime",
    "logger.logging_steps": "every step is logged",
    "logger.wandb.key": "W&B's own login, so that no key stands in a file",
    "ref.num_gpus_per_node": _SHARED_MESH,
    "ref.num_nodes": _SHARED_MESH,
    "reward.num_gpus_per_node": _SHARED_MESH,
    "reward.num_nodes": _SHARED_MESH,
    "reward.overlong_buffer_len": _NOT_YET,
    "reward.overlong_penalty_factor": _NOT_YET,
    "reward.stop_properly_penalty_coef": _NOT_YET,
    "rollout.vllm_generate_batch_size": "rollout.batch_size prompts are generated per step",
    "train.agent_func_path": _NOT_YET,
    "train.async_enable": _NOT_YET,
    "train.async_queue_size": _NOT_YET,
    "train.colocate_actor_ref": _SHARED_MESH,
    "train.colocate_critic_reward": _SHARED_MESH,
    "train.dynamic_batch_enable": _PACKED,
    "train.ema_beta": _NOT_YET,
    "train.enable_ema": _NOT_YET,
    "train.full_determinism_enable": _ALWAYS,
    "train.partial_rollout_enable": _NOT_YET,
    "use_ms": "models are local folders",
    "vllm.enable_sleep": _NOT_YET,
    "vllm.sync_backend": "weights go rank to rank, over NCCL or gloo",
    "vllm.sync_with_ray": "weights go rank to rank, over NCCL or gloo",
}


def _nearest(name: str) -> str | None:
    """The known key most like ``name``, by the whole name or by its last part."""

    def likeness(key: str) -> float:
        whole = difflib.SequenceMatcher(None, name, key).ratio()
        last = difflib.SequenceMatcher(None, name.split(".")[-1], key.split(".")[-1]).ratio()
        same_group = 0.1 * (name.split(".")[0] == key.split(".")[0])
        return max(whole, 0.95 * last) + same_group

    best = max((*keys(), *groups()), key=likeness)
    return best if likeness(best) >= 0.7 else None


def unknown_key(name: str) -> str:
    """What to tell a user who gave a key that the schema lacks."""
    if name in RENAMED:
        key, change = RENAMED[name]
        return f"unknown key {name}; it is {key} here ({change})"
    if name in WITHOUT:
        return f"unknown key {name}: OpenRLHF's key has no equal here ({WITHOUT[name]})"
    nearest = _nearest(name)
    hint = f"did you mean {nearest}?" if nearest else "megappo train --help lists all keys"
    return f"unknown key {name}; {hint}"
