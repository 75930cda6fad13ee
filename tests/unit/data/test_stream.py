"""The order of the prompts, and resuming from a count alone (C40)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megappo.data.stream import PromptStream
from megappo.records import Prompt


def prompts(count: int) -> list[Prompt]:
    """Prompts with ids 0, 1, ..."""
    return [Prompt(index, (index,), str(index)) for index in range(count)]


def ids(stream: PromptStream) -> list[list[int]]:
    """Prompt ids of all batches that are left."""
    return [[prompt.prompt_id for prompt in batch] for batch in stream]


def stream_of(count: int, batch: int, episodes: int, consumed: int = 0) -> PromptStream:
    """A stream with seed 7."""
    return PromptStream(
        prompts(count), batch_size=batch, num_episodes=episodes, seed=7, consumed=consumed
    )


@pytest.mark.parametrize(
    ("count", "batch", "episodes", "steps_before"),
    [(10, 4, 2, 3), (10, 4, 3, 1), (7, 7, 2, 1), (5, 8, 4, 2), (3, 2, 3, 4), (1, 1, 3, 2)],
)
def test_c40_resume_is_the_uninterrupted_run(
    count: int, batch: int, episodes: int, steps_before: int
) -> None:
    """The batches after a resume are those of the run that was not interrupted."""
    whole = ids(stream_of(count, batch, episodes))
    consumed = sum(len(ids_) for ids_ in whole[:steps_before])
    resumed = stream_of(count, batch, episodes, consumed)
    assert ids(resumed) == whole[steps_before:]
    assert resumed.consumed == count * episodes
    assert resumed.num_steps == len(whole)


def test_c40_position_within_the_second_epoch() -> None:
    """10 prompts, batch 4, 12 consumed: the next batch starts at epoch 2, offset 2."""
    flat = [i for batch in ids(stream_of(10, 10, 2)) for i in batch]
    stream = stream_of(10, 4, 2, consumed=12)
    assert [prompt.prompt_id for prompt in next(stream)] == flat[12:16]
    assert stream.consumed == 16
    assert flat[:10] != flat[10:] and sorted(flat[:10]) == sorted(flat[10:]) == list(range(10))


@given(
    count=st.integers(1, 12),
    batch=st.integers(1, 15),
    episodes=st.integers(1, 4),
    data=st.data(),
)
def test_every_prompt_once_per_epoch(
    count: int, batch: int, episodes: int, data: st.DataObject
) -> None:
    """Only the last batch is partial; every epoch holds every prompt once; any count resumes."""
    whole = ids(stream_of(count, batch, episodes))
    flat = [i for ids_ in whole for i in ids_]
    assert all(len(ids_) == batch for ids_ in whole[:-1])
    for epoch in range(episodes):
        assert sorted(flat[epoch * count : (epoch + 1) * count]) == list(range(count))
    consumed = data.draw(st.integers(0, count * episodes))
    rest = ids(stream_of(count, batch, episodes, consumed))
    assert [i for ids_ in rest for i in ids_] == flat[consumed:]


def test_seeds_differ() -> None:
    """The order depends on the seed."""
    orders = {
        tuple(
            p.prompt_id
            for p in next(PromptStream(prompts(9), batch_size=9, num_episodes=1, seed=s))
        )
        for s in range(5)
    }
    assert len(orders) == 5


def test_capped_episodes() -> None:
    """max_steps_per_episode ends each pass early; a cap beyond the pass changes nothing."""

    def capped(steps: int | None, consumed: int = 0) -> PromptStream:
        return PromptStream(
            prompts(10),
            batch_size=4,
            num_episodes=2,
            seed=7,
            consumed=consumed,
            max_steps_per_episode=steps,
        )

    whole = ids(capped(2))
    assert [len(batch) for batch in whole] == [4, 4, 4, 4] and capped(2).num_steps == 4
    assert whole[:2] == ids(capped(None))[:2]
    assert ids(capped(2, consumed=8)) == whole[2:]
    assert ids(capped(3)) == ids(capped(None))


@pytest.mark.parametrize("consumed", [-1, 21, 1000])
def test_consumed_outside_the_run(consumed: int) -> None:
    """A count that the run does not have is refused with both numbers."""
    with pytest.raises(ValueError, match=f"consumed_samples = {consumed} .* run of 20 prompts"):
        stream_of(10, 4, 2, consumed)


def test_wrong_sizes() -> None:
    """Sizes below 1 are refused by key."""
    with pytest.raises(ValueError, match="rollout.batch_size = 0"):
        stream_of(10, 0, 2)
    with pytest.raises(ValueError, match="train.num_episodes = 0"):
        stream_of(10, 4, 0)
    with pytest.raises(ValueError, match="num_update_steps_per_episode = 0"):
        PromptStream(prompts(3), batch_size=1, num_episodes=1, seed=0, max_steps_per_episode=0)


def test_the_end_stays_the_end() -> None:
    """A finished stream gives nothing more."""
    stream = stream_of(3, 2, 1, consumed=3)
    assert ids(stream) == [] and ids(stream) == []


@pytest.mark.parametrize(("consumed", "left"), [(0, 5), (4, 4), (7, 4), (8, 3), (19, 1), (20, 0)])
def test_steps_that_are_left(consumed: int, left: int) -> None:
    """Counted from the position, which need not be at the end of a batch."""
    stream = stream_of(10, 4, 2, consumed)
    assert stream.num_steps_left == left == len(ids(stream))
    assert stream.num_steps_left == 0
