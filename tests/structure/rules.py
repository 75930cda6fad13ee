"""The repository's rules as pure functions: source text in, violations out.

Nothing here reads the repository: ``test_repository.py`` applies the rules to it, and
``test_rules.py`` shows that each of them catches what it is for.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
BAD_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}

LAYERS = {
    **dict.fromkeys(("records", "topology"), 0),
    **dict.fromkeys(("ppo", "config", "device"), 1),
    **dict.fromkeys(("data", "rewards", "metrics", "weights"), 2),
    **dict.fromkeys(("models", "reshard", "checkpoint"), 3),
    **dict.fromkeys(("mesh", "rollout", "planning"), 4),
    **dict.fromkeys(("runtime",), 5),
    **dict.fromkeys(("trainer",), 6),
    **dict.fromkeys(("cli",), 7),
}
BASE_LAYER = 0
# checkpoint_tools are thin command lines over the layers up to mesh and rollout.
TOOLS_LAYER = 5

# The package's own module registers the import hook of the CPU shim, and nothing else.
PACKAGE_IMPORTS = {"megappo.device.import_hook"}

VENDOR_FOLDERS = {
    "ray": {"runtime"},
    "vllm": {"rollout"},
    "megatron": {"device", "models", "mesh", "checkpoint"},
    "transformers": {"weights", "models", "data", "rewards", "rollout"},
    "jsonargparse": {"config", "cli"},
    "transformer_engine": {"models"},
    "apex": {"models"},
    "wandb": {"metrics"},
    "tensorboard": {"metrics"},
    "torch.utils.tensorboard": {"metrics"},
    "datasets": {"data"},
}
LOCAL_IMPORT_VENDORS = {"wandb", "transformer_engine", "apex", "vllm"}
# The one lazy import of our own code: the command shows help without loading torch.
LOCAL_IMPORTS = {("megappo/cli.py", "megappo.trainer.build")}


_MARKERS = ("type: " + "ignore", "no" + "qa", "TO" + "DO", "FIX" + "ME", "XX" + "X")


@dataclass(frozen=True)
class Import:
    """One imported module, and whether the import stands inside a function."""

    module: str
    line: int
    local: bool


def imports(path: str, source: str) -> list[Import]:
    """Every module that a file imports, relative and ``import_module`` imports included.

    ``from package import name`` yields ``package.name``: a module or a name in one.
    """
    package = list(PurePosixPath(path).parent.parts)
    found: list[Import] = []

    def visit(node: ast.AST, local: bool) -> None:
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, line, local) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found.extend(Import(f"{module}.{alias.name}", line, local) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:
            called = ast.unparse(node.func).split(".")[-1]
            first = node.args[0]
            if called in ("import_module", "__import__") and isinstance(first, ast.Constant):
                found.append(Import(str(first.value), line, local))
        inside = local or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    visit(ast.parse(source), False)
    return found


def _within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def _unit(path: str) -> str:
    """The folder or file directly under ``megappo/`` that a path belongs to."""
    return PurePosixPath(path).with_suffix("").parts[1]


def layer_violations(path: str, source: str) -> Iterator[str]:
    """Imports of megappo that do not go to a strictly lower layer or the own folder."""
    root = PurePosixPath(path).parts[0]
    unit = _unit(path) if root == "megappo" else root
    for item in imports(path, source):
        if not _within(item.module, "megappo"):
            continue
        target = (item.module.split(".") + [""])[1]
        where = f"{path}:{item.line}: imports {item.module}"
        if unit == "__init__":
            if not any(_within(item.module, allowed) for allowed in PACKAGE_IMPORTS):
                yield f"{where}: megappo/__init__ imports only the import hook"
        elif target in ("", "__version__") or unit == "__main__":
            continue
        elif target not in LAYERS:
            yield f"{where}: {target} is in no layer (LAYERS in tests/structure/rules.py)"
        elif root == "checkpoint_tools":
            if LAYERS[target] >= TOOLS_LAYER:
                yield f"{where}: checkpoint_tools stand on the layers below runtime"
        elif root != "megappo":
            continue
        elif unit not in LAYERS:
            yield f"{path}: {unit} is in no layer (LAYERS in tests/structure/rules.py)"
        elif target == unit or (LAYERS[target] == LAYERS[unit] == BASE_LAYER):
            continue
        elif LAYERS[target] >= LAYERS[unit]:
            yield f"{where}: {target} is not in a lower layer than {unit}"


def vendor_violations(path: str, source: str) -> Iterator[str]:
    """Imports of a vendor in a part of the program that may not know it."""
    root = PurePosixPath(path).parts[0]
    if root not in ("megappo", "checkpoint_tools"):
        return
    unit = _unit(path) if root == "megappo" else root
    for item in imports(path, source):
        for vendor, folders in VENDOR_FOLDERS.items():
            if _within(item.module, vendor) and unit not in folders:
                yield f"{path}:{item.line}: {vendor} belongs in {', '.join(sorted(folders))} only"


def local_import_violations(path: str, source: str) -> Iterator[str]:
    """Imports inside functions, other than of optional vendors."""
    for item in imports(path, source):
        # Any part of the name: Megatron's module for TransformerEngine is as optional as it.
        optional = LOCAL_IMPORT_VENDORS & set(item.module.split("."))
        allowed = any(path == file and _within(item.module, m) for file, m in LOCAL_IMPORTS)
        if item.local and not optional and not allowed:
            yield f"{path}:{item.line}: import {item.module} at the top of the file"


def _is_table(node: ast.stmt) -> bool:
    """Whether a module-level statement is a table of data: a literal given a name."""
    return isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(
        node.value, ast.Dict | ast.List | ast.Tuple | ast.Set
    )


def size_violations(path: str, source: str) -> Iterator[str]:
    """Files and functions that are too long; tables of data are not counted."""
    tree = ast.parse(source)
    tables = sum((node.end_lineno or 0) - node.lineno for node in tree.body if _is_table(node))
    lines = len(source.splitlines()) - tables
    if lines > MAX_FILE_LINES:
        yield f"{path}: {lines} lines, more than {MAX_FILE_LINES}"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield (
                    f"{path}:{node.lineno}: {node.name} has {length} lines, more than "
                    f"{MAX_FUNCTION_LINES}"
                )


def name_violations(path: str) -> Iterator[str]:
    """Files and folders whose name says nothing, or hides a module of Python's own."""
    parts = PurePosixPath(path).with_suffix("").parts
    for part in parts:
        if part in BAD_NAMES:
            yield f"{path}: {part} says nothing about what is in it"
    for folder in parts[:-1]:
        if folder in sys.stdlib_module_names:
            yield f"{path}: the folder {folder} has the name of a standard module"


def docstring_violations(path: str, source: str) -> Iterator[str]:
    """Modules without a docstring; the empty ``__init__`` of a test folder needs none."""
    if not source.strip() and PurePosixPath(path).parts[0] == "tests":
        return
    text = (ast.get_docstring(ast.parse(source)) or "").strip()
    if not text or text.startswith(_MARKERS):
        yield f"{path}: no module docstring"


def marker_violations(path: str, source: str) -> Iterator[str]:
    """Comments that silence a check or put work off."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            for marker in _MARKERS:
                if marker in token.string:
                    yield f"{path}:{token.start[0]}: {marker!r} in a comment"
