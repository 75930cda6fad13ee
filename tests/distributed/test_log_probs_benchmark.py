"""The benchmark of log-probs: what it says of memory is what the chunk and the gradient need."""

from __future__ import annotations

import json

import pytest

from benchmarks.log_probs import main, tokens_of


@pytest.mark.parametrize("tp", [1, 2])
def test_peak_is_the_gradient_and_a_few_chunks(tp: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Far below the full softmax, which has at least three float32 copies of all logits."""
    main(f"--tokens 256 --vocab 32k --chunk-tokens 32 --runs 1 --tp {tp}".split())
    line = json.loads(capsys.readouterr().out)
    assert line["gradient_mb"] == pytest.approx(2 * 256 * 32.768 / 1e3 / tp, abs=0.1)
    assert line["peak_mb"] < line["gradient_mb"] + 3 * line["chunk_mb"] + 8
    assert line["full_peak_mb"] > 3 * 4 * 256 * 32.768 / 1e3


def test_sizes() -> None:
    """A k is 1,024."""
    assert tokens_of("128k") == 131072 and tokens_of("100") == 100
