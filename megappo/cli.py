"""The ``megappo`` command: reads the configuration, checks it, and hands it to the trainer.

A ``ValueError`` that megappo itself raised is a user's mistake: one line on stderr and exit
code 2. Anything else is a fault of ours or a vendor's and keeps its traceback.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import NoReturn

from megappo import __version__
from megappo.config import ConfigError, check, load
from megappo.config.errors import SIGNAL_EXIT_BASE, RunFailedError, is_user_error

PROGRAM = "megappo"
USER_ERROR = 2
RUN_FAILED = 1


def train(argv: Sequence[str]) -> int:
    """Train a policy with PPO: ``megappo train --config FILE [--KEY VALUE ...]``."""
    config = load(argv)
    check(config)
    # The one lazy import of our own code: help, --print_config and errors in the
    # configuration need not wait for torch, Ray and Megatron to load.
    from megappo.trainer.build import run

    return run(config).exit_code


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {"train": train}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {PROGRAM} --help")


def _parser() -> _Parser:
    parser = _Parser(
        prog=PROGRAM, description="PPO-RLHF for very large language models on a Megatron 3D mesh."
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, function in COMMANDS.items():
        line = (function.__doc__ or "").splitlines()[0]
        # The command's own parser, config/load.py's, answers its --help.
        commands.add_parser(name, help=line.partition(":")[0], add_help=False)
    return parser


def _run(arguments: list[str]) -> int:
    if arguments and arguments[0] in COMMANDS:
        return COMMANDS[arguments[0]](arguments[1:])
    _parser().parse_args(arguments)  # help, version, or an unknown command
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    received: list[signal.Signals] = []

    # Outside the training loop, which has a better answer. A type of its own would not do for
    # the exception: Ray raises KeyboardInterrupt anew.
    def terminate(number: int, frame: FrameType | None) -> NoReturn:
        received.append(signal.Signals(number))
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        number = received[0] if received else signal.SIGINT
        print(f"{PROGRAM}: {number.name}: stopped, nothing was saved", file=sys.stderr)
        return SIGNAL_EXIT_BASE + number
    except RunFailedError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return RUN_FAILED
    except ValueError as error:
        if not is_user_error(error):
            raise
        print(f"{PROGRAM}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return USER_ERROR
    finally:
        signal.signal(signal.SIGTERM, before)
