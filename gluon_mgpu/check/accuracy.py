"""Whether `evaluate_accuracy` counts each example once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from gluon_mgpu.check.processes import where


def accuracy(
    evaluate: Callable[[Sequence[Any]], Any],
    net: Callable[[Any], Any],
    parts: Sequence[Any],
    label: Callable[..., Any],
) -> str:
    """What is wrong with evaluate([(images, labels), ...]). net: computes scores. parts: images. label: makes labels of
    a list of integers."""
    batches = []
    for X in parts:
        scores = np.array(net(X).tolist())
        second, best = scores.argsort(axis=1).T[-2:]
        right = np.isin(np.arange(len(best)), [0, len(best) - 2, len(best) - 1])  # three of each batch
        batches.append((X, label(np.where(right, best, second).tolist())))
    expected = 3 * len(parts) / sum(map(len, parts))
    try:
        value = float(evaluate(batches))
    except Exception as error:
        return f"evaluate_accuracy fails: {where(error)}"
    reason = f"evaluate_accuracy returns {value:.4f} instead of {expected:.4f}; count each example once"
    return "" if abs(value - expected) < 1e-6 else reason


def of_file(module: ModuleType, X: Any, label: Callable[..., Any], params: Any, net: Any = None) -> str:
    """What is wrong with the file's `evaluate_accuracy`, if it has one for batches, and a network or its parameters.

    X: 11 examples. params, net: the other argument, by its name; without a network, the file's `lenet(X, params)`.
    """
    evaluate, lenet = (getattr(module, name, None) for name in ("evaluate_accuracy", "lenet"))
    net = net or (lenet and (lambda X: lenet(X, params)))
    parameters = inspect.signature(evaluate).parameters.values() if evaluate else ()
    models = {"params": params, "net": net, "model": net}
    names = [p.name for p in parameters if p.default is p.empty]
    if not evaluate or not net or len({*names} - {*models}) != 1 or len(names) != 2:
        return ""
    call = lambda batches: evaluate(**{name: models.get(name, batches) for name in names})  # noqa: E731
    return accuracy(call, net, [X[:7], X[7:]], label)
