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
                # A package that the program had loaded before stays the program's.
                if name.partition(".")[0] not in before and self._is_sibling(name):
                    self._modules[name] = sys.modules.pop(name)
            sys.modules.update(hidden)

    def _is_sibling(self, name: str) -> bool:
        """Whether a module lies at ``folder/<top-level name>``, not just anywhere below it."""
        spec = getattr(sys.modules[name], "__spec__", None)  # may have been replaced by anything
        if spec is None:
            return False
        places = list(spec.submodule_search_locations or [])
        places += [spec.origin] if spec.has_location else []
        top_level = name.partition(".")[0]
        for place in map(Path, places):
            if self._folder in place.resolve().parents:
                first = place.resolve().relative_to(self._folder).parts[0]
                if first.partition(".")[0] == top_level:
                    return True
        return False
