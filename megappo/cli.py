"""The ``megappo`` command: reads the configuration, checks it, and hands it to the trainer.

A ``ValueError`` that megappo itself raised is a user's mistake: one line on stderr and exit
code 2. Anything else is a fault of ours or a vendor's and keeps its traceback.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from megappo import __version__
from megappo.config import ConfigError, check, load

PROGRAM = "megappo"
USER_ERROR = 2
INTERRUPTED = 130


def train(argv: Sequence[str]) -> None:
    """Train a policy with PPO: ``megappo train --config FILE [--KEY VALUE ...]``."""
    config = load(argv)
    check(config)
    # The one lazy import of our own code: help, --print_config and errors in the
    # configuration need not wait for torch, Ray and Megatron to load.
    from megappo.trainer.build import run

    run(config)


COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {"train": train}


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


def _is_user_error(error: BaseException) -> bool:
    """Whether megappo's own code refused something, rather than a library failed in it."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    module = frame.tb_frame.f_globals.get("__name__", "") if frame is not None else ""
    return isinstance(error, ValueError) and module.split(".")[0] == PROGRAM


def _run(arguments: list[str]) -> None:
    if arguments and arguments[0] in COMMANDS:
        COMMANDS[arguments[0]](arguments[1:])
    else:
        _parser().parse_args(arguments)  # help, version, or an unknown command


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    try:
        _run(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except ValueError as error:
        if not _is_user_error(error):
            raise
        print(f"{PROGRAM}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return USER_ERROR
    return 0
