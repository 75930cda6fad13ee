"""The import hook that hands Megatron-Core's modules to the CPU shim while they load.

Imports neither torch nor Megatron: it is registered by ``megappo/__init__`` and wakes up
when somebody imports ``megatron.core``. It knows when to patch; *what* is patched, and why,
is in ``megatron_shim``. On a machine with CUDA it checks the version and touches nothing.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

ROOT = "megatron.core"
SHIM_MODULE = "megappo.device.megatron_shim"
TESTED_VERSIONS = ("0.16.1",)


def check_version(version: str) -> None:
    """Refuse a Megatron-Core that the models, the checkpoints and the shim were not tested with.

    Raises:
        ImportError: when ``version`` is not in ``TESTED_VERSIONS``.
    """
    if version not in TESTED_VERSIONS:
        raise ImportError(
            f"megatron-core {version} is installed, but megappo is tested with "
            f"{', '.join(TESTED_VERSIONS)} only: pip install megatron-core=={TESTED_VERSIONS[-1]}"
        )


def rewrite_constants(code: CodeType, replacements: dict[str, str]) -> CodeType:
    """A copy of ``code`` in which string constants equal to a key are replaced, at any depth."""

    def rewrite(constant: Any) -> Any:
        if isinstance(constant, str):
            return replacements.get(constant, constant)
        if isinstance(constant, CodeType):
            return rewrite_constants(constant, replacements)
        if isinstance(constant, tuple):
            return tuple(rewrite(item) for item in constant)
        return constant

    return code.replace(co_consts=tuple(rewrite(constant) for constant in code.co_consts))


class _ShimLoader(SourceFileLoader):
    """Loads one module of Megatron-Core through the shim."""

    def get_code(self, fullname: str) -> CodeType | None:
        code = super().get_code(fullname)
        shim = importlib.import_module(SHIM_MODULE)
        if code is not None and fullname in shim.MODULES_WITH_DEVICE_LITERALS:
            return rewrite_constants(code, shim.DEVICE_LITERALS)
        return code

    def exec_module(self, module: ModuleType) -> None:
        shim = importlib.import_module(SHIM_MODULE)
        with shim.quiet_import():
            super().exec_module(module)
        patch = shim.PATCH_AFTER_LOAD.get(module.__name__)
        if patch is not None:
            patch(module)


class MegatronFinder(MetaPathFinder):
    """Finds ``megatron.core`` and its modules; every other import passes by."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's spec with the shim's loader on CPU, None (default machinery) on CUDA."""
        if fullname != ROOT and not fullname.startswith(ROOT + "."):
            return None
        if fullname == ROOT:
            check_version(importlib.metadata.version("megatron-core"))
        shim = importlib.import_module(SHIM_MODULE)
        if not shim.is_needed():
            return None
        if fullname == ROOT:
            shim.patch_process()
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _ShimLoader(spec.loader.name, spec.loader.path)
        return spec


def install_megatron_shim() -> None:
    """Register the hook once, before Megatron-Core is imported.

    Raises:
        ImportError: when ``megatron.core`` was already imported, unpatched.
    """
    if any(isinstance(finder, MegatronFinder) for finder in sys.meta_path):
        return
    if ROOT in sys.modules:
        raise ImportError(
            "megatron.core was imported before megappo, so it cannot be prepared for this "
            "machine: import megappo first"
        )
    sys.meta_path.insert(0, MegatronFinder())
