"""Speed and memory of the training step beside the notebook's own code: separate processes, taken in turn, medians.

A worker (`python -m gluon_mgpu.bench NAME CONTEXTS STEPS`) trains on synthetic data in memory and prints one JSON line.
"""

import importlib
import json
import os
import platform
import resource
import subprocess
import sys
import time
from importlib.metadata import version
from statistics import median
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from gluon_mgpu import datasets, engine
from gluon_mgpu.errors import Error

BATCH_SIZE = 256
WARM_UP_STEPS = 10
WORKER_SECONDS = 300
ENGINE_SETTINGS = ("OMP_", "MXNET_", "MALLOC_", "GLIBC_TUNABLES")


class Subject(NamedTuple):
    """One thing to measure: an implementation on so many contexts, with so many OpenMP threads each (0: its own)."""

    name: str
    contexts: int
    threads: int = 0


SUBJECTS = (
    Subject("notebook", 1),
    Subject("notebook", 2),
    Subject("scratch", 1, threads=1),
    Subject("scratch", 1),
    Subject("scratch", 2),
    Subject("highlevel", 1, threads=1),
    Subject("highlevel", 1),
    Subject("highlevel", 2),
)


def measure(rounds=3, steps=100):
    """{subject: [result of each round]}, a result being what the worker prints: {"step_ms": …, "peak_mb": …}."""
    results = {subject: [] for subject in SUBJECTS}
    with tqdm(total=rounds * len(SUBJECTS), unit="run", leave=False, disable=not sys.stderr.isatty()) as bar:
        for _ in range(rounds):
            for subject in SUBJECTS:
                bar.set_description(f"{subject.name}, {subject.contexts} contexts")
                results[subject].append(_in_own_process(subject, steps))
                bar.update()
    return results


def main_job(dataset, data_dir=None):
    """The main job in its own process: its printed lines, and peak memory in MB."""
    command = [sys.executable, "-m", "gluon_mgpu", "train", "--gpus", "2", "--dataset", dataset, "--device", "cpu"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    done = subprocess.run(command + (["--data-dir", data_dir] if data_dir else []), stdout=subprocess.PIPE, text=True)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    if done.returncode or peak <= before:
        raise Error(f"the main job ended with status {done.returncode}: its own message is above")
    return done.stdout, peak / 1024


def table(results):
    """Lines for a terminal: medians over the rounds; ratios are of runs of one round."""
    lines = [
        f"LeNet, batch {BATCH_SIZE}; {len(os.sched_getaffinity(0))} cores of {_cpu()}; "
        f"Python {platform.python_version()}, MXNet {version('mxnet')}, NumPy {np.__version__}",
        f"{'':32}ms/step     (min-max)  examples/s  x notebook  x 1 context, 1 thread  peak MB",
    ]
    for subject, runs in results.items():
        times = [run["step_ms"] for run in runs]
        name = f"{subject.name}, {subject.contexts} context{'s'[: subject.contexts > 1]}"
        beside_notebook = _ratio(results[Subject("notebook", subject.contexts)], runs)
        one = Subject(subject.name, 1, threads=0 if subject.name == "notebook" else 1)
        spread = f"({min(times):.1f}-{max(times):.1f})"
        lines.append(
            f"{name + (', 1 thread' if subject.threads else ''):32}{median(times):7.1f} {spread:>13} "
            f"{1000 * BATCH_SIZE / median(times):11.0f} {beside_notebook:11.2f} {_ratio(results[one], runs):22.2f} "
            f"{median(run['peak_mb'] for run in runs):8.0f}"
        )
    return "\n".join(lines)


def _ratio(slow, fast):
    return median(a["step_ms"] / b["step_ms"] for a, b in zip(slow, fast))


def _in_own_process(subject, steps):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(ENGINE_SETTINGS)}
    if subject.threads:
        environment["OMP_NUM_THREADS"] = str(subject.threads)
    command = [sys.executable, "-m", "gluon_mgpu.bench", subject.name, str(subject.contexts), str(steps)]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=WORKER_SECONDS)
    except subprocess.TimeoutExpired:
        raise Error(
            f"{subject} was not done after {WORKER_SECONDS} s: stock MXNet can hang on several contexts"
        ) from None
    if done.returncode:
        raise Error(f"{subject} failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def _worker(name, contexts, steps):
    if name != "notebook":
        engine.configure(contexts)
    module = importlib.import_module(f"gluon_mgpu.{name}")
    import mxnet as mx

    ctx = [mx.cpu(i) for i in range(contexts)]
    data = datasets.synthetic(steps * BATCH_SIZE, 100, seed=0)
    mx.random.seed(0)
    if name == "notebook":
        device_params = [module.get_params(module.init_params(), c) for c in ctx]

        def train(examples):
            # Its batches are made beforehand: only its inner loop is timed.
            images, labels = data.train_images[:examples] / np.float32(255), data.train_labels[:examples]
            train_iter = [
                (mx.nd.array(images[i : i + BATCH_SIZE]), mx.nd.array(labels[i : i + BATCH_SIZE]))
                for i in range(0, examples, BATCH_SIZE)
            ]
            del images
            start = time.perf_counter()
            module.train_epoch(train_iter, device_params, ctx, lr=0.2)
            return time.perf_counter() - start
    else:
        from gluon_mgpu import loop

        replicas = module.Replicas(ctx, lr=0.2)

        def train(examples):
            start = time.perf_counter()
            train_iter = loop.batches(data.train_images[:examples], data.train_labels[:examples], BATCH_SIZE)
            loop.train_epoch(replicas.train_batch, train_iter, examples, name)
            return time.perf_counter() - start

    train(WARM_UP_STEPS * BATCH_SIZE)
    step_ms = train(steps * BATCH_SIZE) / steps * 1000
    print(json.dumps({"step_ms": step_ms, "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))


def _cpu():
    with open("/proc/cpuinfo") as file:
        names = [line.split(":")[1].strip() for line in file if line.startswith("model name")]
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    _worker(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
