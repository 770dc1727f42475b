"""What compressed gradients save and what they cost: bytes a step, and the test accuracy that 2 workers reach.

A worker, `python -m bench.compression JOB`, takes part in a training that `launch` or horovodrun started.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, BinaryIO

from bench import distributed, machine
from gluon_mgpu.training import datasets

# The thresholds are of gradients summed over a worker's half of the batch: docs/performance.md.
KINDS = {"horovod": (None, "fp16"), "dist_sync": (None, "2bit:0.1", "2bit:0.5")}
SECONDS = 3600  # for a training


def run(rounds: int = 3, epochs: int = 4, limit: int | None = None) -> dict:
    """Train LeNet on Fashion-MNIST with 2 workers, with each kind of compression: a dict for `table`, `draw` and JSON.

    rounds: the seeds 1 to so many. limit: as in `Settings`. Raises Error where the data is missing or a worker fails.
    """
    datasets.find("fashion-mnist") or datasets.fetch("fashion-mnist")
    kvstores, skipped = distributed.installed()
    found: dict[tuple[str, str | None], list[dict]] = {
        (kvstore, compress): [] for kvstore in kvstores for compress in KINDS[kvstore]
    }
    with distributed.progress(rounds * len(found)) as bar:
        for seed in range(1, rounds + 1):
            for (kvstore, compress), of_it in found.items():
                name = f"{_kind(kvstore, compress)}, seed {seed}"
                bar.set_description(name)
                job = {"compress": compress, "epochs": epochs, "limit": limit, "seed": seed}
                of_it.append(distributed.in_own_processes(name, kvstore, __name__, job, SECONDS))
                bar.update()
    runs = [
        {"kvstore": kvstore, "compress": compress, **{name: [one[name] for one in of_it] for name in of_it[0]}}
        for (kvstore, compress), of_it in found.items()
    ]
    return {"seeds": list(range(1, rounds + 1)), "epochs": epochs, "limit": limit, "skipped": skipped, "runs": runs}


def table(result: dict) -> str:
    """Lines for a terminal: bytes sent a step and test accuracy by kind of compression."""
    some = f"the first {result['limit']} examples of " if result["limit"] else ""
    lines = [
        f"LeNet, scratch, on {some}Fashion-MNIST, 2 workers, batch 256, lr 0.2, {result['epochs']} epochs;",
        f"medians of {len(result['seeds'])} seeds (min-max); {machine.line()}",
        "MB out, in: what worker 0 sends and receives a step, by the kernel's count of its connections.",
        *result["skipped"],
        f"{'':28}{'MB out, in':>14}{'s/epoch':>20}  test accuracy",
    ]
    for run in result["runs"]:
        seconds = [median(of_each) for of_each in run["seconds"]]
        lines.append(
            f"{_kind(run['kvstore'], run['compress']):28}{distributed.moved(run):>14}"
            f"{distributed.spread(seconds, 1):>20}  {distributed.spread(_reached(run), 3)}"
        )
    return "\n".join(lines)


def draw(result: dict, file: BinaryIO | str | Path) -> None:
    """Test accuracy by bytes sent and received a step, a point a seed. PNG; file: binary and open, or a path."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for run, marker in zip(result["runs"], "osv^D"):
        moved = [(out + back) / 1e6 for out, back in zip(run["sent_bytes"], run["received_bytes"])]
        axes.plot(moved, _reached(run), marker, label=_kind(run["kvstore"], run["compress"]))
    axes.set(
        xlabel="MB that a worker sends and receives a step", ylabel=f"test accuracy after {result['epochs']} epochs"
    )
    axes.set_xlim(left=0)
    axes.set_title("LeNet on Fashion-MNIST, 2 workers: a point a seed")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(file, format="png", dpi=100)


def _kind(kvstore: str, compress: str | None) -> str:
    return f"{kvstore}, {compress or 'no compression'}"


def _reached(run: dict) -> list[float]:
    """The test accuracy after the last epoch, of each seed."""
    return [of_epochs[-1] for of_epochs in run["accuracy"]]


def _train(kvstore: str, compress: str | None, epochs: int, limit: int | None, seed: int) -> dict:
    """Train as train.py does: {"accuracy", "seconds": [of each epoch], "sent_bytes", "received_bytes": of a step, with
    all else that the run sends}."""
    from gluon_mgpu import scratch
    from gluon_mgpu.distributed import stores

    moved: list[int] = []
    kinds: dict[str, Any] = {"horovod": stores.Horovod, "dist_sync": stores.DistSync}
    store = kinds[kvstore]

    def close(self: Any, close: Callable[[Any], None] = store.close) -> None:
        moved.extend(distributed.traffic())  # while there are connections
        close(self)

    store.close = close
    options: dict[str, Any] = {
        "device": "cpu",
        "kvstore": kvstore,
        "compress": compress,
        "epochs": epochs,
        "limit": limit,
    }
    with contextlib.redirect_stdout(sys.stderr):
        history = scratch.train(1, 256, 0.2, seed=seed, **options)
    steps = epochs * -(-(limit or 60000) // 256)
    return {
        "accuracy": [epoch.test_accuracy for epoch in history],
        "seconds": [epoch.train_seconds for epoch in history],
        "sent_bytes": moved[0] / steps,
        "received_bytes": moved[1] / steps,
    }


if __name__ == "__main__":
    job = json.loads(sys.argv[1])
    distributed.as_worker(job["kvstore"], partial(_train, **job))
