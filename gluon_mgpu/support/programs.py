"""Executes the user's Python files as modules, and tells their code from that of libraries."""

from __future__ import annotations

import functools
import importlib.util
import linecache
import os
import site
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from gluon_mgpu.support import errors

PACKAGE = str(Path(__file__).parents[1])
FOLDERS = {sysconfig.get_path("stdlib"), *site.getsitepackages(), site.getusersitepackages(), PACKAGE}  # of libraries
LIBRARIES = ("<", *(os.path.join(folder, "") for folder in FOLDERS))

_folders: set[str] = set()  # which the user's files have added to sys.path
_beside: set[str] = set()  # names of the modules that these files have imported from their own folders


def execute(name: str, path: str) -> ModuleType:
    """Execute a file as a new module. A user's file can import modules beside it, which are executed again, too."""
    path = os.path.abspath(path)  # the file may change the working folder
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module, before = importlib.util.module_from_spec(spec), sys.modules.get(name)
    if os.path.dirname(path) == PACKAGE:
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        finally:
            if before is not None:  # programs have imported it
                sys.modules[name] = before
        return module
    errors.user_files.add(path)
    with _imports_from(os.path.dirname(path)):
        sys.modules[name] = module  # as an import would do; dataclasses need it
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return module


@contextmanager
def _imports_from(folder: str) -> Iterator[None]:
    """Search this folder for modules from now on, but no folder of an earlier file. Forget what that file has imported
    from its folder: the next file may have modules of the same names."""
    for name in _beside:
        sys.modules.pop(name, None)
    _beside.clear()
    sys.path[:] = [place for place in sys.path if place not in _folders]
    if folder not in sys.path:
        sys.path.append(folder)  # the last: it may contain a random.py, too
        _folders.add(folder)
    before = {*sys.modules}
    try:
        yield
    finally:
        for name in sys.modules.keys() - before:
            file = getattr(sys.modules[name], "__file__", None) or ""
            if file.removesuffix("/__init__.py") in (f"{folder}/{name}.py", f"{folder}/{name}"):
                _beside.add(name)
                _beside.update(other for other in sys.modules if other.startswith(f"{name}."))


@functools.cache
def is_users(file: str) -> bool:
    """Whether code with this file name is the user's, not a library's. Jupyter gives each cell of a notebook the name
    of a file that does not exist, and keeps its text in linecache."""
    return not file.startswith(LIBRARIES) and (os.path.exists(file) or file in linecache.cache)


def users_line() -> int:
    """The line of the user's code that is running; 0 if there is none."""
    frame: Any = sys._getframe(1)
    while frame and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame.f_lineno if frame else 0
