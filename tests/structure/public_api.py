"""The public surface as lines of text: exports, configuration keys, commands.

``python -m tests.structure.public_api`` writes ``public_api.txt`` anew; the diff is the
change to the public API, for review. Exports are read from the source, without importing
what they stand for.
"""

from __future__ import annotations

import ast
from pathlib import Path

from megappo.cli import COMMANDS
from megappo.config.keys import describe, keys

ROOT = Path(__file__).parents[2]
FROZEN = Path(__file__).with_name("public_api.txt")
PACKAGES = ("megappo", "megappo.config", "megappo.trainer")


def _module_file(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _public(names: list[str]) -> list[str]:
    return sorted(name for name in names if not name.startswith("_"))


def signatures(name: str, definition: ast.stmt) -> list[str]:
    """Lines for an exported function or class: its public methods, with their arguments."""
    if isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef):
        return [f"{name}({ast.unparse(definition.args)})"]
    lines = [name]
    for node in definition.body if isinstance(definition, ast.ClassDef) else []:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name == "__init__" or not node.name.startswith("_"):
                lines.append(f"{name}.{node.name}({ast.unparse(node.args)})")
    return lines


def exports(package: str) -> list[str]:
    """Lines for everything that a package's ``__init__`` offers."""
    lines: list[str] = []
    for node in ast.parse(_module_file(package).read_text()).body:
        if not isinstance(node, ast.ImportFrom) or not node.module:
            continue
        file = _module_file(node.module)
        defined = {
            item.name: item
            for item in (ast.parse(file.read_text()).body if file.is_file() else [])
            if isinstance(item, ast.FunctionDef | ast.ClassDef)
        }
        for name in _public([alias.asname or alias.name for alias in node.names]):
            if name in defined:
                lines += signatures(f"{package}.{name}", defined[name])
    return lines


def surface() -> list[str]:
    """The whole public API, one line each."""
    lines = [line for package in PACKAGES for line in exports(package)]
    lines += [f"key {key.name}: {describe(key.type)} = {key.default!r}" for key in keys().values()]
    return lines + [f"command megappo {name}" for name in COMMANDS]


if __name__ == "__main__":
    FROZEN.write_text("\n".join(surface()) + "\n")
