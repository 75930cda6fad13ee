"""The import hook: what it refuses, what it rewrites, and that CUDA is left alone."""

from __future__ import annotations

import importlib
import subprocess
import sys
from importlib.machinery import PathFinder, SourceFileLoader
from types import CodeType

import pytest

from megappo.device import import_hook, megatron_shim


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    """Run a fresh interpreter."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )


def literals(code: CodeType) -> set[str]:
    """All string constants of a code object that name a CUDA device or type."""
    found: set[str] = set()

    def visit(constant: object) -> None:
        if isinstance(constant, str) and constant in megatron_shim.DEVICE_LITERALS:
            found.add(constant)
        elif isinstance(constant, tuple):
            for item in constant:
                visit(item)
        elif isinstance(constant, CodeType):
            for item in constant.co_consts:
                visit(item)

    visit(code)
    return found


@pytest.mark.parametrize("version", ["0.15.3", "0.16.0", "0.16.1rc0", "0.17.1", "1.0"])
def test_untested_megatron_is_refused(version: str) -> None:
    """Any version but the tested one gives one line with both versions and the command."""
    with pytest.raises(ImportError) as error:
        import_hook.check_version(version)
    message = str(error.value)
    assert f"megatron-core {version} " in message
    assert "pip install megatron-core==0.16.1" in message
    assert "\n" not in message


def test_tested_megatron_is_accepted() -> None:
    """The pinned version passes."""
    import_hook.check_version("0.16.1")


def test_untested_megatron_stops_the_import() -> None:
    """``import megatron.core`` itself fails, before any of its code runs."""
    result = run_python(
        "import importlib.metadata as m, sys\n"
        "m.version = lambda name: '0.99.0'\n"
        "import megappo\n"
        "try:\n"
        "    import megatron.core\n"
        "except ImportError as error:\n"
        "    print(error)\n"
        "print('megatron.core' in sys.modules)\n"
    )
    lines = result.stdout.splitlines()
    assert lines[0].startswith("megatron-core 0.99.0 is installed")
    assert lines[1] == "False"


def test_importing_megappo_imports_no_torch() -> None:
    """``megappo --help`` must not pay for torch or Megatron."""
    result = run_python(
        "import megappo, sys; print([m for m in ('torch', 'megatron.core') if m in sys.modules])"
    )
    assert result.stdout.strip() == "[]", result.stderr


def test_megatron_imported_earlier_is_refused() -> None:
    """An unpatched Megatron is refused with one line that says what to do."""
    result = run_python(
        "import sys, types\n"
        "sys.modules['megatron.core'] = types.ModuleType('megatron.core')\n"
        "import megappo\n"
    )
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: megatron.core was imported before megappo")
    assert last.endswith("import megappo first")


def test_hook_is_registered_once() -> None:
    """A second call changes nothing, although Megatron may be there by then."""
    before = list(sys.meta_path)
    import_hook.install_megatron_shim()
    assert sys.meta_path == before
    assert sum(isinstance(f, import_hook.MegatronFinder) for f in before) == 1


def test_on_cuda_nothing_is_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a CUDA device every module goes to the default machinery, and torch is not touched."""

    def forbidden() -> None:
        raise AssertionError("patched on CUDA")

    monkeypatch.setattr(megatron_shim, "is_needed", lambda: False)
    monkeypatch.setattr(megatron_shim, "patch_process", forbidden)
    finder = import_hook.MegatronFinder()
    names = {"megatron.core", *megatron_shim.MODULES_WITH_DEVICE_LITERALS}
    names |= set(megatron_shim.PATCH_AFTER_LOAD)
    assert all(finder.find_spec(name, None) is None for name in names)


def test_other_imports_pass_by() -> None:
    """The hook answers for ``megatron.core`` alone."""
    finder = import_hook.MegatronFinder()
    for name in ("torch", "megatron", "megatron.energon", "megatron.core_extras"):
        assert finder.find_spec(name, None) is None


def test_constants_are_rewritten_at_any_depth() -> None:
    """Arguments, defaults, nested functions and tuples; longer strings stay as they are."""
    source = (
        "def f(device='cuda'):\n"
        "    def g():\n"
        "        return ('cuda', ('torch.cuda.HalfTensor', 1)), 'cuda graph', b'cuda'\n"
        "    return device, g()\n"
        "value = f()\n"
    )
    code = import_hook.rewrite_constants(
        compile(source, "source", "exec"), megatron_shim.DEVICE_LITERALS
    )
    scope: dict[str, object] = {}
    exec(code, scope)
    assert scope["value"] == (
        "cpu",
        (("cpu", ("torch.HalfTensor", 1)), "cuda graph", b"cuda"),
    )


@pytest.mark.parametrize("name", sorted(megatron_shim.MODULES_WITH_DEVICE_LITERALS))
def test_listed_modules_have_literals_and_lose_them(name: str) -> None:
    """The list is not stale: each module names CUDA in its source, and not once it is loaded."""
    parent = importlib.import_module(name.rpartition(".")[0])
    spec = PathFinder.find_spec(name, list(parent.__path__))
    assert spec is not None and isinstance(spec.loader, SourceFileLoader)
    source = spec.loader.get_code(name)
    module = importlib.import_module(name)
    assert module.__spec__ is not None and isinstance(module.__spec__.loader, SourceFileLoader)
    loaded = module.__spec__.loader.get_code(name)
    assert source is not None and literals(source)
    assert loaded is not None and not literals(loaded)
