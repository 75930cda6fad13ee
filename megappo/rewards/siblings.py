"""Lets a user's file import the modules that lie beside it, and nobody else.

A folder on ``sys.path`` for good would let its ``data.py`` or ``metrics.py`` stand in for
another module of that name anywhere in the program. So the folder is on the path only while
the user's code runs, and the modules loaded from it are taken out again afterwards.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType


class SiblingModules:
    """The modules of one folder, visible only inside :meth:`visible`."""

    def __init__(self, folder: Path) -> None:
        """Nothing is imported yet; ``folder`` is where the user's file lies."""
        self._folder = folder.resolve()
        self._modules: dict[str, ModuleType] = {}

    @contextmanager
    def visible(self) -> Iterator[None]:
        """Make the folder importable, and bring back what was imported from it before."""
        hidden = {name: sys.modules[name] for name in self._modules if name in sys.modules}
        before = set(sys.modules) - set(self._modules)
        sys.modules.update(self._modules)
        sys.path.insert(0, str(self._folder))
        try:
            yield
        finally:
            if str(self._folder) in sys.path:  # the user's code may have changed the path itself
                sys.path.remove(str(self._folder))
            for name in set(sys.modules) - before:
                if self._is_sibling(sys.modules[name]):
                    self._modules[name] = sys.modules.pop(name)
            sys.modules.update(hidden)

    def _is_sibling(self, module: ModuleType) -> bool:
        spec = getattr(module, "__spec__", None)  # a module may have been replaced by anything
        origin = spec.origin if spec is not None and spec.has_location else None
        return origin is not None and self._folder in Path(origin).resolve().parents
