"""`distributed --what compression`: what compressed gradients save, and the test accuracy that 2 workers reach.

A worker, `python -m bench.compression JOB`, is one process of a run that `launch` or horovodrun started.
"""

from __future__ import annotations

import time
from functools import partial
from statistics import median
from typing import Any, BinaryIO, NamedTuple

from bench import distributed, harness
from bench.harness import spread
from gluon_mgpu.distributed import workers
from gluon_mgpu.training import datasets

# The thresholds are for gradients summed over a worker's half of the batch: docs/distributed.md.
KINDS = {"horovod": (None, "fp16"), "dist_sync": (None, "2bit:0.1", "2bit:0.5")}
SECONDS = 3600  # for one training
BATCH_SIZE, LR = 256, 0.2
MEASURED = ("accuracy", "seconds", "sent_bytes", "received_bytes")


class Subject(NamedTuple):
    """A kind of compression, and the seed of the parameters and the shuffling."""

    kvstore: str
    compress: str | None
    seed: int = 1

    def __str__(self) -> str:
        return f"{self.kvstore}, {self.compress or 'no compression'}"


def run(rounds: int = 3, epochs: int = 4, limit: int | None = None) -> dict:
    """Train LeNet on Fashion-MNIST with 2 workers, with each kind of compression; returns what `table` and `draw` show.

    rounds: the seeds are 1 to rounds. limit: as in `Settings`.
    """
    datasets.find("fashion-mnist") or datasets.fetch("fashion-mnist")
    kvstores, skipped = distributed.installed()
    kinds = [(kvstore, compress) for kvstore in kvstores for compress in KINDS[kvstore]]
    seeds = range(1, rounds + 1)

    def measure(subject: Subject) -> dict:
        job = {"compress": subject.compress, "seed": subject.seed, "epochs": epochs, "limit": limit}
        return distributed.start(str(subject), "compression", subject.kvstore, job, SECONDS)

    found = harness.in_turn([Subject(*kind, seed) for seed in seeds for kind in kinds], 1, measure)
    runs = []
    for kvstore, compress in kinds:
        of_seeds = [found[Subject(kvstore, compress, seed)][0] for seed in seeds]
        runs.append({"kvstore": kvstore, "compress": compress, **{key: [f[key] for f in of_seeds] for key in MEASURED}})
    return {"rounds": rounds, "epochs": epochs, "limit": limit, "skipped": skipped, "runs": runs}


def table(result: dict) -> str:
    """Lines for a terminal: bytes sent per step and test accuracy, by kind of compression."""
    some = f"the first {result['limit']} examples of " if result["limit"] else ""
    lines = [
        f"LeNet, scratch, on {some}Fashion-MNIST, 2 workers, batch {BATCH_SIZE}, lr {LR}, {result['epochs']} epochs;",
        f"medians of {result['rounds']} seeds (min-max); {harness.machine_line()}",
        "MB out, in: what worker 0 sends and receives per step, as the kernel counts it.",
        *result["skipped"],
    ]
    rows = [["", "MB out, in", "s/epoch", "test accuracy"]]
    for run in result["runs"]:
        seconds = spread([median(epochs) for epochs in run["seconds"]], 1)
        rows.append([_name(run), distributed.megabytes(run), seconds, spread(_reached(run), 3)])
    return "\n".join([*lines, *harness.table(rows)])


def draw(result: dict, file: BinaryIO) -> None:
    """Bars of the bytes that worker 0 sends per step, and of the test accuracy. PNG."""
    sent = {_name(run): [sent / 1e6 for sent in run["sent_bytes"]] for run in result["runs"]}
    reached = {_name(run): _reached(run) for run in result["runs"]}
    panels = {"MB sent per step": sent, f"test accuracy after {result['epochs']} epochs": reached}
    harness.draw_bars(file, "LeNet on Fashion-MNIST, 2 workers", "MB, accuracy", panels)


def _name(run: dict) -> str:
    return str(Subject(run["kvstore"], run["compress"]))


def _reached(run: dict) -> list[float]:
    """The test accuracy after the last epoch, for each seed."""
    return [epochs[-1] for epochs in run["accuracy"]]


def _work(kvstore: str, compress: str | None, epochs: int, limit: int | None, seed: int) -> dict[str, Any]:
    """Train, but for the last, smaller batch of an epoch. Returns "accuracy" and "seconds" of each epoch, and per step
    all bytes that this worker sends and receives."""
    data = datasets.load("fashion-mnist", limit=limit, seed=seed)
    steps = len(data.train_labels) // BATCH_SIZE
    accuracy, seconds = [], []
    with workers.join(kvstore, compress) as group:
        from gluon_mgpu.training import batches

        group.exchange_device_counts(1)
        replicas = harness.replicas("scratch", "lenet", 1, group)
        train_batch = partial(replicas.train_batch, lr=LR, batch_size=BATCH_SIZE)
        before = distributed.traffic()
        for epoch in range(1, epochs + 1):
            start = time.perf_counter()
            order = batches.shuffled(len(data.train_labels), seed, epoch)[: steps * BATCH_SIZE]
            harness.train(train_batch, data, BATCH_SIZE, order, group.part)
            seconds.append(time.perf_counter() - start)
            test_iter = batches.batches(data.test_images, data.test_labels, BATCH_SIZE)
            accuracy.append(replicas.evaluate_accuracy(test_iter))
        moved = [(b - a) / epochs / steps for a, b in zip(before, distributed.traffic())]
    return dict(zip(MEASURED, (accuracy, seconds, *moved)))


if __name__ == "__main__":
    distributed.main(_work)
