"""Functions of the imp module, which Python 3.12 removed. Old programs use them to load source files."""

from __future__ import annotations

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
