"""Each rule of ``rules.py`` catches what it is for, and lets pass what is allowed."""

from __future__ import annotations

import ast

import pytest

from tests.structure import rules
from tests.structure.public_api import signatures

LONG_FUNCTION = "def work():\n" + "    pass\n" * rules.MAX_FUNCTION_LINES
LONG_FILE = '"""Doc."""\n' + "x = 1\n" * rules.MAX_FILE_LINES
TABLE = '"""Doc."""\nTABLE = {\n' + '    "key": 1,\n' * rules.MAX_FILE_LINES + "}\n"


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("megappo/ppo/kl.py", "import megappo.data.prompts"),
        ("megappo/data/prompts.py", "from megappo.rewards.function import load"),
        ("megappo/models/x.py", "from megappo import mesh"),
        ("megappo/models/x.py", "from ..mesh import rank"),
        ("megappo/topology.py", "import megappo.ppo.kl"),
        ("megappo/mesh/x.py", "def f():\n    from megappo.runtime import ray"),
        ("megappo/mesh/x.py", "import importlib\nimportlib.import_module('megappo.trainer')"),
        ("megappo/mesh/x.py", "from megappo.unheard import of"),
        ("megappo/unheard/x.py", "from megappo.records import Prompt"),
        ("megappo/__init__.py", "from megappo.trainer import PPOTrainer"),
        ("checkpoint_tools/inspect.py", "from megappo.runtime import groups"),
    ],
)
def test_layer_rule_refuses(path: str, source: str) -> None:
    """Imports upward, sideways and into unknown folders are refused, however written."""
    assert len(list(rules.layer_violations(path, source))) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("megappo/ppo/kl.py", "from megappo.ppo.losses import x\nfrom megappo.records import y"),
        ("megappo/ppo/kl.py", "from .losses import x\nimport torch\nimport megappo"),
        ("megappo/records.py", "from megappo.topology import Topology"),
        ("megappo/cli.py", "from megappo import __version__\nfrom megappo.trainer import x"),
        ("megappo/__init__.py", "from megappo.device.import_hook import install"),
        ("megappo/__main__.py", "from megappo.cli import main"),
        ("checkpoint_tools/inspect.py", "from megappo.mesh import rank"),
        ("tests/unit/test_x.py", "from megappo.trainer import PPOTrainer"),
        ("megappo/mesh/x.py", "import megappolis.trainer"),
    ],
)
def test_layer_rule_allows(path: str, source: str) -> None:
    """Imports downward and within the own folder pass."""
    assert list(rules.layer_violations(path, source)) == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("megappo/mesh/x.py", "import ray"),
        ("megappo/runtime/x.py", "from vllm.entrypoints import llm"),
        ("megappo/ppo/x.py", "from megatron.core import mpu"),
        ("megappo/mesh/x.py", "import transformers"),
        ("megappo/trainer/x.py", "from jsonargparse import ArgumentParser"),
        ("megappo/mesh/x.py", "def f():\n    import transformer_engine.pytorch"),
        ("megappo/trainer/x.py", "import wandb"),
        ("megappo/trainer/x.py", "from torch.utils.tensorboard import SummaryWriter"),
        ("megappo/rewards/x.py", "import datasets"),
        ("megappo/records.py", "import ray"),
        ("checkpoint_tools/x.py", "import vllm"),
    ],
)
def test_vendor_rule_refuses(path: str, source: str) -> None:
    """A vendor outside its folders is refused."""
    assert len(list(rules.vendor_violations(path, source))) == 1


def test_vendor_rule_allows() -> None:
    """A vendor in its folder passes, and so do tests and names that only look like one."""
    assert list(rules.vendor_violations("megappo/runtime/ray.py", "import ray.util")) == []
    assert list(rules.vendor_violations("megappo/cli.py", "import jsonargparse")) == []
    assert list(rules.vendor_violations("megappo/mesh/x.py", "import rayon\nimport torch")) == []
    assert list(rules.vendor_violations("tests/unit/x.py", "import ray")) == []


@pytest.mark.parametrize(
    "source",
    [
        "def f():\n    import json",
        "class A:\n    def f(self):\n        from megappo.mesh import rank",
        "def f():\n    return __import__('json')",
    ],
)
def test_local_import_rule_refuses(source: str) -> None:
    """An import inside a function is refused."""
    assert len(list(rules.local_import_violations("megappo/mesh/x.py", source))) == 1


def test_local_import_rule_allows() -> None:
    """Optional vendors and the command's lazy start may be imported in a function."""
    assert list(rules.local_import_violations("megappo/x.py", "import json")) == []
    for optional in ("wandb", "transformer_engine.pytorch", "megatron.core.transformer_engine"):
        inside = f"def f():\n    import {optional}"
        assert list(rules.local_import_violations("megappo/x.py", inside)) == []
    lazy = "def f():\n    from megappo.trainer.build import run"
    assert list(rules.local_import_violations("megappo/cli.py", lazy)) == []
    assert len(list(rules.local_import_violations("megappo/runtime/x.py", lazy))) == 1


def test_size_rule() -> None:
    """Long functions and files are refused; a long table is not."""
    assert "work has 61 lines" in next(rules.size_violations("megappo/x.py", LONG_FUNCTION))
    assert "401 lines" in next(rules.size_violations("megappo/x.py", LONG_FILE))
    assert list(rules.size_violations("megappo/x.py", TABLE)) == []
    shorter = LONG_FUNCTION.removesuffix("    pass\n")
    assert list(rules.size_violations("megappo/x.py", shorter)) == []
    method = "class A:\n" + "".join(f"    {line}\n" for line in LONG_FUNCTION.splitlines())
    assert len(list(rules.size_violations("megappo/x.py", "async " + LONG_FUNCTION))) == 1
    assert len(list(rules.size_violations("megappo/x.py", method))) == 1


@pytest.mark.parametrize(
    "path",
    [
        "megappo/utils.py",
        "megappo/mesh/common.py",
        "tests/helpers/x.py",
        "megappo/misc/__init__.py",
    ],
)
def test_name_rule_refuses(path: str) -> None:
    """Names that say nothing are refused, for files and folders."""
    assert len(list(rules.name_violations(path))) == 1


def test_name_rule_on_folders() -> None:
    """A folder may not hide a standard module; a file in a package may share its name."""
    assert len(list(rules.name_violations("megappo/queue/x.py"))) == 1
    assert list(rules.name_violations("megappo/runtime/queue.py")) == []
    assert list(rules.name_violations("megappo/common_words.py")) == []


def test_docstring_rule() -> None:
    """A module without a docstring is refused; an empty test package needs none."""
    assert len(list(rules.docstring_violations("megappo/x.py", "x = 1\n"))) == 1
    assert len(list(rules.docstring_violations("megappo/x.py", '"""  """\n'))) == 1
    assert len(list(rules.docstring_violations("megappo/x.py", '"""TO' + 'DO."""'))) == 1
    assert len(list(rules.docstring_violations("megappo/mesh/__init__.py", ""))) == 1
    assert list(rules.docstring_violations("tests/unit/__init__.py", "")) == []
    assert list(rules.docstring_violations("megappo/x.py", '"""What it does."""\n')) == []


def test_marker_rule() -> None:
    """Comments that silence a checker or put work off are refused; strings are not read."""
    for marker in ("type: " + "ignore", "no" + "qa: E501", "TO" + "DO later"):
        assert len(list(rules.marker_violations("megappo/x.py", f"x = 1  # {marker}\n"))) == 1
    assert list(rules.marker_violations("megappo/x.py", 'x = "# TO' + 'DO"\n')) == []


def test_api_lists_methods_with_arguments() -> None:
    """A changed argument of a public method shows in the API list; private methods do not."""
    source = (
        "class A:\n    def fit(self, n=0): ...\n    def _x(self): ...\n    def __init__(self): ..."
    )
    lines = signatures("p.A", ast.parse(source).body[0])
    assert lines == ["p.A", "p.A.fit(self, n=0)", "p.A.__init__(self)"]
