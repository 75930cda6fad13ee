"""The wheel holds both packages, their type markers, the licence and the command."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("megappo", "checkpoint_tools")


def test_wheel(tmp_path: Path) -> None:
    """Built from a copy, so that nothing is left in the checkout."""
    source = tmp_path / "source"
    source.mkdir()
    for package in PACKAGES:
        shutil.copytree(
            ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(tmp_path), str(source)], check=True)
    (wheel,) = tmp_path.glob("megappo-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (entry_points,) = (name for name in names if name.endswith("/entry_points.txt"))
        commands = archive.read(entry_points).decode()
    expected = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for pattern in ("*.py", "py.typed")
        for path in (ROOT / package).rglob(pattern)
    }
    assert expected <= names
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    assert "megappo = megappo.cli:main" in commands
    assert not any(name.startswith(("tests/", "examples/", "docs/")) for name in names)
