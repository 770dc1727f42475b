"""Functions of the imp module, which Python 3.12 removed. Old programs use them to load source files."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from types import ModuleType

reload = importlib.reload
new_module = ModuleType


def load_source(name: str, pathname: str, file: object = None) -> ModuleType:
    """Import a file as a module with the given name."""
    spec = importlib.util.spec_from_file_location(name, pathname)
    assert spec and spec.loader
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def load_module(name: str, file: object, pathname: str, description: object) -> ModuleType:
    """Import the module that `find_module` found."""
    return load_source(name, pathname)


def find_module(name: str, path: list[str] | None = None) -> tuple[None, str, tuple[str, str, int]]:
    """Find a module. Returns the last three arguments of `load_module`.

    Raises ImportError if the module does not exist.
    """
    spec = importlib.machinery.PathFinder.find_spec(name, path)
    if spec is None:
        raise ImportError(f"No module named {name!r}", name=name)
    return None, spec.origin or "", (".py", "r", 1)
