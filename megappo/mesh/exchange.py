"""Moves each sample's tokens once, from the rank that generated it to the ranks that train on it.

The driver's ``BatchPlan`` says where every sample goes; every rank reads off it, without
talking to the others, what it has to send and to receive. A sample's tokens go to the first
stage (which embeds them) and its tokens, action mask and engine log-probs to the last stage
(which computes log-probs and losses) of one replica; middle stages learn lengths only, from
the plan. There is one point-to-point message per pair of ranks, and a local copy where the
holder is itself a destination. A holder need not be a rank of the mesh: in the group that
tokens travel in, the mesh's ranks come first, and whoever comes after them only sends.

Then the micro-batches are laid out: sequences end to end in the plan's order. This file does
not know what a model or a loss is.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from megappo.records import BatchPlan, PackedBatch, Rollouts
from megappo.reshard.transport import Message, default_group, exchange
from megappo.topology import Topology

# Rows of a message [rows, T] (int32). A stage that only embeds is sent the first row alone.
TOKENS, LOG_PROBS, ACTION_MASK = range(3)


def load_micro_batches(
    plan: BatchPlan,
    rollouts: Rollouts | None,
    topology: Topology,
    rank: int,
    *,
    multiple: int,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> list[list[PackedBatch]]:
    """Exchange the batch's tokens and lay out this rank's micro-batches.

    Every rank of the mesh calls this together, with the same plan, while holders outside of
    the mesh call ``send_tokens``.

    Args:
        plan: where every sample goes.
        rollouts: what this rank holds under ``plan.key``; None if it holds nothing.
        topology: the mesh.
        rank: this rank.
        multiple: T of every micro-batch is rounded up to a multiple of this.
        device: where the micro-batches live.
        group: what tokens travel in; its first ranks are the mesh's. The default group if None.

    Returns:
        ``[step][i]``, the i-th micro-batch of each optimizer step on this rank's replica.

    Raises:
        ValueError: when a rank does not hold a sample that the plan expects it to hold.
    """
    width = message_width(topology, rank)
    inbox = _exchange(plan, rollouts, topology, rank, width, device, group)
    rows = [source_rows(plan, source, topology.coordinates(rank).dp) for source in sorted(inbox)]
    # Every row of the replica starts somewhere in the flat received array.
    order = np.concatenate(rows) if rows else np.empty(0, np.int64)
    lengths = _lengths(plan)
    starts = np.zeros(len(lengths), np.int64)
    starts[order] = _offsets(lengths[order])[:-1]
    if inbox:
        flat = torch.cat([inbox[source] for source in sorted(inbox)], dim=1)
    else:
        flat = torch.empty(width, 0, dtype=torch.int32, device=device)
    replica = topology.coordinates(rank).dp
    return [
        [
            _pack(flat, starts, lengths, micro_batch_rows(plan, step, replica, index), multiple)
            for index in range(int(count))
        ]
        for step, count in enumerate(plan.num_micro_batches)
    ]


def send_tokens(
    plan: BatchPlan,
    rollouts: Rollouts | None,
    topology: Topology,
    rank: int,
    *,
    device: torch.device,
    group: dist.ProcessGroup,
) -> None:
    """The part of a rank beyond the mesh: send what it holds to the ranks that train on it.

    Args as in ``load_micro_batches``; ``rank`` is at least the mesh's size.

    Raises:
        ValueError: when this rank does not hold a sample that the plan expects it to hold.
    """
    assert rank >= topology.world_size, (rank, topology)
    for work in exchange(group, [], _outgoing(plan, rollouts, topology, rank, device)):
        work.wait()


def message_width(topology: Topology, rank: int) -> int:
    """Rows of the messages to ``rank``: 3 on the last stage, 1 on the first, 0 in the middle."""
    if topology.is_last_stage(rank):
        return 3
    return 1 if topology.is_first_stage(rank) else 0


def source_rows(plan: BatchPlan, source: int, replica: int) -> np.ndarray:
    """Plan rows (int64, ascending) that ``source`` holds and ``replica`` trains on."""
    return np.nonzero((plan.holder_ranks == source) & (plan.replicas == replica))[0]


def micro_batch_rows(plan: BatchPlan, step: int, replica: int, index: int) -> np.ndarray:
    """Plan rows (int64, ascending) of one micro-batch."""
    here = (plan.steps == step) & (plan.replicas == replica) & (plan.micro_batches == index)
    return np.nonzero(here)[0]


def _lengths(plan: BatchPlan) -> np.ndarray:
    total: np.ndarray = plan.prompt_lens + plan.response_lens
    return total


def _offsets(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def _flat_index(starts: np.ndarray, lengths: np.ndarray) -> torch.Tensor:
    """Positions of the elements of ragged rows in a flat array, rows end to end."""
    offsets = _offsets(lengths)
    index = np.repeat(starts - offsets[:-1], lengths) + np.arange(offsets[-1])
    return torch.from_numpy(index)


def _message(
    plan: BatchPlan, rollouts: Rollouts | None, rank: int, rows: np.ndarray
) -> torch.Tensor:
    """The samples at ``rows`` end to end, as int32 [3, T]."""
    if rollouts is None:
        raise ValueError(
            f"rank {rank} holds no rollouts under {plan.key!r}, but the plan expects them"
        )
    held = {int(sample): i for i, sample in enumerate(rollouts.sample_ids.tolist())}
    wanted = plan.sample_ids[rows].tolist()
    missing = [sample for sample in wanted if sample not in held]
    if missing:
        raise ValueError(f"rank {rank} does not hold samples {missing[:5]} under {plan.key!r}")
    local = np.array([held[sample] for sample in wanted], np.int64)
    offsets = rollouts.cu_seqlens.cpu().numpy()
    lengths = offsets[local + 1] - offsets[local]
    if not np.array_equal(lengths, _lengths(plan)[rows]):
        raise ValueError(f"rank {rank} holds other lengths under {plan.key!r} than the plan says")
    index = _flat_index(offsets[local], lengths)
    message = torch.empty(3, len(index), dtype=torch.int32)
    message[TOKENS] = rollouts.tokens.cpu()[index]
    message[LOG_PROBS] = rollouts.log_probs.cpu()[index].view(torch.int32)
    message[ACTION_MASK] = rollouts.action_mask.cpu()[index]
    return message


def _exchange(
    plan: BatchPlan,
    rollouts: Rollouts | None,
    topology: Topology,
    rank: int,
    width: int,
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> dict[int, torch.Tensor]:
    """Send and receive; returns int32 [width, T] by source rank, in the order of plan rows."""
    lengths = _lengths(plan)
    replica = topology.coordinates(rank).dp
    inbox: dict[int, torch.Tensor] = {}
    incoming: list[Message] = []
    outgoing: list[Message] = []
    if width:
        for source in np.unique(plan.holder_ranks[plan.replicas == replica]).tolist():
            if source != rank:
                count = int(lengths[source_rows(plan, source, replica)].sum())
                inbox[source] = torch.empty(width, count, dtype=torch.int32, device=device)
                incoming.append((inbox[source], source))
    for message, target in _outgoing(plan, rollouts, topology, rank, device):
        if target == rank:
            inbox[rank] = message
        else:
            outgoing.append((message, target))
    if incoming or outgoing:
        for work in exchange(group or default_group(), incoming, outgoing):
            work.wait()
    return inbox


def _outgoing(
    plan: BatchPlan,
    rollouts: Rollouts | None,
    topology: Topology,
    rank: int,
    device: torch.device,
) -> list[Message]:
    """What ``rank`` holds, once for every rank that reads it, itself included."""
    messages: list[Message] = []
    for replica in range(topology.dp):
        rows = source_rows(plan, rank, replica)
        if not len(rows):
            continue
        message = _message(plan, rollouts, rank, rows).to(device)
        for target in topology.replica_ranks(replica):
            if width := message_width(topology, target):
                messages.append((message[:width], target))
    return messages


def _pack(
    flat: torch.Tensor, starts: np.ndarray, lengths: np.ndarray, rows: np.ndarray, multiple: int
) -> PackedBatch:
    """Lay sequences end to end, with a dummy tail up to a multiple (or dummies alone).

    Args:
        flat: int32 [width, T] of this rank's replica; width 0 on a middle stage.
        starts: int64 [N], where each plan row starts in ``flat``.
        lengths: int64 [N].
        rows: int64 [S'], the plan rows of this micro-batch.
        multiple: what T is rounded up to a multiple of.
    """
    real = int(lengths[rows].sum())
    total = max(-(-real // multiple), 1) * multiple
    ends = lengths[rows].tolist() + ([total - real] if total > real else [])
    columns = torch.zeros(3, total, dtype=torch.int32, device=flat.device)
    if len(flat):
        index = _flat_index(starts[rows], lengths[rows]).to(flat.device)
        columns[: len(flat), :real] = flat[:, index]
    return PackedBatch(
        tokens=columns[TOKENS].long(),
        cu_seqlens=torch.from_numpy(_offsets(np.array(ends, np.int64))).to(
            flat.device, torch.int32
        ),
        action_mask=columns[ACTION_MASK].bool(),
        engine_log_probs=columns[LOG_PROBS].view(torch.float32),
        samples=torch.from_numpy(rows).to(flat.device),
    )
