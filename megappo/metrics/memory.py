"""The table of what every role takes on every rank, as a run shows it when it starts.

Ranks that hold as much as each other share their rows, so that a thousand ranks fill no
more than a screen. Knows bytes and names only.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megappo.records import RoleMemory

MEMORY_FILE = "memory.txt"


def write_memory_table(ranks: Sequence[Sequence[RoleMemory]], folder: Path) -> Table:
    """Write ``memory.txt`` into a folder.

    Args:
        ranks: the roles of every rank.
        folder: made if it is not there.

    Returns:
        The table, to be shown.
    """
    table = memory_table(ranks)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / MEMORY_FILE).open("w", encoding="utf-8") as file:
        Console(file=file, width=120).print(table)
    return table


def memory_table(ranks: Sequence[Sequence[RoleMemory]]) -> Table:
    """Roles and their sum, for each kind of rank, in megabytes (10^6 bytes)."""
    table = Table(title="memory per rank, MB (activations and engines not counted)")
    table.add_column("ranks")
    table.add_column("role")
    for name in ("parameters", "gradients", "main parameters", "optimizer state", "all"):
        table.add_column(name, justify="right")
    kinds: dict[tuple[RoleMemory, ...], list[int]] = {}
    for rank, roles in enumerate(ranks):
        kinds.setdefault(tuple(roles), []).append(rank)
    for roles, members in kinds.items():
        for row in (*roles, _sum(roles)):
            whose = _ranges(members) if row is roles[0] else ""
            table.add_row(
                whose, row.role, *map(_megabytes, _bytes(row)), end_section=row not in roles
            )
    return table


def _bytes(row: RoleMemory) -> tuple[int, ...]:
    return row.parameters, row.gradients, row.main_parameters, row.optimizer_state, row.total


def _sum(roles: Sequence[RoleMemory]) -> RoleMemory:
    columns = zip(*(_bytes(role)[:-1] for role in roles), strict=True)
    return RoleMemory("all", *map(sum, columns))


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f}"


def _ranges(ranks: Sequence[int]) -> str:
    """``0-3, 8``."""
    ends = [i for i, (a, b) in enumerate(pairwise(ranks)) if b != a + 1]
    firsts, lasts = [0, *(i + 1 for i in ends)], [*ends, len(ranks) - 1]
    return ", ".join(
        str(ranks[a]) if a == b else f"{ranks[a]}-{ranks[b]}"
        for a, b in zip(firsts, lasts, strict=True)
    )
