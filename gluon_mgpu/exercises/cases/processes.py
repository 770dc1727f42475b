"""The hidden cases of `process`, whose answer runs in several processes; see `cases`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np

from gluon_mgpu.exercises import Mistake, cases
from gluon_mgpu.exercises.cases import Case, Function, Trial, inputs, same, shown


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

    def run_all(self, program: Callable[[Any], object]) -> None:
        """Call program(dist) in each process. Raises its first error; Mistake if some wait forever."""

        def start(rank: int) -> None:
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
            done = [pool.submit(start, rank) for rank in range(self.k)]
        errors = [future.exception() for future in done]
        for error in errors:
            if error and not isinstance(error, Ended):
                raise error
        waiting = [rank for rank, error in enumerate(errors) if error]
        if waiting:
            case = f"{self.k} processes; waiting forever in all_reduce: {', '.join(map(str, waiting))}"
            raise Mistake("not-all-call", case)


@inputs((11, 4, 2, 0.1), (6, 2, 3, 0.25), (5, 1, 2, 0.1), (9, 4, 2, 0.25), (8, 3, 1, 0.5))
def process(n: int, k: int, d: int, lr: float) -> Case:
    w, (X, y) = np.arange(1.0, d + 1) * (-1) ** np.arange(d), cases.linear(n, d, seed=n)
    text = f"{n} examples, {k} processes, lr {lr}, w = {shown([w])}"

    def call(function: Function) -> Trial:
        processes, replicas = Processes(k), [w.copy() for _ in range(k)]
        processes.run_all(lambda dist: function(X.copy(), y.copy(), replicas[dist.get_rank()], lr, dist))
        sent = {f"sent in call {i} of all_reduce": arrays for i, arrays in enumerate(processes.calls, 1)}
        return Trial({"w in each process": replicas}, [processes.calls], sent)

    def check(events: list[Any]) -> None:
        """That each process sent a gradient of its own."""
        [calls] = events
        own = [sent for sent in calls if sent[0].size >= d and all(map(np.any, sent)) and not same(sent, sent[:1] * k)]
        if k > 1 and not own:
            raise Mistake("whole-batch", f"{text}; sent: {'; '.join(map(shown, calls)) or 'nothing'}")

    def mistakes(mine: Trial, right: Trial) -> dict[str, bool]:
        first_sent = next(iter(mine.notes.values()), [])
        equal = bool(first_sent) and same(first_sent, first_sent[:1] * k)
        return {"same-shard": k > 1 and equal}

    return Case(text, call, {"w in each process": [w] * k}, check, mistakes)
