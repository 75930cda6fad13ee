"""Layout of micro-batches on one rank: order, padding, dummies, and refusals."""

from __future__ import annotations

import pytest
import torch

from megappo.mesh.exchange import load_micro_batches, message_width
from megappo.records import BatchPlan, PackedBatch, Rollouts
from megappo.topology import Topology
from tests.support.rollouts import held_by, make_plan, make_rollouts

CPU = torch.device("cpu")


def load(plan: BatchPlan, rollouts: Rollouts | None, multiple: int = 1) -> list[list[PackedBatch]]:
    """Micro-batches of a mesh of one rank."""
    return load_micro_batches(plan, rollouts, Topology(1), 0, multiple=multiple, device=CPU)


def plan_of_one_rank(rollouts: Rollouts, micro_batches: list[int], count: int) -> BatchPlan:
    """A plan of one step for a mesh of one rank."""
    zeros = [0] * len(micro_batches)
    return make_plan(
        rollouts,
        holder_ranks=zeros,
        steps=zeros,
        replicas=zeros,
        micro_batches=micro_batches,
        num_micro_batches=[count],
    )


def test_sequences_lie_end_to_end_in_plan_order() -> None:
    """Tokens, masks and log-probs of each sample arrive whole, whatever order the store has."""
    rollouts = make_rollouts([3, 1, 2, 4], [2, 5, 0, 1])
    plan = plan_of_one_rank(rollouts, [1, 0, 1, 0], 2)
    first, second = load(plan, held_by(rollouts, [2, 0, 3, 1]))[0]
    offsets = rollouts.cu_seqlens.tolist()
    for batch, rows in ((first, [1, 3]), (second, [0, 2])):
        index = torch.cat([torch.arange(offsets[i], offsets[i + 1]) for i in rows])
        assert batch.samples.tolist() == rows
        assert batch.cu_seqlens.tolist() == [
            0,
            *torch.tensor([offsets[i + 1] - offsets[i] for i in rows]).cumsum(0).tolist(),
        ]
        assert torch.equal(batch.tokens, rollouts.tokens[index])
        assert torch.equal(batch.action_mask, rollouts.action_mask[index])
        assert torch.equal(batch.engine_log_probs, rollouts.log_probs[index])


@pytest.mark.parametrize("multiple", [2, 4, 7])
def test_a_dummy_sequence_rounds_the_length_up(multiple: int) -> None:
    """The tail is a sequence of its own, without actions and without a sample."""
    rollouts = make_rollouts([3, 2], [2, 4])
    (batch,) = load(plan_of_one_rank(rollouts, [0, 0], 1), rollouts, multiple)[0]
    assert len(batch.tokens) % multiple == 0
    assert 0 < len(batch.tokens) - 11 < multiple
    assert batch.cu_seqlens.tolist() == [0, 5, 11, len(batch.tokens)]
    assert batch.samples.tolist() == [0, 1]
    assert not batch.action_mask[11:].any() and not batch.engine_log_probs[11:].any()


def test_no_dummy_where_the_length_fits() -> None:
    """A length that is a multiple already gets no extra sequence."""
    rollouts = make_rollouts([3], [5])
    (batch,) = load(plan_of_one_rank(rollouts, [0], 1), rollouts, 4)[0]
    assert batch.cu_seqlens.tolist() == [0, 8]


@pytest.mark.parametrize("multiple", [1, 2, 4])
def test_a_micro_batch_without_samples_is_a_dummy(multiple: int) -> None:
    """The replica still runs as many micro-batches as the plan says."""
    rollouts = make_rollouts([3], [5])
    first, second = load(plan_of_one_rank(rollouts, [1], 2), rollouts, multiple)[0]
    assert len(first.tokens) == multiple and len(first.samples) == 0
    assert not first.action_mask.any()
    assert second.samples.tolist() == [0]


def test_every_step_has_its_own_micro_batches() -> None:
    """Steps do not mix, and an empty response keeps its prompt."""
    rollouts = make_rollouts([2, 3, 1], [0, 1, 4])
    plan = make_plan(
        rollouts,
        holder_ranks=[0, 0, 0],
        steps=[1, 0, 1],
        replicas=[0, 0, 0],
        micro_batches=[0, 0, 1],
        num_micro_batches=[1, 2],
    )
    steps = load(plan, rollouts)
    assert [[b.samples.tolist() for b in step] for step in steps] == [[[1]], [[0], [2]]]
    assert not steps[1][0].action_mask.any() and len(steps[1][0].tokens) == 2


def test_what_a_rank_does_not_hold_is_named() -> None:
    """A missing store, a missing sample and another length are errors, not silence."""
    rollouts = make_rollouts([3, 2], [2, 4])
    plan = plan_of_one_rank(rollouts, [0, 0], 1)
    with pytest.raises(ValueError, match="rank 0 holds no rollouts under 'batch'"):
        load(plan, None)
    with pytest.raises(ValueError, match=r"does not hold samples \[101\]"):
        load(plan, held_by(rollouts, [0]))
    with pytest.raises(ValueError, match="other lengths"):
        load(plan, make_rollouts([3, 2], [2, 5]))


def test_only_stages_that_read_tokens_are_sent_any() -> None:
    """Last stage: three rows; first: tokens; middle: nothing; a lone stage is first and last."""
    topology = Topology(8, tp=2, pp=4)
    widths = [message_width(topology, topology.rank(pp, 0, 1)) for pp in range(4)]
    assert widths == [1, 0, 0, 3]
    assert message_width(Topology(2, tp=2), 1) == 3
