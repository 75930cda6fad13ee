"""How samples are laid out for a reward model, and where their score is read."""

from __future__ import annotations

import pytest
import torch

from megappo.mesh.scoring import dummy_batch, last_tokens, score_batches

CPU = torch.device("cpu")
SEQUENCES = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [14, 15]]


@pytest.mark.parametrize(
    ("budget", "counts"), [(100, [4]), (8, [2, 2]), (5, [1, 2, 1]), (1, [1] * 4)]
)
@pytest.mark.parametrize("multiple", [1, 2, 4])
def test_every_sample_once_within_the_budget(budget: int, counts: list[int], multiple: int) -> None:
    """Ids stay with their rows; one that is longer than the budget is alone."""
    batches = score_batches(SEQUENCES, token_budget=budget, multiple=multiple, device=CPU)
    assert [len(batch.samples) for batch in batches] == counts
    seen = {}
    for batch in batches:
        assert len(batch.tokens) % multiple == 0 and batch.cu_seqlens[-1] == len(batch.tokens)
        assert len(batch.samples) == 1 or int(batch.cu_seqlens[len(batch.samples)]) <= budget
        bounds = batch.cu_seqlens.tolist()
        for i, row in enumerate(batch.samples.tolist()):
            seen[row] = batch.tokens[bounds[i] : bounds[i + 1]].tolist()
    assert [seen[row] for row in range(4)] == SEQUENCES


@pytest.mark.parametrize("multiple", [1, 4])
def test_the_score_is_at_the_last_real_token(multiple: int) -> None:
    """C20: not at a dummy behind it, nor at the end of the micro-batch."""
    for batch in score_batches(SEQUENCES, token_budget=7, multiple=multiple, device=CPU):
        ends = last_tokens(batch.tokens, batch)
        assert ends.tolist() == [SEQUENCES[row][-1] for row in batch.samples.tolist()]


def test_a_dummy_has_no_score() -> None:
    """It has tokens for the model to run on."""
    batch = dummy_batch(4, CPU)
    assert batch.tokens.tolist() == [0] * 4 and batch.cu_seqlens.tolist() == [0, 4]
    assert last_tokens(batch.tokens, batch).tolist() == []
    assert score_batches([], token_budget=4, multiple=1, device=CPU) == []
