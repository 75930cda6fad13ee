"""What the tensors of all ranks are like: checked against the layouts, then agreed on.

Every rank tells its tensors' dtypes and whether they are contiguous, so that all make the
same schedule; a rank whose tensors are not those of its layout says so to all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist

from megappo.reshard.schedule import Formats
from megappo.reshard.transport import gather
from megappo.weights.layout import Ints, Layout
from megappo.weights.plan import Plan

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ITEMSIZES = np.array([d.itemsize for d in DTYPES])
# Names that an error lists of each kind.
MAX_NAMES = 10

Named = Mapping[str, torch.Tensor]


class Side:
    """One rank's tensors of one of a plan's layouts.

    Args:
        what: What to call the layout in errors.
        layout: Source or destination.
        rank: Whose tensors.

    Attributes:
        most: The most tensors that any rank holds.
    """

    def __init__(self, what: str, layout: Layout, rank: int) -> None:
        self._what = what
        self._rank = rank
        self._ids = layout.local_ids(rank)
        self._shapes = layout.local_shapes(rank)
        self.most = _most_tensors(layout)

    def by_id(self, tensors: Named) -> dict[int, torch.Tensor]:
        """The tensors by their index in the layout."""
        return {i: tensors[name] for name, i in self._ids.items()}

    def codes(self, tensors: Named) -> list[int]:
        """Dtype and contiguity of each tensor as one number, in the layout's order."""
        return [
            2 * DTYPES.index(tensors[name].dtype) + tensors[name].is_contiguous()
            for name in self._ids
        ]

    def mismatch(self, tensors: Named) -> str | None:
        """Why these tensors are not those of the layout; None when they are."""
        where = f"rank {self._rank}: {self._what} tensor"
        here = sorted(tensors.keys() - self._ids.keys())
        there = sorted(self._ids.keys() - tensors.keys())
        if here or there:
            return (
                f"{where}s are not those of the layout: "
                f"only here: {_listing(here)}; only in the layout: {_listing(there)}"
            )
        for name, shape in self._shapes.items():
            found = tensors[name]
            if found.shape != shape:
                return f"{where} {name} has shape {tuple(found.shape)}, the layout says {shape}"
            if found.dtype not in DTYPES:
                known = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
                return f"{where} {name} has type {found.dtype}; weights move as {known}"
        return None


def agree(
    sides: Sequence[tuple[Side, Named]], group: dist.ProcessGroup, device: torch.device
) -> Ints:
    """A table of all ranks' tensors, the same on all ranks: int64 [ranks, 1 + S + D].

    Args:
        sides: This rank's tensors of the source layout, then those of the destination layout.
        group: Of all ranks of the plan.
        device: That the group's tensors are on.

    Raises:
        ValueError: on all ranks, when one rank's tensors are not those of its layout.
    """
    problems = [p for side, tensors in sides if (p := side.mismatch(tensors))]
    own = np.zeros(1 + sum(side.most for side, _ in sides), dtype=np.uint8)
    own[0] = bool(problems)
    first = 1
    for side, tensors in sides:
        codes = [] if problems else side.codes(tensors)
        own[first : first + len(codes)] = codes
        first += side.most
    table = gather(group, torch.from_numpy(own).to(device)).cpu().numpy().astype(np.int64)
    if problems:
        raise ValueError(problems[0])
    if table[:, 0].any():
        ranks = ", ".join(map(str, np.flatnonzero(table[:, 0])))
        raise ValueError(
            f"weights were not moved: tensors do not fit their layout on rank {ranks}, "
            "whose log says which"
        )
    return table


def formats(plan: Plan, table: Ints) -> Formats:
    """The columns of the table by the tensors of the layouts."""
    first = 1 + _most_tensors(plan.source)
    source = _per_tensor(plan.source, table[:, 1:first])
    destination = _per_tensor(plan.destination, table[:, first:])
    return Formats(
        source_type=source // 2,
        source_dense=source % 2 == 1,
        destination_type=destination // 2,
        destination_dense=destination % 2 == 1,
        itemsize=ITEMSIZES[destination // 2],
    )


def _most_tensors(layout: Layout) -> int:
    return int(np.bincount(layout.local_rank, minlength=1).max())


def _per_tensor(layout: Layout, rows: Ints) -> Ints:
    """Picks each local tensor's entry from rows that list every rank's tensors in order."""
    order = np.argsort(layout.local_rank, kind="stable")
    ranks = layout.local_rank[order]
    nth = np.empty_like(order)
    nth[order] = np.arange(len(order)) - np.searchsorted(ranks, ranks)
    picked: Ints = rows[layout.local_rank, nth]
    return picked


def _listing(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more if names else "none"
