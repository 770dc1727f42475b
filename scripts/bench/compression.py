"""`distributed --what compression`: the bytes that compressed gradients save, and the accuracy of 2 workers.

A worker, `python -m bench.compression JOB`, is one process of a run that `launch` or horovodrun started.
"""

from __future__ import annotations

import time
from functools import partial
from typing import BinaryIO

import numpy as np

from bench import distributed, harness
from bench.harness import Run, spread
from gluon_mgpu.distributed import workers
from gluon_mgpu.training import datasets

# The thresholds are for gradients summed over a worker's half of the batch: docs/distributed.md.
KINDS = {"horovod": (None, "fp16"), "dist_sync": (None, "2bit:0.1", "2bit:0.5")}
SECONDS = 3600  # time limit per training run
BATCH_SIZE, LR = 256, 0.2


def run(rounds: int = 3, epochs: int = 4, limit: int | None = None) -> dict:
    """Train LeNet on Fashion-MNIST with 2 workers, with each kind of compression; returns what `table` and `draw` show.

    rounds: trains with the seeds 1 to `rounds`. limit: as in `Settings`.
    """
    datasets.find("fashion-mnist") or datasets.fetch("fashion-mnist")
    kvstores, skipped = distributed.installed()
    kinds = [(kvstore, compress) for kvstore in kvstores for compress in KINDS[kvstore]]
    given = {"seconds": SECONDS, "epochs": epochs, "limit": limit}
    jobs = {
        (*kind, seed): distributed.job("compression", kind[0], compress=kind[1], seed=seed, **given)
        for seed in range(1, rounds + 1)
        for kind in kinds
    }
    runs: dict[str, Run] = {f"{kvstore}, {compress or 'no compression'}": {} for kvstore, compress in kinds}
    for (kvstore, compress, _), run in harness.measure(jobs, 1).items():
        for what, values in run.items():
            runs[f"{kvstore}, {compress or 'no compression'}"].setdefault(what, []).extend(values)
    return {"rounds": rounds, "epochs": epochs, "limit": limit, "skipped": skipped, "runs": runs}


def table(result: dict) -> str:
    """Format bytes sent per step and test accuracy, by kind of compression."""
    some = f"the first {result['limit']} examples of " if result["limit"] else ""
    lines = [
        f"LeNet, scratch, on {some}Fashion-MNIST, 2 workers, batch {BATCH_SIZE}, lr {LR}, "
        f"{harness.plural(result['epochs'], 'epoch')};",
        f"medians of {result['rounds']} seeds (min-max); {harness.machine_line()}",
        "MB out, in: megabytes that worker 0 sends and receives per step, as counted by the kernel.",
        *result["skipped"],
    ]
    rows = [["", "MB out, in", "s/epoch", "test accuracy"]]
    for name, run in result["runs"].items():
        rows.append([name, distributed.megabytes(run), spread(run["epoch_s"], 1), spread(run["accuracy"], 3)])
    return "\n".join([*lines, *harness.table(rows)])


def draw(result: dict, file: BinaryIO) -> None:
    """Draw bars of the bytes that worker 0 sends per step, and of the test accuracy, as PNG."""
    sent = {name: [sent / 1e6 for sent in run["sent_bytes"]] for name, run in result["runs"].items()}
    reached = {name: run["accuracy"] for name, run in result["runs"].items()}
    panels = {"MB sent per step": sent, f"test accuracy after {result['epochs']} epochs": reached}
    harness.draw_bars(file, "LeNet on Fashion-MNIST, 2 workers", panels)


def work(kvstore: str, compress: str | None, epochs: int, limit: int | None, seed: int) -> dict[str, float]:
    """Train, except on the last, smaller batch of each epoch.

    Returns the test accuracy, the seconds per epoch, and the bytes that this worker sends and receives per step.
    """
    data = datasets.load("fashion-mnist", limit=limit)
    steps = len(data.train_labels) // BATCH_SIZE
    with workers.join(kvstore, compress) as group:
        from gluon_mgpu.training.batches import batches, shuffled

        group.exchange_device_counts(1)
        replicas = harness.replicas("scratch", "lenet", 1, group)
        step = partial(replicas.train_batch, lr=LR, batch_size=BATCH_SIZE)
        orders = [shuffled(len(data.train_labels), seed, epoch) for epoch in range(1, epochs + 1)]
        order = np.concatenate([of_epoch[: steps * BATCH_SIZE] for of_epoch in orders])
        harness.train(step, data, BATCH_SIZE, order[:BATCH_SIZE], group.part)  # also registers the arrays
        start, before = time.perf_counter(), distributed.traffic()
        harness.train(step, data, BATCH_SIZE, order[BATCH_SIZE:], group.part)
        seconds, after = time.perf_counter() - start, distributed.traffic()
        accuracy = replicas.evaluate_accuracy(batches(data.test_images, data.test_labels, BATCH_SIZE))
    measured = epochs * steps - 1
    sent, received = ((b - a) / measured for a, b in zip(before, after))
    epoch_s = steps * seconds / measured
    return {"accuracy": accuracy, "epoch_s": epoch_s, "sent_bytes": sent, "received_bytes": received}


if __name__ == "__main__":
    distributed.main(work)
