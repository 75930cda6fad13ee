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
from megatron.core.pipeline_parallel import get_forward_backward_func

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

    def forward_step(iterator: Iterator[PackedBatch], model: Any) -> tuple[torch.Tensor, Any]:
        batch = next(iterator)

        # With collect_non_loss_data the schedule passes this keyword.
        def collect(output: torch.Tensor, non_loss_data: bool) -> torch.Tensor:
            return read(output, batch)

        return forward_packed(model, batch), collect

    with torch.no_grad():
        return _run(
            chunks,
            forward_step,
            iter(batches),
            len(batches),
            forward_only=True,
            collect_non_loss_data=True,
        )


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

    def forward_step(iterator: Iterator[int], model: Any) -> tuple[torch.Tensor, Any]:
        index = next(iterator)
        batch = batches[index]

        # Sum, token count, report: with calculate_per_token_loss the gradient is divided by
        # the count over all micro-batches and replicas, whatever the cut.
        def sum_of_loss(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Result]:
            total, report = loss(output, index)
            return total, batch.action_mask.sum().int(), report

        return forward_packed(model, batch), sum_of_loss

    return _run(
        chunks,
        forward_step,
        iter(range(len(batches))),
        len(batches),
        forward_only=False,
        collect_non_loss_data=False,
    )


def _run(
    chunks: Sequence[Any],
    forward_step: Callable[..., Any],
    iterator: Iterator[Any],
    num_micro_batches: int,
    *,
    forward_only: bool,
    collect_non_loss_data: bool,
) -> list[Any]:
    results: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterator,
        model=list(chunks),
        num_microbatches=num_micro_batches,
        seq_length=0,  # not read: the stages tell each other the shapes (variable_seq_lengths)
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=collect_non_loss_data,
    )
    return results
