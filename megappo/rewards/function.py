"""A reward written by the user: a Python function in a file of theirs.

The file is loaded under a name of its own, may import its neighbours, and is never
installed. Whatever the function does wrong becomes one line that names the function, the
line of the file, the sample and the value. Called by the driver only.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import inspect
import math
import numbers
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from megappo.rewards.protocol import RewardError, RewardSample, Score
from megappo.rewards.siblings import SiblingModules

DEFAULT_NAME = "reward_func"
_WANTED = "one number per sample, or one dict per sample with 'reward' and other named numbers"


def load_reward_function(spec: str) -> PythonReward:
    """Load ``path.py`` (its ``reward_func``) or ``path.py:name``.

    The function takes the list of :class:`~megappo.rewards.protocol.RewardSample` and
    returns (or, if it is async, awaits) a list with one number, or one dict with ``reward``
    and other named numbers, for each.

    Raises:
        ValueError: if the file or the function is missing, or the file fails to import.
    """
    path, name = _split(spec)
    if not path.is_file():
        raise ValueError(
            f"reward.remote_url = {spec!r}: no file {path}; wanted path.py or path.py:name"
        )
    siblings = SiblingModules(path.parent)
    module = _import(path, siblings)
    function = vars(module).get(name)
    if not callable(function):
        own = [k for k, v in vars(module).items() if inspect.isfunction(v) and k[0] != "_"]
        raise ValueError(
            f"reward.remote_url = {spec!r}: {path} has no function {name!r}; "
            f"it has: {', '.join(own) or 'none'}"
        )
    reward = PythonReward(function, name, path, siblings)
    try:
        inspect.signature(function).bind([])
    except TypeError as error:
        raise ValueError(
            f"reward function {reward.place} must take one argument, the list of samples: {error}"
        ) from error
    return reward


class PythonReward:
    """A user's function as a ``RewardFunction``.

    Attributes:
        place: ``name (file:line)``, as messages show it.
    """

    def __init__(
        self, function: Callable[..., Any], name: str, path: Path, siblings: SiblingModules
    ) -> None:
        """Wrap a function that was loaded from ``path``."""
        self._function = function
        self._name = name
        self._path = path
        self._siblings = siblings
        code = inspect.unwrap(function)
        line = code.__code__.co_firstlineno if inspect.isfunction(code) else 1
        self.place = f"{name} ({path}:{line})"

    def __call__(self, samples: Sequence[RewardSample], /) -> list[Score]:
        """Score the samples, empty responses included.

        Raises:
            RewardError: if the function raises, or returns anything but what is wanted.
        """
        answers = self._ask(list(samples))
        if len(answers) != len(samples):
            raise RewardError(
                f"reward function {self.place} returned {len(answers)} scores for "
                f"{len(samples)} samples; wanted {_WANTED}"
            )
        return [
            self._score(index, sample, answer)
            for index, (sample, answer) in enumerate(zip(samples, answers, strict=True))
        ]

    def _ask(self, samples: list[RewardSample]) -> list[Any]:
        with self._siblings.visible():
            try:
                answers = self._function(samples)
                if inspect.iscoroutine(answers):
                    answers = asyncio.run(answers)
            except (Exception, SystemExit) as error:  # the user's code may raise anything
                raise RewardError(
                    f"reward function {self._name} ({self._path}:{_fault_line(error, self._path)}) "
                    f"raised {_describe(error)}"
                ) from error
        if hasattr(answers, "tolist"):  # a tensor or an array
            answers = answers.tolist()
        if not isinstance(answers, (list, tuple)):
            raise RewardError(
                f"reward function {self.place} returned a {type(answers).__name__} "
                f"({answers!r:.80}); wanted a list with {_WANTED}"
            )
        return list(answers)

    def _score(self, index: int, sample: RewardSample, answer: Any) -> Score:
        if not isinstance(answer, Mapping):
            return Score(self._number(index, sample, answer, "the reward"))
        if "reward" not in answer:
            fields = ", ".join(repr(name) for name in answer) or "none"
            self._refuse(index, sample, f"a dict without 'reward'; its fields: {fields}")
        values = {
            str(name): self._number(index, sample, value, repr(name))
            for name, value in answer.items()
        }
        return Score(values.pop("reward"), values)

    def _number(self, index: int, sample: RewardSample, value: Any, what: str) -> float:
        try:
            plain = value.item() if hasattr(value, "item") else value  # numpy and torch scalars
            number = float(plain) if isinstance(plain, numbers.Real) else math.nan
        except (ValueError, RuntimeError, OverflowError):  # many elements; too large an integer
            number = math.nan
        if not math.isfinite(number):
            self._refuse(index, sample, f"{what} is {value!r:.80}, wanted a finite number")
        return number

    def _refuse(self, index: int, sample: RewardSample, reason: str) -> NoReturn:
        raise RewardError(
            f"reward function {self.place}: sample {index} (prompt {sample.prompt_id}): {reason}"
        )


def _split(spec: str) -> tuple[Path, str]:
    path, colon, name = spec.rpartition(":")
    if colon and name.isidentifier() and path.endswith(".py"):
        return Path(path), name
    return Path(spec), DEFAULT_NAME


def _import(path: Path, siblings: SiblingModules) -> ModuleType:
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]
    name = f"megappo_reward_{digest}"  # no other module has it, so it can stay registered
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"reward.remote_url: {path} is not a Python file (wanted *.py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up
    try:
        with siblings.visible():
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        del sys.modules[name]
        raise ValueError(
            f"reward file {path}:{_fault_line(error, path)} cannot be imported: {_describe(error)}"
        ) from error
    return module


def _fault_line(error: BaseException, path: Path) -> int:
    """Last line of the user's file that the error came through."""
    if isinstance(error, SyntaxError) and error.filename and Path(error.filename).name == path.name:
        return error.lineno or 1
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame.lineno for frame in frames if Path(frame.filename).resolve() == path.resolve()]
    return (own[-1] if own else None) or 1


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
