"""Groups: how the driver speaks to a role or to the engines, whatever runtime carries the call.

``group.call(method, arguments)`` runs one method on every rank of every replica, with one
argument per replica, and gives back one result per replica. A group knows which ranks form
a replica and which of them answers; it does not know how a call travels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megappo.config.errors import RunFailedError

ENGINE = "engine"
"""Target of the calls to engines; the others are the roles' names."""


class RankError(RunFailedError):
    """A mesh rank failed or died. The text names role, rank, cause and log file."""


@dataclass(frozen=True)
class RankCall:
    """One call for one rank: ``target`` is a role or ``ENGINE``."""

    target: str
    method: str
    argument: Any = None


@dataclass(frozen=True)
class Partners:
    """Ranks outside of a group that take part in one of its methods, as ``target``."""

    target: str
    ranks: Sequence[int]


class Runtime(Protocol):
    """What a group needs from the runtime that made it; the trainer's ``strategy``."""

    def dispatch(self, calls: Mapping[int, RankCall]) -> dict[int, Any]:
        """Run one call on each named rank and return the results by rank.

        Raises:
            ValueError: a rank found a user's error; the text is one line.
            RankError: a rank failed or died.
        """

    def shutdown(self) -> None:
        """End every rank and free what the runtime holds. May be called twice."""


class RankGroup:
    """Replica-wise calls on one target.

    Args:
        runtime: carries the calls.
        target: a role's name, or ``ENGINE``.
        replicas: ranks of each replica.
        answering: the rank of each replica whose result counts.
        partners: who else takes part, by method; they are told what every replica is told.
    """

    def __init__(
        self,
        runtime: Runtime,
        target: str,
        replicas: Sequence[Sequence[int]],
        answering: Sequence[int],
        partners: Mapping[str, Partners] | None = None,
    ) -> None:
        assert len(replicas) == len(answering)
        self.target = target
        self._runtime = runtime
        self._replicas = [list(ranks) for ranks in replicas]
        self._answering = list(answering)
        self._partners = dict(partners or {})

    @property
    def num_replicas(self) -> int:
        """Number of arguments that ``call`` takes and of results that it returns."""
        return len(self._replicas)

    def call(self, method: str, arguments: Sequence[Any] | None = None) -> list[Any]:
        """Run ``method`` on every rank; replica ``i`` gets ``arguments[i]``.

        Returns one result per replica. Raises what ``Runtime.dispatch`` raises.
        """
        if arguments is None:
            arguments = [None] * self.num_replicas
        assert len(arguments) == self.num_replicas, (len(arguments), self.num_replicas)
        calls = {
            rank: RankCall(self.target, method, argument)
            for ranks, argument in zip(self._replicas, arguments, strict=True)
            for rank in ranks
        }
        if (partners := self._partners.get(method)) is not None:
            assert all(argument is arguments[0] for argument in arguments), method
            for rank in partners.ranks:
                calls[rank] = RankCall(partners.target, method, arguments[0])
        results = self._runtime.dispatch(calls)
        return [results[rank] for rank in self._answering]

    def broadcast(self, method: str, argument: Any = None) -> list[Any]:
        """``call`` with the same argument for every replica."""
        return self.call(method, [argument] * self.num_replicas)
