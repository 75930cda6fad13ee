"""The table of bytes per role and rank."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from megappo.metrics.memory import MEMORY_FILE, write_memory_table
from megappo.records import RoleMemory

ACTOR = RoleMemory("actor", 2_000_000, 4_000_000, 4_000_000, 8_000_000)
REF = RoleMemory("ref", 2_000_000, 0, 0, 0)
LAST = RoleMemory("actor", 1_200_000_000, 0, 0, 0)


def test_alike_ranks_share_their_rows(tmp_path: Path) -> None:
    """Each kind of rank once, with its sum; the file says what the terminal does."""
    ranks = [[ACTOR, REF]] * 3 + [[LAST, REF], [ACTOR, REF]]
    table = write_memory_table(ranks, tmp_path / "logs")
    console = Console(width=120, record=True, quiet=True)
    console.print(table)
    text = (tmp_path / "logs" / MEMORY_FILE).read_text()
    rows = [line.replace("\u2502", " ").split() for line in text.splitlines()]
    assert ["0-2,", "4", "actor", "2.0", "4.0", "4.0", "8.0", "18.0"] in rows
    assert ["ref", "2.0", "0.0", "0.0", "0.0", "2.0"] in rows
    assert ["all", "4.0", "4.0", "4.0", "8.0", "20.0"] in rows
    assert ["3", "actor", "1,200.0", "0.0", "0.0", "0.0", "1,200.0"] in rows
    assert sum(row[-6:-5] == ["actor"] for row in rows) == 2
