"""Whether a file's `evaluate_accuracy` counts each example once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from gluon_mgpu.check.processes import where


def accuracy(module: ModuleType, X: Any, label: Callable[..., Any], params: Any, net: Any) -> str | None:
    """What is wrong; None if the file has no such function for batches and a network.

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
        return f"evaluate_accuracy fails: {where(error)}"
    if abs(value - 6 / 11) < 1e-6:
        return ""
    return f"evaluate_accuracy returns {value:.4f} instead of {6 / 11:.4f}; count each example once"
