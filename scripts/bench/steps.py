"""`steps`: speed and memory of the training step next to the notebook's code, in separate processes, in turn.

A worker, `python -m bench.steps JOB`, works on synthetic data. docs/performance.md and docs/engine.md have the results.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from bench import harness
from bench.harness import BATCH_SIZE, LR, TITLE, Trainer, ratios
from gluon_mgpu.training import datasets
from gluon_mgpu.training.datasets import Dataset

if TYPE_CHECKING:
    from mxnet.ndarray import NDArray

Results = dict["Subject", list[dict[str, float]]]


class Subject(NamedTuple):
    """One thing to measure: an implementation on a number of contexts, perhaps with other settings than its own."""

    impl: str  # "scratch", "highlevel", or "notebook" for the notebook's own code
    contexts: int
    note: str = ""  # what differs
    settings: tuple[tuple[str, str], ...] = ()  # environment variables
    ahead: int = 0  # how many steps Python may run ahead; 0: as in training
    model: str = "lenet"
    evaluate: bool = False  # instead of training
    batches: int = 1  # multiplies the batch size
    tune: bool = True

    def __str__(self) -> str:
        return ", ".join(filter(None, [self.impl, harness.plural(self.contexts, "context"), self.note]))

    @property
    def size(self) -> int:
        return BATCH_SIZE[self.model] * self.batches


def one_thread(subject: Subject) -> Subject:
    return subject._replace(note="1 thread", settings=tuple(harness.ONE_THREAD.items()))


def _alone_and_on_two(subject: Subject) -> tuple[Subject, ...]:
    return one_thread(subject), subject, subject._replace(contexts=2)


GLIBC = (
    ("MALLOC_MMAP_MAX_", "65536"),
    ("MALLOC_TRIM_THRESHOLD_", "131072"),
    ("MALLOC_TOP_PAD_", "131072"),
    ("MALLOC_ARENA_MAX", "16"),
)
SCRATCH, HIGHLEVEL = Subject("scratch", 1), Subject("highlevel", 1)
STEP = (
    *(Subject("notebook", 1), Subject("notebook", 2)),
    *(_alone_and_on_two(SCRATCH) + _alone_and_on_two(HIGHLEVEL)),
)
EVALUATE = tuple(subject._replace(evaluate=True) for subject in STEP if subject.impl != "notebook")
RESNET18 = _alone_and_on_two(HIGHLEVEL._replace(model="resnet18"))
ENGINE = tuple(
    subject
    for impl in ("scratch", "highlevel")
    for subject in (
        Subject(impl, 2),
        Subject(impl, 2, "4 temporary spaces", (("MXNET_CPU_TEMP_COPY", "4"),)),
        Subject(impl, 2, "512 temporary spaces", (("MXNET_CPU_TEMP_COPY", "512"),)),
        Subject(impl, 2, "glibc's own malloc", GLIBC),
        Subject(impl, 2, "1 step ahead", ahead=1),
    )
) + (Subject("highlevel", 2, "not tuned", tune=False),)


def measure(subjects: Sequence[Subject], rounds: int = 3, steps: int = 100) -> Results:
    """{subject: what `harness.time_steps` returns, in each round}. steps: per run, of LeNet with its own batch size."""
    return harness.in_turn(subjects, rounds, lambda subject: start(subject, "time", steps=steps))


def start(subject: Subject, mode: str, **job: Any) -> Any:
    """What a worker returns for a subject. mode: a key of MODES."""
    advice = "stock MXNet can hang on several contexts" if subject.impl == "notebook" else "use fewer steps"
    env, job = harness.environment(subject.settings), {"mode": mode, "subject": subject, **job}
    return harness.worker(str(subject), "steps", job, env=env, seconds=SECONDS[mode], advice=advice)


def step_table(results: Results) -> str:
    """How fast each subject of STEP is, relative to the notebook's code and to one context with one thread."""
    notebook = {subject.contexts: subject for subject in results if subject.impl == "notebook"}
    return _table(results, {"x notebook": lambda s: notebook[s.contexts], **_alone(results)})


def speedup_table(results: Results) -> str:
    """How fast the subjects of EVALUATE or RESNET18 are, relative to one context with one thread."""
    return _table(results, _alone(results))


def engine_table(results: Results) -> str:
    """How much faster or slower a step is without each setting of ENGINE."""
    return _table(results, {"x our speed": lambda subject: Subject(subject.impl, subject.contexts)})


def _alone(results: Results) -> dict[str, Callable[[Subject], Subject]]:
    alone = {s.impl: s for s in results if s.contexts == 1 and (s.settings or s.impl == "notebook")}
    return {"x 1 context, 1 thread": lambda subject: alone[subject.impl]}


def _table(results: Results, columns: dict[str, Callable[[Subject], Subject]]) -> str:
    """columns: for each heading, which subject the others are compared with."""
    first = next(iter(results))
    step_ms = {subject: [run["step_ms"] for run in runs] for subject, runs in results.items()}
    rows = [["", "ms/step", "examples/s", *columns, "peak MB"]]
    for subject, ms in step_ms.items():
        rate, peak = 1000 * subject.size / median(ms), median(run["peak_mb"] for run in results[subject])
        compared = (f"{median(ratios(step_ms[other(subject)], ms)):.2f}" for other in columns.values())
        rows.append([str(subject), harness.spread(ms, 1), f"{rate:.0f}", *compared, f"{peak:.0f}"])
    what = "evaluation" if first.evaluate else "training"
    title = f"{TITLE[first.model]}, {what}, batch {first.size}, medians (min-max); {harness.machine_line()}"
    return "\n".join([title, *harness.table(rows)])


def profile(steps: int = 50) -> str:
    """Lines for a terminal: the milliseconds per step that each operator takes, from the engine's profile."""
    settings = (*harness.ONE_THREAD.items(), ("MXNET_EXEC_BULK_EXEC_TRAIN", "0"))  # operators one by one, not in bulk
    impls = ("notebook", "scratch", "highlevel")
    times = {impl: start(Subject(impl, 1, settings=settings), "profile", steps=steps) for impl in impls}
    slowest = {name: max(ms.get(name, 0) for ms in times.values()) for name in {n for ms in times.values() for n in ms}}
    rows = [["", *impls]]
    for name in sorted(slowest, key=lambda name: -slowest[name]):
        if slowest[name] >= 0.05:
            rows.append([name, *(f"{ms.get(name, 0):.2f}" for ms in times.values())])
    rows.append(["all", *(f"{sum(ms.values()):.2f}" for ms in times.values())])
    title = f"ms/step on 1 context with 1 thread, operators of 0.05 ms and more; {harness.machine_line()}"
    return "\n".join([title, *harness.table(rows)])


def overhead(rounds: int = 3, epochs: int = 3) -> str:
    """Lines for a terminal: how long an epoch takes with all that a run writes, and what is not computation.

    The contexts' idle share is the part of their time in which they compute nothing. The main thread is Python's: if a
    core is free for it, its work costs no time.
    """
    rows = [["", "s/epoch", "contexts idle", "main thread"]]
    for model, contexts, examples in (("lenet", 1, 15000), ("lenet", 2, 15000), ("resnet18", 2, 640)):
        subject = Subject("highlevel", contexts, f"{examples} examples", model=model)
        if contexts == 1:
            subject = one_thread(subject)
        job = {"epochs": epochs, "examples": examples}
        found = harness.in_turn([subject], rounds, lambda subject, job=job: start(subject, "overhead", **job))[subject]
        idle = median(1 - run["other_threads"] / contexts / run["seconds"] for run in found)
        python = median(run["main_thread"] / run["seconds"] for run in found)
        name = f"{TITLE[model]}, {harness.plural(contexts, 'context')}, {examples} examples"
        seconds = harness.spread([run["seconds"] for run in found], 2)
        rows.append([name, seconds, f"{100 * idle:.1f}%", f"{100 * python:.1f}%"])
    title = f"Epochs with evaluation, run folder and TensorBoard, medians of {rounds} rounds (min-max);"
    return "\n".join([title, harness.machine_line(), *harness.table(rows)])


def main_job() -> str:
    """What the main job prints, and its peak memory. It keeps the engine settings of the user's environment."""
    job = {"mode": "main-job", "subject": Subject("scratch", 2)}
    env = harness.environment(without=())
    found = harness.worker("the main job", "steps", job, env=env, seconds=SECONDS["main-job"])
    title = f"The main job, scratch on 2 CPU contexts: peak memory {found['peak_mb']:.0f} MB"
    return f"{title}\n{found['printed']}".rstrip()


def trainer(subject: Subject) -> Trainer:
    """The subject's network on its contexts, on this process's MXNet."""
    if subject.impl == "notebook":
        return _notebook(subject)
    options = {} if subject.tune else {"tune": False}
    replicas = harness.replicas(subject.impl, subject.model, subject.contexts, **options)
    from gluon_mgpu.training.batches import batches

    last: list[NDArray] = []

    def train_batch(X: NDArray, y: NDArray) -> list[NDArray]:
        losses = replicas.train_batch(X, y, LR[subject.model])
        if subject.ahead:
            for shard in last:
                shard.wait_to_read()
            last[:] = losses
        return losses

    def train(data: Dataset, order: np.ndarray) -> tuple[float | None, float]:
        start = time.perf_counter()
        if subject.evaluate:
            replicas.evaluate_accuracy(batches(data.train_images, data.train_labels, subject.size, order))
            return None, time.perf_counter() - start
        loss = harness.train(train_batch, data, subject.size, order)
        return loss, time.perf_counter() - start

    def accuracy(data: Dataset) -> float:
        return replicas.evaluate_accuracy(batches(data.test_images, data.test_labels, subject.size))

    return Trainer(train, accuracy)


def _notebook(subject: Subject) -> Trainer:
    """The notebook's own code. Only its inner loop is timed: making the batches does not count."""
    notebook = importlib.import_module("gluon_mgpu.parity.notebook")  # before mxnet, which does not import without it
    import mxnet as mx

    def other_way(p: np.ndarray) -> np.ndarray:  # its dense weights are (inputs, outputs)
        return p.T if p.ndim == 2 else p

    ctx = [mx.cpu(i) for i in range(subject.contexts)]
    arrays = harness.initial({i: other_way(p.asnumpy()) for i, p in enumerate(notebook.init_params())})
    params = [mx.nd.array(other_way(p)) for p in arrays.values()]
    device_params = [notebook.get_params(params, c) for c in ctx]

    def batches(images: np.ndarray, labels: np.ndarray, order: np.ndarray) -> Iterator[tuple[NDArray, NDArray]]:
        for i in range(0, len(order), subject.size):
            chosen = order[i : i + subject.size]
            yield mx.nd.array(images[chosen]) / 255, mx.nd.array(labels[chosen])

    def train(data: Dataset, order: np.ndarray) -> tuple[None, float]:
        seconds = 0.0
        for batch in batches(data.train_images, data.train_labels, order):
            mx.nd.waitall()
            start = time.perf_counter()
            notebook.train_epoch([batch], device_params, ctx, LR[subject.model])
            seconds += time.perf_counter() - start
        return None, seconds

    def accuracy(data: Dataset) -> float:
        right = 0
        for X, y in batches(data.test_images, data.test_labels, np.arange(len(data.test_labels))):
            right += (notebook.lenet(X, device_params[0]).argmax(axis=1) == y).sum().asscalar()
        return float(right) / len(data.test_labels)

    return Trainer(train, accuracy)


def _time(subject: Subject, steps: int) -> dict[str, Any]:
    return harness.time_steps(trainer(subject), subject.model, subject.size, steps)


def _learn(subject: Subject, epochs: int, seed: int) -> dict[str, Any]:
    return harness.learn(trainer(subject), epochs, seed)


def _profile(subject: Subject, steps: int) -> dict[str, float]:
    """{operator: milliseconds per step}, from MXNet's own statistics."""
    measured = trainer(subject)
    import mxnet as mx

    data = datasets.synthetic(steps * subject.size, 100, seed=0)
    order = np.arange(steps * subject.size)
    measured.train(data, order)
    with tempfile.TemporaryDirectory() as folder:  # the profiler writes a file in any case
        file = os.path.join(folder, "profile.json")
        mx.profiler.set_config(profile_imperative=True, profile_symbolic=True, aggregate_stats=True, filename=file)
        mx.profiler.set_state("run")
        measured.train(data, order)
        mx.profiler.set_state("stop")
        operators = json.loads(mx.profiler.dumps(format="json"))["Time"]["operator"]
    return {name: times["Total"] / steps for name, times in operators.items()}


def _overhead(subject: Subject, epochs: int, examples: int) -> dict[str, float]:
    """Seconds per epoch, and CPU seconds of the main thread and of all other threads.

    They are the difference between two runs, of which one has `epochs` more: the start of a run does not count.
    """
    from gluon_mgpu import highlevel

    clocks = (time.perf_counter, time.thread_time, time.process_time)

    def run(epochs: int) -> list[float]:
        options = {"dataset": "synthetic", "limit": examples, "epochs": epochs, "model": subject.model, "seed": 0}
        with tempfile.TemporaryDirectory() as out, contextlib.redirect_stdout(io.StringIO()):
            before = [clock() for clock in clocks]
            highlevel.train(subject.contexts, subject.size, 0.01, device="cpu", out=out, tensorboard=True, **options)
            return [clock() - start for clock, start in zip(clocks, before)]

    run(1)  # the first run imports everything
    short, long = run(1), run(1 + epochs)
    seconds, python, process = ((b - a) / epochs for a, b in zip(short, long))
    return {"seconds": seconds, "main_thread": python, "other_threads": process - python}


def _main_job(subject: Subject) -> dict[str, Any]:
    """What the notebook's experiment prints, and its peak memory."""
    from gluon_mgpu import scratch

    with contextlib.redirect_stdout(io.StringIO()) as printed:
        scratch.train(subject.contexts, subject.size, LR["lenet"], device="cpu")
    return {"printed": printed.getvalue(), "peak_mb": harness.peak_mb()}


MODES = {"time": _time, "learn": _learn, "profile": _profile, "overhead": _overhead, "main-job": _main_job}
SECONDS = {"time": 300, "learn": 900, "profile": 300, "overhead": 900, "main-job": 900}

if __name__ == "__main__":
    job = json.loads(sys.argv[1])
    print(json.dumps(MODES[job.pop("mode")](Subject(*job.pop("subject")), **job)))
