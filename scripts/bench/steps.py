"""Measure the time and memory of a training step and of the notebook's step, each in its own process.

docs/performance.md and docs/engine.md show results.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from bench import harness
from bench.harness import BATCH_SIZE, IMPLS, LR, TITLE, Dataset, Job, Rounds, Train, ratios
from gluon_mgpu.runtime import engine, log

ENGINE = {  # {note: changed settings}
    "": (),
    "4 temporary spaces": (("MXNET_CPU_TEMP_COPY", "4"),),
    "glibc's own malloc": (
        ("MALLOC_MMAP_THRESHOLD_", "131072"),
        ("MALLOC_TRIM_THRESHOLD_", "131072"),
        ("MALLOC_TOP_PAD_", "131072"),
        ("MALLOC_ARENA_MAX", "16"),
    ),
}


class Subject(NamedTuple):
    """An implementation to measure on a number of contexts, with or without changed settings."""

    impl: str  # one of IMPLS, or "notebook" for the notebook's own code
    contexts: int
    note: str = ""  # describes the changed settings
    settings: tuple[tuple[str, str], ...] = ()  # environment variables
    model: str = "lenet"
    batch_size: int | None = None  # None: BATCH_SIZE[model]

    def __str__(self) -> str:
        return ", ".join(
            filter(None, [self.impl, f"{self.contexts} {log.plural(self.contexts, 'context')}", self.note])
        )

    @property
    def size(self) -> int:
        return self.batch_size or BATCH_SIZE[self.model]

    def job(self, steps: int) -> Job:
        """Create the job of a worker that measures the subject."""
        advice = "stock MXNet can hang on several contexts" if self.impl == "notebook" else "use fewer steps"
        arguments = {"subject": self, "steps": steps}
        return Job("steps", arguments, harness.environment(self.settings), advice=advice)


def one_thread(subject: Subject) -> Subject:
    """The same subject, but on one context with one OpenMP thread."""
    return subject._replace(contexts=1, note="1 thread", settings=tuple(harness.ONE_THREAD.items()))


def _scaled(model: str) -> list[Subject]:
    ones = [Subject(impl, 1, model=model) for impl in IMPLS[model]]
    return [subject for one in ones for subject in (one_thread(one), one, one._replace(contexts=2))]


# {name: groups}; each subject is compared with the first subject in its group
SUBJECTS: dict[str, list[list[Subject]]] = {
    "step": [[Subject("notebook", 2), Subject("notebook", 1), *_scaled("lenet")]],
    "resnet18": [_scaled("resnet18")],
    "engine": [[Subject(impl, 2, *changed) for changed in ENGINE.items()] for impl in IMPLS["lenet"]],
}


def measure(subjects: Iterable[Subject], rounds: int, steps: int) -> dict[Subject, Rounds]:
    """Time training steps; see `harness.time_steps`. steps: per run of LeNet with batch size 256."""
    return harness.measure({subject: subject.job(steps) for subject in subjects}, rounds)


def run(what: Sequence[str], rounds: int, steps: int) -> dict:
    """Measure the SUBJECTS in `what`. Returns the input of `table`."""
    groups = []
    for name in what:
        for subjects in SUBJECTS[name]:
            runs = {str(subject): run for subject, run in measure(subjects, rounds, steps).items()}
            groups.append({"model": subjects[0].model, "batch_size": subjects[0].size, "runs": runs})
    return {"rounds": rounds, "groups": groups}


def table(result: dict) -> str:
    """Format the times of each group, relative to the group's first subject."""
    lines = [f"Medians of {result['rounds']} rounds (min-max); {harness.machine_line()}"]
    for group in result["groups"]:
        size, runs = group["batch_size"], group["runs"]
        first = next(iter(runs))
        rows = [(name, size, run, {f"x {first}": ratios(runs[first], run)}) for name, run in runs.items()]
        lines += harness.speed_table(f"{TITLE[group['model']]}, batch {size}", rows)
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
    return harness.timed(partial(model.step, lr=LR[subject.model]), subject.size)


def _notebook(subject: Subject) -> Train:
    """Create a function that trains with the notebook's own code. The time excludes making batches."""
    engine.use_stock_settings()
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
