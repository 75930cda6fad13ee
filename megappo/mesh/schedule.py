"""Runs micro-batches through the pipeline: Megatron's schedules behind two plain functions.

``evaluate`` goes forward only and returns what the last stage reads off each output;
``accumulate_gradients`` goes forward and backward and leaves the gradients, summed over
micro-batches and replicas and divided by the step's action tokens, in the model's buffers.
Micro-batches may differ in length. This file knows no role and no loss; every rank of the
mesh calls it together, with as many micro-batches as the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config

from megappo.models.forward import forward_packed
from megappo.records import PackedBatch

Result = TypeVar("Result")

Read = Callable[[torch.Tensor, PackedBatch], torch.Tensor]
Loss = Callable[[torch.Tensor, int], tuple[torch.Tensor, Result]]


def evaluate(
    chunks: Sequence[Any], batches: Sequence[PackedBatch], read: Read
) -> list[torch.Tensor]:
    """Forward pass without gradients.

    Args:
        chunks: the model chunks of this rank.
        batches: the micro-batches.
        read: called on the last stage with a model output and its micro-batch.

    Returns:
        On last-stage ranks what ``read`` returned, one per micro-batch; elsewhere empty.
    """
    filled = _filled(chunks, batches)

    def forward_step(iterator: Iterator[int], model: Any) -> tuple[torch.Tensor, Any]:
        batch = filled[next(iterator)]

        # With collect_non_loss_data the schedule passes this keyword.
        def collect(output: torch.Tensor, non_loss_data: bool) -> torch.Tensor:
            return read(output, batch)

        return forward_packed(model, batch), collect

    with torch.no_grad():
        results = _run(
            chunks, forward_step, len(filled), forward_only=True, collect_non_loss_data=True
        )
    return results[: len(batches)]


def accumulate_gradients(
    chunks: Sequence[Any], batches: Sequence[PackedBatch], loss: Loss[Result]
) -> list[Result]:
    """Forward and backward pass of one optimizer step; gradients must have been zeroed.

    Args:
        chunks: the model chunks of this rank, wrapped in Megatron's data parallelism.
        batches: the micro-batches.
        loss: called on the last stage with a model output and the micro-batch's index;
            returns the *sum* of the loss over the action tokens, and what to report.

    Returns:
        On last-stage ranks the reports, one per micro-batch; elsewhere empty.
    """
    filled = _filled(chunks, batches)

    def forward_step(iterator: Iterator[int], model: Any) -> tuple[torch.Tensor, Any]:
        index = next(iterator)
        batch = filled[index]

        # Sum, token count, report: with calculate_per_token_loss the gradient is divided by
        # the count over all micro-batches and replicas, whatever the cut.
        def sum_of_loss(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Result | None]:
            if index < len(batches):
                total, report = loss(output, index)
                return total, batch.action_mask.sum().int(), report
            return output.float().sum() * 0.0, batch.action_mask.sum().int(), None

        return forward_packed(model, batch), sum_of_loss

    results = _run(
        chunks, forward_step, len(filled), forward_only=False, collect_non_loss_data=False
    )
    return results[: len(batches)]


def _filled(chunks: Sequence[Any], batches: Sequence[PackedBatch]) -> Sequence[PackedBatch]:
    """At least one micro-batch per stage, as the interleaved schedule needs; dummies fill up."""
    missing = parallel_state.get_pipeline_model_parallel_world_size() - len(batches)
    if len(chunks) == 1 or missing <= 0:
        return batches
    like = batches[0]
    length = parallel_state.get_tensor_model_parallel_world_size()
    dummy = PackedBatch(
        tokens=like.tokens.new_zeros(length),
        cu_seqlens=like.cu_seqlens.new_tensor([0, length]),
        action_mask=like.action_mask.new_zeros(length),
        engine_log_probs=like.engine_log_probs.new_zeros(length),
        samples=like.samples[:0],
    )
    return [*batches, *[dummy] * missing]


def _group_size(num_micro_batches: int, num_stages: int) -> int:
    """Micro-batches that pass one chunk before the next chunk's turn: as few as possible.

    The schedule wants at least one per stage in every group, the last one included.
    """
    return next(
        size
        for size in range(num_stages, num_micro_batches + 1)
        if not 0 < num_micro_batches % size < num_stages
    )


def _run(
    chunks: Sequence[Any],
    forward_step: Callable[..., Any],
    num_micro_batches: int,
    *,
    forward_only: bool,
    collect_non_loss_data: bool,
) -> list[Any]:
    iterators = [iter(range(num_micro_batches)) for _ in chunks]
    if len(chunks) > 1:
        num_stages = parallel_state.get_pipeline_model_parallel_world_size()
        config = get_model_config(chunks[0])
        config.microbatch_group_size_per_vp_stage = _group_size(num_micro_batches, num_stages)
    results: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks),
        num_microbatches=num_micro_batches,
        seq_length=0,  # not read: the stages tell each other the shapes (variable_seq_lengths)
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=collect_non_loss_data,
    )
    return results
