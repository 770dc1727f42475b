"""Compares a training step on several devices with the same step on one: for MXNet, PyTorch and JAX."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gluon_mgpu.check.judge import Report
from gluon_mgpu.support.errors import UsageError

FUNCTIONS = {
    "torch": "train_batch(X, y, params, lr) and init_params(), or train_batch(X, y, net, trainer) and init_net(lr)",
    "jax": "train_batch(X, y, device_params, devices, lr), or train_batch(X, y, params, lr), and init_params()",
}


def parallel(*args: Any, **options: Any) -> Report:
    """Compare PyTorch training steps in several processes with the same steps in one: see `pytorch.parallel`."""
    from gluon_mgpu.check import pytorch

    return pytorch.parallel(*args, **options)


def compare_file(
    path: str, processes: Sequence[int] = (2, 3), steps: int = 3, even: bool = False, seconds: float = 60
) -> Report:
    """Compare the steps of a PyTorch or JAX file; the arguments are those of `parallel`."""
    driver = import_module("gluon_mgpu.check.jax" if framework(path) == "jax" else "gluon_mgpu.check.pytorch")
    report: Report = driver.compare_file(path, processes, steps, even, seconds)
    return report


def framework(path: str) -> str | None:
    """What a Python file imports: "torch" or "jax"; None if it imports neither, or is not a Python file.

    Raises UsageError if the file lacks the functions of a step, or if PyTorch or JAX is not installed.
    """
    if not os.path.isfile(path):
        return None
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (SyntaxError, ValueError):
        return None  # the other check says so
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules = {name.partition(".")[0] for name in names}
    found = next((name for name in FUNCTIONS if name in modules and "mxnet" not in modules), None)
    if found:
        assigned = [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
        defined = {*(getattr(node, "name", "") for node in tree.body), *map(ast.unparse, assigned)}
        defined |= {alias.asname or alias.name for node in tree.body for alias in getattr(node, "names", ())}
        starts = {"init_params", *(["init_net"] if found == "torch" else [])}
        if "train_batch" not in defined or not starts & defined:
            raise UsageError(None, path, f"must define {FUNCTIONS[found]}")
        if not find_spec(found):
            advice = "run `make torch`, or install torch" if found == "torch" else "run `pip install '.[jax]'`"
            raise UsageError(None, path, f"{found} is not installed for {sys.executable}; {advice}")
    return found
