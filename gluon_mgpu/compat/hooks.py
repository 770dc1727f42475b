"""The package's import hook: runs functions when Python imports a module."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Finder:
    """Finds modules as the other finders do, and changes how the code of some is executed."""

    def __init__(self) -> None:
        self.around: dict[str, Callable[[ModuleType], AbstractContextManager[object]]] = {}
        self.after: dict[str, list[Callable[[ModuleType], object]]] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.around and name not in self.after:
            return None
        others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            with self.around.get(name, nullcontext)(module):
                execute(module)
            for function in self.after.get(name, ()):
                function(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # changes only this loader
        return spec


_finder = _Finder()
sys.meta_path.insert(0, _finder)


def on_import(name: str, function: Callable[[ModuleType], object]) -> None:
    """Call function(module) each time a module has been imported, and now if it is imported already."""
    _finder.after.setdefault(name, []).append(function)
    if name in sys.modules:
        function(sys.modules[name])


def around_import(name: str, around: Callable[[ModuleType], AbstractContextManager[object]]) -> None:
    """Execute a module's code inside the context manager around(module)."""
    _finder.around[name] = around
