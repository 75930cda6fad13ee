"""Read the configuration: YAML files, then dotted keys on the command line, into a ``Config``.

``--config`` may be given several times, later files win, and keys on the command line win
over all files. Types are checked here, by jsonargparse; what a value means is not:
``checks.py`` does that. Every error is a one-line ``ConfigError`` that names the key and,
where the value came from a file, the line.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Sequence
from functools import cache
from typing import Any, NoReturn

import yaml
from jsonargparse import ArgumentParser, Namespace

from megappo.config.errors import ConfigError
from megappo.config.keys import Key, describe, entries, groups, keys
from megappo.config.openrlhf import unknown_key
from megappo.config.schema import Config
from megappo.config.yaml_file import key_lines

_OPTIONS = ("--config", "--print_config", "--help", "-h")


class _Parser(ArgumentParser):
    """jsonargparse's parser, with one-line errors instead of usage, tip and exit."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise ConfigError(message) from ex


@cache
def _parser() -> _Parser:
    parser = _Parser(
        prog="megappo train",
        usage="megappo train --config FILE [--KEY VALUE ...]",
        description="Train a policy with PPO. Keys may stand in the file or on the command line.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", action="config", help="YAML file of keys; may be repeated.")
    section = parser.add_argument_group("run")
    for entry in entries():
        if isinstance(entry, Key):
            owner = section if "." in entry.name else parser
            owner.add_argument(
                f"--{entry.name}", type=entry.type, default=entry.default, help=entry.doc
            )
        elif "." not in entry.name:
            section = parser.add_argument_group(entry.name, entry.doc)
    return parser


def _name(argument: str) -> str | None:
    """The key that a command-line argument names, if it names one."""
    return argument[2:].split("=", 1)[0] if argument.startswith("--") else None


def _value(key: Key, arguments: list[str]) -> str:
    """Take the value of ``key`` off the front of the remaining arguments.

    A boolean may stand without one (true), and a pair of numbers may be given as two
    arguments: both are how OpenRLHF's command line has them.
    """
    values: list[str] = []
    wanted = len(typing.get_args(_tuple(key.type)))
    while arguments and _name(arguments[0]) is None and len(values) < max(wanted, 1):
        values.append(arguments.pop(0))
        if not _is_number(values[-1]):
            break
    if not values and key.type is bool:
        return "true"
    if not values:
        raise ConfigError(f"--{key.name}: expected {describe(key.type)} after it")
    return f"[{', '.join(values)}]" if wanted and _is_number(values[0]) else values[0]


def _tuple(hint: Any) -> Any:
    """The tuple type in ``hint``, which may be optional; None where there is none."""
    candidates = (hint, *typing.get_args(hint))
    return next((item for item in candidates if typing.get_origin(item) is tuple), None)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _order(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Check the names on the command line, and put ``--config FILE`` before all keys.

    Returns the arguments, each key joined to its value, and the files.
    """
    files: list[str] = []
    rest: list[str] = []
    arguments = list(argv)
    while arguments:
        argument = arguments.pop(0)
        name = _name(argument)
        value = argument.partition("=")[2] or None
        if name == "config":
            if value is None and not arguments:
                raise ConfigError("--config: expected the name of a YAML file after it")
            files.append(value if value is not None else arguments.pop(0))
        elif name in groups():
            raise ConfigError(f"--{name} is a group of keys; give a key, as in --{name}.KEY VALUE")
        elif name in keys():
            key = keys()[name]
            rest.append(argument if "=" in argument else f"--{name}={_value(key, arguments)}")
        elif argument.split("=")[0] in _OPTIONS:
            rest.append(argument)
        elif name is None:
            raise ConfigError(f"unexpected argument {argument!r}; give keys as --KEY VALUE")
        else:
            raise ConfigError(unknown_key(name))
    return [*(f"--config={file}" for file in files), *rest], files


def _type_error(message: str, argv: Sequence[str], lines: dict[str, tuple[str, int]]) -> str:
    """One line of ours from jsonargparse's message about a value of the wrong type."""
    match = re.search(r'(?:Parser key|argument) "?(?:--)?([\w.]+)', message)
    name = match.group(1) if match else None
    if name not in keys():
        return message
    value = re.search(r"Given value: (.*)", message) or re.search(r"Got value: (.*)", message)
    found = f" = {'null' if value.group(1) == 'None' else value.group(1)}" if value else ""
    where = ""
    if name in lines and name not in {_name(argument) for argument in argv}:
        where = f" ({lines[name][0]}:{lines[name][1]})"
    return f"{name}{found}: expected {describe(keys()[name].type)}{where}"


def _refuse_null(values: Namespace) -> None:
    """Refuse null where the type has none: jsonargparse takes it for any key."""
    for key in keys().values():
        if values[key.name] is None and type(None) not in typing.get_args(key.type):
            raise ConfigError(f'Parser key "{key.name}": Got value: None')


def _build(cls: type[Any], values: Namespace) -> Any:
    """The dataclass ``cls`` with the parsed values, nested dataclasses included."""
    arguments = {}
    for field in dataclasses.fields(cls):
        value = values[field.name]
        default = field.default
        nested = dataclasses.is_dataclass(default)
        arguments[field.name] = _build(type(default), value) if nested else value
    return cls(**arguments)


def load(argv: Sequence[str]) -> Config:
    """The configuration that a command line gives, defaults filled in, types checked.

    ``--help`` and ``--print_config`` print and raise ``SystemExit(0)``.

    Raises:
        ConfigError: one line that names the key (and file and line) at fault.
    """
    arguments, files = _order(argv)
    lines: dict[str, tuple[str, int]] = {}
    for file in files:
        lines.update({name: (file, line) for name, line in key_lines(file).items()})
    try:
        values = _parser().parse_args(arguments)
        _refuse_null(values)
    except ConfigError as error:
        raise ConfigError(_type_error(str(error), argv, lines)) from error
    config = _build(Config, values)
    assert isinstance(config, Config)
    return config


def dump(config: Config) -> str:
    """``config`` as YAML text that ``load`` reads back to an equal configuration."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return list(value) if isinstance(value, tuple) else value

    return yaml.safe_dump(plain(dataclasses.asdict(config)), sort_keys=False)
