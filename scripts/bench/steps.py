"""Measure the time and memory of a training step and of the notebook's step, each in its own process.

docs/performance.md shows results.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from bench import harness
from bench.harness import BATCH_SIZE, IMPLS, LR, TITLE, Dataset, Job, Rounds, Train, ratios
from gluon_mgpu.compat import startup
from gluon_mgpu.support import log


class Subject(NamedTuple):
    """An implementation to measure on a number of contexts."""

    impl: str  # one of IMPLS, or "notebook" for the notebook's own code
    contexts: int
    model: str = "lenet"
    batch_size: int | None = None  # None: BATCH_SIZE[model]
    one_thread: bool = False  # for one context; several contexts always have one OpenMP thread each

    def __str__(self) -> str:
        contexts = f"{self.contexts} {log.plural(self.contexts, 'context')}"
        return f"{self.impl}, {contexts}{', 1 thread' * self.one_thread}"

    @property
    def size(self) -> int:
        return self.batch_size or BATCH_SIZE[self.model]

    def job(self, steps: int) -> Job:
        """Create the job of a worker that measures the subject."""
        advice = "stock MXNet can hang on several contexts" if self.impl == "notebook" else "use fewer steps"
        env = harness.environment(harness.ONE_THREAD if self.one_thread else None)
        return Job("steps", {"subject": self, "steps": steps}, env, advice=advice)


def measure(subjects: Iterable[Subject], rounds: int, steps: int) -> dict[Subject, Rounds]:
    """Time training steps; see `harness.time_steps`. steps: per run of LeNet with batch size 256."""
    return harness.measure({subject: subject.job(steps) for subject in subjects}, rounds)


def run(model: Sequence[str], rounds: int, steps: int) -> dict:
    """Measure each implementation of the models, and the notebook's step. Returns the input of `table`."""
    models = {}
    for name in model:
        subjects = [Subject("notebook", 2), Subject("notebook", 1)] if name == "lenet" else []
        for impl in IMPLS[name]:
            subjects += [Subject(impl, 1, name, one_thread=True), Subject(impl, 1, name), Subject(impl, 2, name)]
        models[name] = {str(subject): run for subject, run in measure(subjects, rounds, steps).items()}
    return {"rounds": rounds, "models": models}


def table(result: dict) -> str:
    """Format the times of each model, relative to the first row."""
    lines = [f"Medians of {result['rounds']} rounds (min-max); {harness.machine_line()}"]
    for model, runs in result["models"].items():
        first, size = next(iter(runs)), BATCH_SIZE[model]
        rows = [(name, size, run, {f"x {first}": ratios(runs[first], run)}) for name, run in runs.items()]
        lines += ["", *harness.speed_table(f"{TITLE[model]}, batch {size}", rows)]
    return "\n".join(lines)


def work(subject: list[Any], steps: int) -> dict[str, Any]:
    """Measure the time of a step. subject: a Subject's fields."""
    of = Subject(*subject)
    return harness.time_steps(trainer(of), of.model, of.size, steps)


def trainer(subject: Subject) -> Train:
    """Create a function that trains the subject's network on contexts of this process."""
    if subject.impl == "notebook":
        return _notebook(subject)
    model = harness.build(subject.impl, subject.model, subject.contexts, size=subject.size)
    return harness.timed(model.step, LR[subject.model], subject.size)


def _notebook(subject: Subject) -> Train:
    """Create a function that trains with the notebook's own code. The time excludes making batches."""
    startup.use_stock_settings()
    import mxnet as mx
    from parity import notebook

    from gluon_mgpu import scratch

    ctx = [mx.cpu(i) for i in range(subject.contexts)]
    arrays = harness.initial({i: p.asnumpy() for i, p in enumerate(scratch.init_params())})
    # The notebook's dense weights have the shape (inputs, outputs).
    params = [mx.nd.array(p.T if p.ndim == 2 else p) for p in arrays.values()]
    device_params = [notebook.get_params(params, c) for c in ctx]

    def train(data: Dataset, order: np.ndarray) -> tuple[None, float]:
        seconds = 0.0
        for i in range(0, len(order), subject.size):
            chosen = order[i : i + subject.size]
            X, y = mx.nd.array(data.train_images[chosen]) / 255, mx.nd.array(data.train_labels[chosen])
            mx.nd.waitall()
            start = time.perf_counter()
            notebook.train_batch(X, y, device_params, ctx, LR[subject.model])
            mx.nd.waitall()  # as in the notebook
            seconds += time.perf_counter() - start
        return None, seconds

    return train
