"""How micro-batches are grouped for the interleaved schedule; it runs in ``distributed/``."""

from __future__ import annotations

import pytest

from megappo.mesh.schedule import _group_size


@pytest.mark.parametrize(
    ("count", "num_stages", "size"),
    [(2, 2, 2), (3, 2, 3), (4, 2, 2), (5, 2, 3), (7, 2, 4), (4, 4, 4), (5, 4, 5), (9, 4, 5)],
)
def test_the_last_group_has_a_micro_batch_for_each_stage(
    count: int, num_stages: int, size: int
) -> None:
    """Five micro-batches for two stages go as 3 + 2, not as 2 + 2 + 1; groups stay small."""
    assert _group_size(count, num_stages) == size
