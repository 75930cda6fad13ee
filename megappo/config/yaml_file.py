"""A YAML configuration file read for its errors: syntax, duplicate, unknown and misplaced keys.

jsonargparse reads the values; this module only knows where each key stands, so that an
error can name the file and the line.
"""

from __future__ import annotations

from pathlib import Path

import yaml

from megappo.config.errors import ConfigError
from megappo.config.keys import groups, keys
from megappo.config.openrlhf import unknown_key


def key_lines(path: str) -> dict[str, int]:
    """The 1-based line of every key that the file sets.

    Raises:
        ConfigError: when the file cannot be read, is not YAML, or has a key that the
            schema lacks, that is given twice, or that holds a value where keys belong.
    """
    file = Path(path)
    if not file.exists():
        raise ConfigError(f"--config {path}: no such file")
    if not file.is_file():
        raise ConfigError(f"--config {path}: a folder, expected a YAML file")
    try:
        root = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except OSError as error:
        raise ConfigError(f"--config {path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--config {path}: not UTF-8 text ({error.reason})") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}:{mark.line + 1}" if mark else path
        raise ConfigError(f"{where}: not valid YAML: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}: expected keys such as `actor:`, found {_found(root)}")
    lines: dict[str, int] = {}
    _collect(root, "", path, lines)
    return lines


def _found(node: yaml.Node | None) -> str:
    if node is None or node.tag == "tag:yaml.org,2002:null":
        return "nothing"
    return "a list" if isinstance(node, yaml.SequenceNode) else f"the value {node.value!r}"


def _collect(node: yaml.MappingNode, prefix: str, path: str, lines: dict[str, int]) -> None:
    for key_node, value in node.value:
        where = f"{path}:{key_node.start_mark.line + 1}"
        name = prefix + str(key_node.value)
        if name in lines:
            raise ConfigError(f"{where}: {name} is already given in line {lines[name]}")
        if name in groups():
            if not isinstance(value, yaml.MappingNode):
                raise ConfigError(
                    f"{where}: {name} is a group of keys, found {_found(value)}; give keys "
                    "under it, or remove it"
                )
            _collect(value, name + ".", path, lines)
        elif name not in keys():
            raise ConfigError(f"{where}: {unknown_key(name)}")
        lines[name] = key_node.start_mark.line + 1
