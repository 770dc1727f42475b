"""Imports what takes seconds once for all processes, and keeps the compiler of PyTorch out of those that do without."""

from __future__ import annotations

import ast
import importlib
import os
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

NEED_IT = (b"torch.compile", b"torch.func", b"vmap", b"fsdp", b"distributed.tensor")
NAME = "torch._dynamo"


def import_early(file: str) -> None:
    """Import the parts of PyTorch that a file imports, and the compiler if it may need it: each process would."""
    text = Path(file).read_bytes() if os.path.isfile(file) else b""
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in imports if isinstance(node, ast.ImportFrom)}
    for name in [*sorted(names), *[NAME] * any(word in text for word in NEED_IT)]:
        if name.startswith("torch."):
            with suppress(ImportError):  # each process says so
                importlib.import_module(name)


def leave_out() -> None:
    """Let DDP and optimizers, which use a few functions of the compiler in any case, do without it. If anything else of
    it is used, it is imported."""
    if NAME in sys.modules:
        return

    def real(module: str, attribute: str) -> Any:
        if sys.modules.get(NAME) is compiler:
            del sys.modules[NAME], torch._dynamo
        return getattr(importlib.import_module(module), attribute)

    compiler, utils = ModuleType(NAME), ModuleType(f"{NAME}.utils")
    disable: Any = lambda function=None, *_, **options: function or identity  # noqa: E731
    vars(compiler).update(disable=disable, graph_break=lambda: None, utils=utils)
    vars(utils).update(get_optimize_ddp_mode=lambda: "ddp_optimizer")
    for module in (compiler, utils):
        vars(module)["__getattr__"] = partial(real, module.__name__)
    torch._dynamo = sys.modules[NAME] = compiler


def compile_nothing() -> None:
    """Let torch.compile return what it gets: the reference needs no compiler."""
    if NAME in sys.modules:
        torch.compiler.set_stance("force_eager")
    torch.compile = lambda model=None, **_: identity if model is None else model


def identity(function: Any) -> Any:
    return function
