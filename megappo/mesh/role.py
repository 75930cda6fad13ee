"""One model on this rank of the mesh: chunks, weights, optimizer, schedule, loss.

A role is data: actor, critic and reference differ in head, optimizer and loss only. It turns
a packed micro-batch's model output into what is asked for (log-probs, values, a loss); it
does not know where batches come from or what happens to the results.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import (
    OptimizerParamScheduler,
    get_canonical_lr_for_logging,
)
from megatron.core.utils import get_model_config

from megappo.mesh.losses import LossTotals, policy_loss_step, value_loss_step
from megappo.mesh.settings import (
    MeshSettings,
    OptimizerSettings,
    PolicyLossSettings,
    RoleSettings,
)
from megappo.models.build import build_model
from megappo.models.forward import align_with_tokens, next_tokens
from megappo.models.log_probs import log_probs_and_entropy
from megappo.records import Experience, PackedBatch
from megappo.reshard.hf import import_hf
from megappo.topology import Topology
from megappo.weights.families import load_shape
from megappo.weights.hf_files import CheckpointReader
from megappo.weights.layout import Layout
from megappo.weights.megatron import megatron_layout

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Role:
    """A model on the mesh, with weights; trainable if ``settings.optimizer`` is given.

    Attributes:
        settings: what the driver asked for.
        shape: the model's dimensions; ``value_head`` is what the *model* has.
        layout: where every canonical tensor lies on the mesh.
        modules: this rank's model chunks (for checkpoints and weight access).
        chunks: the same, in Megatron's data parallelism where trainable (for the schedule).
        optimizer: Megatron's optimizer, None when frozen.
        scheduler: learning-rate schedule, None when frozen.

    Raises:
        ValueError: the folder is not a usable checkpoint, or the mesh cannot cut it.
    """

    def __init__(
        self, rank: int, topology: Topology, mesh: MeshSettings, settings: RoleSettings
    ) -> None:
        self.settings = settings
        self._temperature = mesh.temperature
        self.shape = load_shape(settings.hf_dir)
        value_head = settings.head == "value"
        self.modules: list[Any] = list(
            build_model(
                self.shape,
                topology,
                head=settings.head,
                dtype=DTYPES[mesh.dtype],
                sequence_parallel=mesh.sequence_parallel,
                recompute=mesh.recompute,
                seed=mesh.seed,
                fp8=mesh.fp8,
                implementation=mesh.implementation,
            )
        )
        self.layout: Layout = megatron_layout(self.shape, topology, value_head=value_head)
        import_hf(CheckpointReader(settings.hf_dir), self.layout, rank, self.tensors)
        self.chunks = self.modules
        self.optimizer: Any = None
        self.scheduler: Any = None
        if settings.optimizer is None:
            for module in self.modules:
                module.requires_grad_(False)
        else:
            self._make_trainable(mesh, settings.optimizer)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """This rank's live parameters by the names of ``layout``: chunk number, then Megatron's."""
        return {
            f"{chunk}.{name}": parameter.detach()
            for chunk, module in enumerate(self.modules)
            for name, parameter in module.named_parameters()
        }

    @property
    def lr(self) -> float:
        """Learning rate of the last optimizer step (of the first one, before it)."""
        rate = get_canonical_lr_for_logging(self.optimizer.param_groups)
        assert rate is not None
        return float(rate)

    def log_probs(self, logits: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        """Log-probs float32 [T] of a micro-batch's tokens, at the sampling temperature."""
        return self._log_probs_and_entropy(logits, batch, with_entropy=False)[0]

    def values(self, output: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        """Values float32 [T] of the states in which a micro-batch's tokens were chosen."""
        return align_with_tokens(output, batch.cu_seqlens)

    def loss(
        self, output: torch.Tensor, batch: PackedBatch, experience: Experience
    ) -> tuple[torch.Tensor, LossTotals]:
        """Sum of the loss over a micro-batch's action tokens, and its statistics."""
        settings = self.settings.loss
        assert settings is not None
        if isinstance(settings, PolicyLossSettings):
            with_entropy = settings.entropy_coef is not None
            log_probs, entropy = self._log_probs_and_entropy(output, batch, with_entropy)
            return policy_loss_step(log_probs, entropy, batch, experience, settings)
        return value_loss_step(self.values(output, batch), batch, experience, settings)

    def zero_gradients(self) -> None:
        """Clear gradients before a step."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def step(self) -> float:
        """Advance the schedule, clip, update the weights; returns the norm before clipping."""
        self.scheduler.step(1)
        updated, grad_norm, _ = self.optimizer.step()
        assert updated, "there is no loss scaling, so no step is ever refused"
        return float(grad_norm)

    def _log_probs_and_entropy(
        self, logits: torch.Tensor, batch: PackedBatch, with_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        split = parallel_state.get_tensor_model_parallel_world_size() > 1
        log_probs, entropy = log_probs_and_entropy(
            logits,
            next_tokens(batch),
            temperature=self._temperature,
            vocab_size=self.shape.vocab_size,
            tp_group=parallel_state.get_tensor_model_parallel_group() if split else None,
            tp_rank=parallel_state.get_tensor_model_parallel_rank(),
            with_entropy=with_entropy,
        )
        aligned = align_with_tokens(log_probs, batch.cu_seqlens)
        return aligned, None if entropy is None else align_with_tokens(entropy, batch.cu_seqlens)

    def _make_trainable(self, mesh: MeshSettings, optimizer: OptimizerSettings) -> None:
        config = get_model_config(self.modules[0])
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=mesh.use_distributed_optimizer,
        )
        self.chunks = [DistributedDataParallel(config, ddp, module) for module in self.modules]
        config.finalize_model_grads_func = finalize_model_grads
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=optimizer.lr,
                min_lr=optimizer.lr * optimizer.min_lr_ratio,
                weight_decay=optimizer.weight_decay,
                adam_beta1=optimizer.betas[0],
                adam_beta2=optimizer.betas[1],
                adam_eps=optimizer.eps,
                clip_grad=optimizer.max_norm,
                bf16=mesh.dtype == "bf16",
                params_dtype=DTYPES[mesh.dtype],
                use_distributed_optimizer=mesh.use_distributed_optimizer,
            ),
            self.chunks,
        )
        # Zero moments now, not at the first step: a role that has not been trained yet (frozen,
        # or stopped by a signal before it) is saved and loaded like any other.
        for part in self.optimizer.chained_optimizers:
            part.init_state_fn(part.optimizer, part.config)
        cosine = optimizer.lr_scheduler == "cosine_with_min_lr"
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=optimizer.lr,
            min_lr=optimizer.lr * optimizer.min_lr_ratio,
            lr_warmup_steps=optimizer.warmup_steps,
            lr_decay_steps=max(optimizer.total_steps, optimizer.warmup_steps + 1),
            lr_decay_style="cosine" if cosine else "constant",
            start_wd=optimizer.weight_decay,
            end_wd=optimizer.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )
