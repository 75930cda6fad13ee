"""The order of the prompts over a run: seeded, across epochs, resumable by a count alone.

Position ``p`` of the run is prompt ``order(p // E)[p % E]`` for epochs of ``E`` prompts, so
the number of consumed prompts says everything. Does not know what a prompt is made of.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from megappo.records import Prompt


class PromptSource(Protocol):
    """Prompts by index, as ``PromptDataset`` and a list give them."""

    def __len__(self) -> int:
        """Number of prompts."""
        ...

    def __getitem__(self, index: int, /) -> Prompt:
        """The ``index``-th prompt."""
        ...


class PromptStream:
    """Iterator over the batches that are left of a run.

    Every epoch is a new permutation, which depends on the seed and the epoch alone. Batches
    run across epochs; only the run's last one may be partial.
    """

    def __init__(
        self,
        dataset: PromptSource,
        *,
        batch_size: int,
        num_episodes: int,
        seed: int,
        consumed: int = 0,
        max_steps_per_episode: int | None = None,
    ) -> None:
        """Go to a position of the run.

        Args:
            dataset: the prompts.
            batch_size: prompts per step (rollout.batch_size).
            num_episodes: passes over the prompts (train.num_episodes).
            seed: of the order (train.seed).
            consumed: prompts that the run has used before.
            max_steps_per_episode: ends each pass after this many steps; None uses all prompts.

        Raises:
            ValueError: if ``consumed`` lies outside the run, or a size is below 1.
        """
        if batch_size < 1 or num_episodes < 1:
            raise ValueError(
                f"rollout.batch_size = {batch_size} and train.num_episodes = {num_episodes} "
                "must be at least 1"
            )
        if max_steps_per_episode is not None and max_steps_per_episode < 1:
            raise ValueError(
                f"num_update_steps_per_episode = {max_steps_per_episode}, wanted at least 1 or None"
            )
        self._dataset = dataset
        self._batch_size = batch_size
        self._seed = seed
        self._epoch_size = len(dataset)
        if max_steps_per_episode is not None:
            self._epoch_size = min(self._epoch_size, max_steps_per_episode * batch_size)
        self._total = self._epoch_size * num_episodes
        if not 0 <= consumed <= self._total:
            raise ValueError(
                f"consumed_samples = {consumed} is outside this run of {self._total} prompts "
                f"({self._epoch_size} per episode x train.num_episodes = {num_episodes})"
            )
        self._consumed = consumed
        self._epoch = -1
        self._order = np.empty(0, np.int64)

    @property
    def consumed(self) -> int:
        """Prompts handed out since the start of the run, those before a resume included."""
        return self._consumed

    @property
    def num_steps(self) -> int:
        """Batches of the whole run, those before a resume included."""
        return -(-self._total // self._batch_size)

    @property
    def num_steps_left(self) -> int:
        """Batches that are still to come."""
        return -(-(self._total - self._consumed) // self._batch_size)

    def __iter__(self) -> PromptStream:
        """The stream itself: it goes on where it is."""
        return self

    def __next__(self) -> list[Prompt]:
        """The next batch, of ``batch_size`` prompts or what is left of the run."""
        if self._consumed == self._total:
            raise StopIteration
        end = min(self._consumed + self._batch_size, self._total)
        batch = [self._dataset[self._index(p)] for p in range(self._consumed, end)]
        self._consumed = end
        return batch

    def _index(self, position: int) -> int:
        epoch, offset = divmod(position, self._epoch_size)
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng([self._seed, epoch]).permutation(len(self._dataset))
        return int(self._order[offset])
