"""The hidden cases of `process`, whose answer runs in several processes; see `grading`."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from gluon_mgpu.exercises import Mistake, cases
from gluon_mgpu.exercises.cases import Function, Numbers, compare, gradient_of, linear, shown


class Ended(Exception):
    """A process ended, so all_reduce cannot return in the others."""


class Processes:
    """k processes, simulated by threads. calls: for each call of all_reduce, copies of the arrays of all processes."""

    def __init__(self, k: int) -> None:
        self.k, self.ended, self.changed = k, 0, threading.Condition()
        self.calls: list[list[Any]] = []
        self.waiting: dict[int, Any] = {}  # {rank: its array in the next call}

    def all_reduce(self, rank: int, array: Any) -> None:
        with self.changed:
            call, self.waiting[rank] = len(self.calls), array
            if len(self.waiting) == self.k:
                self.calls.append([np.array(self.waiting[i], float) for i in range(self.k)])
                for own in self.waiting.values():
                    own[:] = sum(self.calls[-1])
                self.waiting = {}
                self.changed.notify_all()
            self.changed.wait_for(lambda: len(self.calls) > call or self.ended)
            if len(self.calls) == call:
                raise Ended

    def run(self, program: Callable[[Any], object]) -> None:
        """Call program(dist) in each process. Raises its first error; Mistake if some wait forever."""

        def process(rank: int) -> None:
            try:
                program(
                    SimpleNamespace(
                        get_rank=lambda: rank,
                        get_world_size=lambda: self.k,
                        all_reduce=lambda array: self.all_reduce(rank, array),
                    )
                )
            finally:
                with self.changed:
                    self.ended += 1
                    self.changed.notify_all()

        with ThreadPoolExecutor(self.k) as pool:
            done = [pool.submit(process, rank) for rank in range(self.k)]
        errors = [future.exception() for future in done]
        for error in errors:
            if error and not isinstance(error, Ended):
                raise error
        waiting = [rank for rank, error in enumerate(errors) if error]
        if waiting:
            case = f"{self.k} processes; waiting forever in all_reduce: {', '.join(map(str, waiting))}"
            raise Mistake("not-all-call", case)


def _train(answer: Function, X: np.ndarray, y: np.ndarray, replicas: Numbers, lr: float, dist: Any) -> None:
    answer(X.copy(), y.copy(), replicas[dist.get_rank()], lr, dist)


def _splits(n: int, k: int) -> list[list[np.ndarray]]:
    """The ways to divide n examples among k processes that the cases know: dealt out, and consecutive, where the first,
    some or only the last process gets the examples that are left over."""
    examples, size = np.arange(n), n // k
    bounds = [i * n // k for i in range(k + 1)]
    return [
        [examples[i::k] for i in range(k)],
        np.array_split(examples, k),
        [examples[start:end] for start, end in zip(bounds, bounds[1:])],
        [examples[i * size : None if i == k - 1 else (i + 1) * size] for i in range(k)],
    ]


def process(answer: Function) -> None:
    w = np.array([1.0, -2.0])
    for n, k, lr in ((11, 4, 0.1), (6, 2, 0.25), (5, 1, 0.1), (9, 4, 0.25)):
        X, y = linear(n, seed=n)
        processes, replicas = Processes(k), [w.copy() for _ in range(k)]
        processes.run(partial(_train, answer, X, y, replicas, lr))
        gradient, cut = gradient_of(X, y, w), n - n % k
        sent, sent_weights = processes.calls[0] if processes.calls else [], False
        wrong: dict[str, list[Any]] = {"not-in-place": [0 * w], "one-replica": [[gradient / n, *[0 * w] * (k - 1)]]}
        for split in _splits(n, k):
            own, sizes = [gradient_of(X[s], y[s], w) for s in split], [len(s) for s in split]
            means = [g / size for g, size in zip(own, sizes)]
            sent_weights |= cases.same(sent, [w - lr * mean for mean in means])
            also: dict[str, list[Any]] = {
                "no-allreduce": [[g / size for g in own] for size in (n, n // k, 1)] + [means],
                "mean-of-means": [sum(means) * weight for weight in (1 / k, 1 / n, n // k / n, math.ceil(n / k) / n)],
                "sum-of-means": [sum(means)],
                "same-shard": [g * factor for g in own for factor in (k / n, 1 / n)] + means,
                "sums-parameters": [sum(means) - (k - 1) * w / lr, gradient / n - (k - 1) * w / lr],
                "shard-size": [[gradient / size / d for size in sizes] for d in (1, k)] + [gradient / (n // k)],
            }
            wrong = {name: wrong.get(name, []) + also.get(name, []) for name in {**wrong, **also}}
        wrong["drops-examples"] = [gradient_of(X[:cut], y[:cut], w) / size for size in (n, cut)] if cut < n else []
        wrong["no-division"] = [gradient]
        whole = bool(sent) and any(cases.same(sent, [gradient / size] * k) for size in (1, n, n * k))
        results = {name: [w - lr * np.array(g) for g in gs] for name, gs in wrong.items()}
        equal = k > 1 and bool(sent) and cases.same(sent, sent[:1] * k)
        empty = bool(np.isnan(replicas).any())
        summed = results.pop("sums-parameters")
        mistakes = {"empty-shard": empty, "sums-parameters": sent_weights or summed}
        mistakes |= {"whole-batch": k > 1 and whole, **results}
        mistakes |= {"same-shard": True} if equal else {}
        case = f"{n} examples, {k} processes, lr {lr}, w = {shown([w])}"
        for i, arrays in enumerate(processes.calls[:2], 1):
            case += f"\nsent in call {i} of all_reduce:  {shown(arrays)}"
        compare(f"{case}\nw in each process:", replicas, w - lr * gradient / n, mistakes, [w] * k)
        alone = k > 1 and (not sent or whole or sum(map(np.any, sent)) < k)
        cases.raise_first(case, {"whole-batch": alone})
