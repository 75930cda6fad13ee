"""The ``megappo`` command: help within a second, one line for a user's error, exit codes."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import megappo
from megappo import cli
from megappo.config import ConfigError
from megappo.config.errors import RunFailedError

MODULE = [sys.executable, "-m", "megappo"]
SCRIPT = [str(Path(sys.executable).with_name("megappo"))]


def run(command: Sequence[str], *argv: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    return subprocess.run([*command, *argv], capture_output=True, text=True, timeout=60)


def child_cpu() -> float:
    """CPU seconds of all child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@pytest.mark.parametrize("command", [MODULE, SCRIPT], ids=["module", "script"])
def test_help_within_a_second(command: list[str]) -> None:
    """Help lists the commands; it takes less than a second of CPU, other work aside."""
    before = child_cpu()
    result = run(command, "--help")
    assert child_cpu() - before < 1
    assert (result.returncode, result.stderr) == (0, "")
    for name in cli.COMMANDS:
        assert name in result.stdout


def test_help_of_train_within_a_second() -> None:
    """The help with every key is as quick."""
    before = child_cpu()
    result = run(MODULE, "train", "--help")
    assert child_cpu() - before < 1
    assert result.returncode == 0
    assert "--actor.model_name_or_path" in result.stdout


def test_version() -> None:
    """The version is the package's."""
    assert run(MODULE, "--version").stdout == f"megappo {megappo.__version__}\n"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["trian"], "invalid choice: 'trian'"),
        (["train"], "actor.model_name_or_path is required"),
        (["train", "--train.sed", "3"], "unknown key train.sed; did you mean train.seed?"),
        (["train", "--train.seed", "x"], "train.seed = x: expected a whole number"),
        (["train", "--config", "nowhere.yaml"], "--config nowhere.yaml: no such file"),
        (["train", "--megatron.world_size", "0"], "actor.model_name_or_path is required"),
    ],
)
def test_user_errors(argv: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line on stderr, exit code 2, nothing on stdout."""
    assert cli.main(argv) == cli.USER_ERROR
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("megappo: error: ")
    assert expected in err
    assert err.count("\n") == 1


def test_user_error_of_the_process() -> None:
    """The exit code reaches the shell, and there is no traceback."""
    result = run(MODULE, "train", "--data.max_len", "long")
    assert result.returncode == cli.USER_ERROR
    assert result.stderr == "megappo: error: data.max_len = long: expected a whole number\n"


def _refuse(argv: Sequence[str]) -> int:
    error = ConfigError("first line\nsecond line")
    # As if raised in a module of megappo.
    exec(compile("raise error", "x", "exec"), {"__name__": "megappo.data.rows", "error": error})
    return 0


def _library_fault(argv: Sequence[str]) -> int:
    return int("not a number")


def _internal_fault(argv: Sequence[str]) -> int:
    raise AssertionError("an invariant")


def _rank_failed(argv: Sequence[str]) -> int:
    raise RunFailedError("rank 1 was killed by signal 9; its log is logs/rank_1.log")


def _interrupt(argv: Sequence[str]) -> int:
    raise KeyboardInterrupt


def _terminate(argv: Sequence[str]) -> int:
    signal.raise_signal(signal.SIGTERM)
    return 0


def test_errors_by_origin(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Megappo's refusals become a line; a library's ValueError and a bug keep the traceback."""
    monkeypatch.setitem(cli.COMMANDS, "train", _refuse)
    assert cli.main(["train"]) == cli.USER_ERROR
    assert capsys.readouterr().err == "megappo: error: first line second line\n"
    monkeypatch.setitem(cli.COMMANDS, "train", _library_fault)
    with pytest.raises(ValueError, match="invalid literal"):
        cli.main(["train"])
    monkeypatch.setitem(cli.COMMANDS, "train", _internal_fault)
    with pytest.raises(AssertionError, match="an invariant"):
        cli.main(["train"])
    monkeypatch.setitem(cli.COMMANDS, "train", _rank_failed)
    assert cli.main(["train"]) == cli.RUN_FAILED
    assert capsys.readouterr().err.startswith("megappo: error: rank 1 was killed by signal 9")
    monkeypatch.setitem(cli.COMMANDS, "train", _interrupt)
    assert cli.main(["train"]) == 130
    assert capsys.readouterr().err == "megappo: SIGINT: stopped, nothing was saved\n"
    monkeypatch.setitem(cli.COMMANDS, "train", _terminate)
    assert cli.main(["train"]) == 143
    assert capsys.readouterr().err == "megappo: SIGTERM: stopped, nothing was saved\n"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    monkeypatch.setitem(cli.COMMANDS, "train", lambda argv: 128 + 15)
    assert cli.main(["train"]) == 143
