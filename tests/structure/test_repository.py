"""The repository keeps its own rules (``rules.py``), and its public API is the frozen one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.structure import rules
from tests.structure.public_api import FROZEN, surface

ROOT = Path(__file__).parents[2]
FOLDERS = ("megappo", "checkpoint_tools", "examples", "benchmarks", "docs", "requirements", "tests")
PROGRAM = ("megappo", "checkpoint_tools")
SOURCES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*.py"))
}


@pytest.mark.parametrize(
    "rule",
    [
        rules.layer_violations,
        rules.vendor_violations,
        rules.size_violations,
        rules.docstring_violations,
        rules.marker_violations,
    ],
    ids=lambda rule: rule.__name__,
)
def test_sources(rule: Callable[[str, str], Iterator[str]]) -> None:
    """No Python file breaks the rule."""
    found = [message for path, source in SOURCES.items() for message in rule(path, source)]
    assert not found, "\n".join(found)


def test_local_imports() -> None:
    """The program imports at the top of its files."""
    program = {path: text for path, text in SOURCES.items() if path.split("/")[0] in PROGRAM}
    found = [
        item for path, text in program.items() for item in rules.local_import_violations(path, text)
    ]
    assert not found, "\n".join(found)


def test_names() -> None:
    """No file or folder has a name that says nothing."""
    found = [message for path in SOURCES for message in rules.name_violations(path)]
    assert not found, "\n".join(found)


def test_every_folder_is_in_a_layer() -> None:
    """A new folder of the package is given its layer."""
    folders = {
        path.name for path in (ROOT / "megappo").iterdir() if (path / "__init__.py").exists()
    }
    assert folders <= set(rules.LAYERS)


def test_command_line_loads_no_heavy_module() -> None:
    """Package, configuration and command line import neither torch nor any big vendor."""
    program = (
        "import sys, megappo, megappo.config, megappo.cli;"
        "print(*{name.split('.')[0] for name in sys.modules})"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    heavy = {"torch", "numpy", "ray", "vllm", "transformers", "megatron", "datasets", "rich"}
    assert heavy & set(result.stdout.split()) == set()


def test_public_api_is_frozen() -> None:
    """Exports, configuration keys and commands are those in public_api.txt.

    Where a change is meant, run ``python -m tests.structure.public_api`` and commit the diff.
    """
    frozen, now = FROZEN.read_text().splitlines(), surface()
    gone = [line for line in frozen if line not in now]
    new = [line for line in now if line not in frozen]
    assert now == frozen, (
        f"the public API changed; gone: {gone}; new: {new}. If that is meant: "
        "python -m tests.structure.public_api"
    )
