"""Speed and memory of the training step beside the notebook's own code: separate processes, taken in turn, medians.

A worker, `python -m bench.steps time SUBJECT STEPS`, works on synthetic data; its subject and its results
are JSON.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from tqdm import tqdm

from bench import machine, own_process
from gluon_mgpu.runtime import engine
from gluon_mgpu.runtime.errors import Error
from gluon_mgpu.training import datasets

BATCH_SIZE = {"lenet": 256, "resnet18": 64}
WARM_UP_STEPS = {"lenet": 10, "resnet18": 2}
STEPS_PER_STEP = {"lenet": 1, "resnet18": 0.1}  # ResNet-18 computes some 80 times as much a step


class Subject(NamedTuple):
    """One thing to measure: an implementation on so many contexts, under settings that differ from its own."""

    name: str
    contexts: int
    note: str = ""  # what differs
    settings: tuple = ()  # ((environment variable, value), ...)
    ahead: int = 0  # how many steps Python may run ahead; 0: what the loop allows
    model: str = "lenet"
    work: str = "train"  # or "evaluate"
    batches: int = 1  # the batch is so many of BATCH_SIZE, and there are as many times fewer steps
    without: str = ""  # what of `blocks`: "blocks" of channels, "pieces" of batches, or "both"

    def __str__(self) -> str:
        return f"{self.name}, {self.contexts} context{'s'[: self.contexts > 1]}{', ' * bool(self.note)}{self.note}"

    @property
    def size(self) -> int:
        return BATCH_SIZE[self.model] * self.batches


ONE_THREAD: dict[str, Any] = {"note": "1 thread", "settings": (("OMP_NUM_THREADS", "1"),)}
STEP = (
    Subject("notebook", 1),
    Subject("notebook", 2),
    *(
        subject
        for name in ("scratch", "highlevel")
        for subject in (Subject(name, 1, **ONE_THREAD), Subject(name, 1), Subject(name, 2))
    ),
)
EVALUATE = tuple(
    Subject(name, contexts, work="evaluate", **options)
    for name in ("scratch", "highlevel")
    for contexts, options in ((1, ONE_THREAD), (1, {}), (2, {}))
)
RESNET18 = tuple(s._replace(work="train", model="resnet18") for s in EVALUATE if s.name == "highlevel")
GLIBC = (
    ("MALLOC_MMAP_MAX_", "65536"),
    ("MALLOC_TRIM_THRESHOLD_", "131072"),
    ("MALLOC_TOP_PAD_", "131072"),
    ("MALLOC_ARENA_MAX", "16"),
)
ENGINE = tuple(
    subject
    for name in ("scratch", "highlevel")
    for subject in (
        Subject(name, 2),
        Subject(name, 2, "4 temporary spaces", (("MXNET_CPU_TEMP_COPY", "4"),)),
        Subject(name, 2, "512 temporary spaces", (("MXNET_CPU_TEMP_COPY", "512"),)),
        Subject(name, 2, "glibc's own malloc", GLIBC),
        Subject(name, 2, "1 step ahead", ahead=1),
    )
) + (
    Subject("highlevel", 2, "no blocks", without="blocks"),
    Subject("highlevel", 2, "no pieces", without="pieces"),
    Subject("highlevel", 2, "no blocks, no pieces", without="both"),
)


def measure(subjects: Sequence[Subject], rounds: int = 3, steps: int = 100) -> dict[Subject, list[dict[str, float]]]:
    """{subject: [result of each round]}, a result being what the worker prints: {"step_ms": …, "peak_mb": …}."""
    results: dict[Subject, list[dict[str, float]]] = {subject: [] for subject in subjects}
    with tqdm(total=rounds * len(subjects), unit="run", leave=False, disable=not sys.stderr.isatty()) as bar:
        for _ in range(rounds):
            for subject in subjects:
                bar.set_description(str(subject))
                results[subject].append(_in_own_process(subject, steps))
                bar.update()
    return results


def main_job() -> tuple[str, float]:
    """The main job in a process of its own: (what it printed, peak memory in MB)."""
    command = [sys.executable, "-m", "gluon_mgpu", "train", "--impl", "scratch", "--gpus", "2", "--device", "cpu"]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert job.stdout
    try:
        printed = job.stdout.read()
    except KeyboardInterrupt:
        job.kill()
        raise
    _, status, usage = os.wait4(job.pid, 0)
    if status:
        raise Error("the main job failed: its own message is above")
    return printed, usage.ru_maxrss / 1024


def step_table(results: dict[Subject, list[dict[str, float]]]) -> str:
    """How fast each subject of STEP is: times as fast as the notebook's code, and as one context with one thread."""
    one_thread = {s.name: s for s in results if s.contexts == 1 and (s.settings or s.name == "notebook")}
    columns = {
        "x notebook": lambda s: _ratio(results[Subject("notebook", s.contexts)], results[s]),
        "x 1 context, 1 thread": lambda s: _ratio(results[one_thread[s.name]], results[s]),
    }
    return _table(results, columns)


def speedup_table(results: dict[Subject, list[dict[str, float]]]) -> str:
    """How fast the subjects of EVALUATE or RESNET18 are: times as fast as one context with one thread."""
    one_thread = {s.name: s for s in results if s.contexts == 1 and s.settings}
    return _table(results, {"x 1 context, 1 thread": lambda s: _ratio(results[one_thread[s.name]], results[s])})


def engine_table(results: dict[Subject, list[dict[str, float]]]) -> str:
    """What each setting of ENGINE buys: the time a step takes without it, relative to ours."""
    return _table(results, {"x ours": lambda s: _ratio(results[s], results[Subject(s.name, s.contexts)])})


def profile(steps: int = 50) -> str:
    """Lines for a terminal: the milliseconds of a step that each operator takes, by the engine's own profile."""
    names = ("notebook", "scratch", "highlevel")
    settings = (("OMP_NUM_THREADS", "1"), ("MXNET_EXEC_BULK_EXEC_TRAIN", "0"))  # operators one by one, not in bulk
    times = {name: _in_own_process(Subject(name, 1, settings=settings), steps, "profile") for name in names}
    operators = sorted(
        {o for ms in times.values() for o in ms}, key=lambda o: -max(ms.get(o, 0) for ms in times.values())
    )
    lines = [
        f"ms a step on 1 context, 1 thread, operators of 0.05 ms and more\n{'':28}" + "".join(f"{n:>11}" for n in names)
    ]
    for operator in operators:
        row = [ms.get(operator, 0) for ms in times.values()]
        if max(row) >= 0.05:
            lines.append(f"{operator:28}" + "".join(f"{ms:11.2f}" for ms in row))
    return "\n".join([*lines, f"{'all':28}" + "".join(f"{sum(ms.values()):11.2f}" for ms in times.values())])


def overhead(epochs: int = 4) -> str:
    """Lines for a terminal: what of an epoch is not computation on the contexts, for Gluon with one thread a context.

    Contexts wait: the share of their time in which they compute nothing, whatever they wait for. Python's thread: all
    that it does, which costs no time where a core is free for it. Then what showing and keeping a run takes of that.
    """
    lines = [
        "Epochs with a terminal's bar, a folder and TensorBoard: training, evaluation, and all that is around them",
        f"{'':24}s/epoch  contexts wait  Python's thread  of that bar  and folder; {machine.line()}",
    ]
    for model, contexts, examples in (("lenet", 1, 60000), ("lenet", 2, 60000), ("resnet18", 2, 640)):
        settings = ONE_THREAD["settings"] if contexts == 1 else ()
        subject = Subject("highlevel", contexts, model=model, settings=settings)
        spent = _in_own_process(subject, epochs, f"overhead {examples}")
        share = {name: f"{100 * spent[name] / spent['epoch']:.2f}%" for name in ("python", "bar", "folder")}
        waits = f"{100 * (1 - spent['workers'] / contexts / spent['epoch']):.1f}%"
        title = f"{model}, {contexts} context{'s'[: contexts > 1]}"
        lines.append(
            f"{title:24}{spent['epoch']:7.2f}{waits:>15}{share['python']:>17}{share['bar']:>13}{share['folder']:>12}"
        )
    return "\n".join([*lines, "ResNet-18's epochs are of 640 examples, and the folder's time is of each epoch."])


def _overhead(subject: Subject, epochs: int, examples: int) -> dict[str, float]:
    """Train as on a terminal, with a folder and TensorBoard: {"epoch", "python", "workers", "bar", "folder": seconds an
    epoch}: python and workers are CPU time, of Python's thread and of all others, but for the folder's, which is all
    Python's."""
    from gluon_mgpu import highlevel
    from gluon_mgpu.training import loop, records

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    times, clocks = {"bar": 0.0, "folder": 0.0}, (time.perf_counter, time.thread_time, time.process_time)
    of_epochs = []

    def epoch(*args: Any, whole: Callable[..., None] = loop._epoch) -> None:
        before = [clock() for clock in clocks]
        whole(*args)
        of_epochs.append([clock() - start for clock, start in zip(clocks, before)])

    loop._epoch = epoch  # type: ignore[assignment]  # its arguments are passed on as they are

    def timed(owner: Any, method: str, name: str) -> None:
        original = getattr(owner, method)

        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                times[name] += time.perf_counter() - start

        setattr(owner, method, call)

    timed(loop.tqdm, "update", "bar")
    timed(loop.tqdm, "set_postfix_str", "bar")
    timed(records.Run, "epoch", "folder")
    timed(records.Run, "end", "folder")
    settings: dict[str, Any] = {
        "dataset": "synthetic",
        "limit": examples,
        "epochs": epochs,
        "seed": 0,
        "model": subject.model,
    }
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(Terminal()):
        with contextlib.redirect_stdout(io.StringIO()):
            highlevel.train(
                subject.contexts, subject.size, 0.01, device="cpu", out=folder, tensorboard=True, **settings
            )
    bar, kept = (seconds / epochs for seconds in times.values())
    seconds, python, process = map(median, zip(*of_epochs[1:]))  # the first one is cold
    return {
        "epoch": seconds + kept,
        "python": python + kept,
        "workers": process - python,
        "bar": bar,
        "folder": kept,
    }


def _table(results: dict[Subject, list[dict[str, float]]], columns: dict[str, Callable[[Subject], float]]) -> str:
    first = next(iter(results))
    size, title = BATCH_SIZE[first.model], {"lenet": "LeNet", "resnet18": "ResNet-18"}[first.model]
    lines = [
        f"{title}, {first.work}, batch {size}, medians; {machine.line()}",
        f"{'':42}ms/step    (min-max)  examples/s  {'  '.join(columns)}  peak MB",
    ]
    for subject, runs in results.items():
        times = [run["step_ms"] for run in runs]
        ratios = "  ".join(f"{ratio(subject):{len(title)}.2f}" for title, ratio in columns.items())
        lines.append(
            f"{subject!s:42}{median(times):7.1f} {f'({min(times):.1f}-{max(times):.1f})':>12} "
            f"{1000 * size / median(times):11.0f}  {ratios} {median(run['peak_mb'] for run in runs):8.0f}"
        )
    return "\n".join(lines)


def _ratio(slow: list[dict[str, float]], fast: list[dict[str, float]]) -> float:
    """Median, over the rounds, of how many times as long the one took as the other."""
    return median(a["step_ms"] / b["step_ms"] for a, b in zip(slow, fast))


def _in_own_process(subject: Subject, steps: int, mode: str = "time") -> Any:
    given = mode, json.dumps(subject._asdict()), steps
    advice = "stock MXNet can hang on several contexts" if subject.name == "notebook" else "give fewer steps"
    return own_process.last(str(subject), "bench.steps", *given, settings=subject.settings, advice=advice)


def _worker(mode: str, subject: Subject, steps: int) -> None:
    if subject.name != "notebook":
        engine.configure(subject.contexts)
    module = importlib.import_module(f"gluon_mgpu.{subject.name}")
    import mxnet as mx

    if mode.startswith("overhead "):
        print(json.dumps(_overhead(subject, steps, int(mode.split()[1]))))
        return
    ctx = [mx.cpu(i) for i in range(subject.contexts)]
    size, warm_up = subject.size, WARM_UP_STEPS[subject.model]
    steps = max(5, round(steps * STEPS_PER_STEP[subject.model] / subject.batches))
    data = datasets.synthetic(max(steps, warm_up) * size, 100, seed=0)
    mx.random.seed(0)
    if subject.name == "notebook":
        params = module.init_params()
        device_params = [module.get_params(params, c) for c in ctx]

        def work(examples: int) -> float:
            # Its batches are made beforehand: only its inner loop is timed.
            train_iter = [
                (mx.nd.array(data.train_images[i : i + size]) / 255, mx.nd.array(data.train_labels[i : i + size]))
                for i in range(0, examples, size)
            ]
            mx.nd.waitall()
            start = time.perf_counter()
            module.train_epoch(train_iter, device_params, ctx, lr=0.2)
            return time.perf_counter() - start
    else:
        from gluon_mgpu.training import loop
        from gluon_mgpu.training import tuning as blocks
        from gluon_mgpu.training.settings import Settings

        if subject.without in ("blocks", "both"):
            blocks.CHANNELS = 1
        if subject.without in ("pieces", "both"):
            blocks.EXAMPLES = subject.size
        loop.MOST_STEPS_AHEAD = subject.ahead or loop.MOST_STEPS_AHEAD
        replicas = module.Replicas(ctx, Settings(model=subject.model))

        def work(examples: int) -> float:
            start = time.perf_counter()
            data_iter = loop.batches(data.train_images[:examples], data.train_labels[:examples], size)
            if subject.work == "evaluate":
                replicas.evaluate_accuracy(data_iter)
            else:
                loop.train_epoch(partial(replicas.train_batch, lr=0.2), data_iter, examples, subject.name)
            return time.perf_counter() - start

    work(warm_up * size)
    if mode == "profile":
        with tempfile.TemporaryDirectory() as folder:  # the profiler removes its file, even /dev/null
            unused = os.path.join(folder, "profile.json")
            mx.profiler.set_config(
                profile_imperative=True, profile_symbolic=True, aggregate_stats=True, filename=unused
            )
            mx.profiler.set_state("run")
            work(steps * size)
            mx.profiler.set_state("stop")
            operators = json.loads(mx.profiler.dumps(format="json"))["Time"]["operator"]
        print(json.dumps({name: spent["Total"] / steps for name, spent in operators.items()}))
        return
    step_ms = work(steps * size) / steps * 1000
    print(json.dumps({"step_ms": step_ms, "peak_mb": machine.peak_mb()}))


if __name__ == "__main__":
    _worker(sys.argv[1], Subject(**json.loads(sys.argv[2])), int(sys.argv[3]))
