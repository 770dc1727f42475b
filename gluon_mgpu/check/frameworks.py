"""Checks a file with a step in PyTorch or JAX, in a process of its own. Needs no MXNet."""

from __future__ import annotations

import ast
import inspect
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from gluon_mgpu.check.comparison import Arrays, Report
from gluon_mgpu.support import subprocesses
from gluon_mgpu.support.errors import Error, UsageError

SECONDS = 300  # limit for a check, on a busy machine
CLAIMS = {
    "start": "all processes start with the same parameters",
    "devices": "each example is in exactly one process",
    "sum": "each process updates with the gradients of all processes",
    "losses": "the losses are those of the batch's examples",
    "replicas": "after a step, all processes have the same parameters",
    "update": "the step changes the parameters as in one process",
    "accuracy": "evaluate_accuracy counts each example once",
    "repeatable": "the same step twice gives the same result",
}
FUNCTIONS = {
    "torch": "train_batch(X, y, params, lr) and init_params(), or train_batch(X, y, net, trainer) and init_net(lr)",
    "jax": "train_batch(X, y, device_params, devices, lr) and init_params()",
}

HINTS = {  # {part of PyTorch's message: what to do}
    "Expected to have finished reduction": "a parameter gets no gradient; use it, or pass find_unused_parameters=True",
    "process group twice": 'the file starts when it is imported; put this under `if __name__ == "__main__"`',
    "by peer": "the processes do not make the same calls in the same order",
    "op.preamble": "the processes do not make the same calls in the same order, with the same shapes",
}


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
        defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        if "train_batch" not in defined or not {"init_params", "init_net"} & defined:
            raise UsageError(None, path, f"must define {FUNCTIONS[found]}")
        if not find_spec(found):
            advice = "run `make torch`, or install torch" if found == "torch" else "run `pip install '.[jax]'`"
            raise UsageError(None, path, f"{found} is not installed for {sys.executable}; {advice}")
    return found


def run(path: str, name: str) -> Report:
    """Check a file. name: its framework."""
    module = {"torch": "pytorch_step", "jax": "jax_step"}[name]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", f"gluon_mgpu.check.{module}", os.path.realpath(path), folder]
        # CPUs, and one thread, because the batches are small. The current folder's modules hide no others.
        env = {**subprocesses.users_environment(), "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
        env |= {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), env.get("PYTHONPATH")]))
        finished = subprocesses.run(command, env=env, seconds=SECONDS)
        result = Path(folder, "found.json")
        if result.exists():
            return Report(**json.loads(result.read_text()))
    if finished.status == 0:
        raise Error(f"{path} ended the process before the check was complete")
    subprocesses.raise_for_status(path, finished)
    raise AssertionError


def load(file: str) -> ModuleType:
    """Import a new copy of the user's file."""
    spec = spec_from_file_location("step", file)
    assert spec and spec.loader
    module = sys.modules["step"] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def spread(arrays: Arrays, seed: int = 0) -> Arrays:
    """Parameters with these shapes, from which each example has its own loss and gradient."""
    rng, found = np.random.default_rng(seed), {}
    for name, a in arrays.items():
        weight = rng.normal(0, (2 / np.prod(a.shape[1:])) ** 0.5, a.shape) if a.ndim > 1 else 0.5 + rng.random(a.shape)
        found[name] = weight.astype(np.float32).astype(np.float64)
    return found


def where(error: BaseException, file: str) -> str:
    """An error in one line, with the line of the user's file."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    message = (str(error).strip().splitlines() or [""])[0][:160]
    hint = next((f" ({hint})" for part, hint in HINTS.items() if part in str(error)), "")
    return f"{f'line {lines[-1]}: ' if lines else ''}{type(error).__name__}: {message}{hint}"


def accuracy(file: str, module: ModuleType, X: Any, label: Callable[..., Any], params: Any, net: Any) -> str | None:
    """Whether `evaluate_accuracy` counts each example once; None if the file has none for batches and a network.

    X: at least 11 examples. label: makes labels of a list of integers. params, net: its second argument, by its name.
    """
    evaluate = getattr(module, "evaluate_accuracy", None)
    parameters = inspect.signature(evaluate).parameters.values() if evaluate else ()
    models = {"params": params, "net": net, "model": net}
    names = [p.name for p in parameters if p.default is p.empty]
    data = [name for name in names if name not in models]
    if not evaluate or not net or len(names) != 2 or len(data) != 1:
        return None
    batches = []
    for examples in (X[:7], X[7:11]):
        scores = np.array(net(examples).tolist())
        if scores.ndim != 2:
            return None
        second, best = scores.argsort(axis=1).T[-2:]
        right = np.isin(np.arange(len(best)), [0, len(best) - 2, len(best) - 1])
        batches.append((examples, label(np.where(right, best, second).tolist())))
    try:
        value = float(evaluate(**{name: models.get(name, batches) for name in names}))
    except Exception as error:
        return f"evaluate_accuracy fails: {where(error, file)}"
    if abs(value - 6 / 11) < 1e-6:
        return ""
    return f"evaluate_accuracy returns {value:.4f} instead of {6 / 11:.4f}; count each example once"
