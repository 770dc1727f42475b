"""Measure peak memory, the speed-up from a second device, and what limits the speed-up, at several batch sizes.

Workers of `steps` measure each step, with one OpenMP thread per context.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import numpy as np

from bench import harness
from bench.harness import IMPLS, TITLE
from bench.steps import Subject, measure, one_thread
from gluon_mgpu.runtime import log

SIZES = {"lenet": (128, 256, 512, 1024), "resnet18": (32, 64)}

NOTES = """\
The time on 2 devices is half the time on 1 device plus three losses, in ms/step. half: half a batch takes more than
half the time. machine: 2 devices without allreduce take longer than 1 device with half a batch, because they share
memory and cache, and share the cores with Python's thread. allreduce: the time that allreduce adds. The column Python
is not a loss, but the CPU time of Python's thread per step on 2 devices."""


def compared(model: str, size: int) -> tuple[Subject, ...]:
    """The subjects in a table row: 1 device, 1 device with half a batch, 2 devices without allreduce, and 2 devices."""
    two = Subject(IMPLS[model][0], 2, model=model, batch_size=size)
    one = one_thread(two)
    return one, one._replace(batch_size=size // 2), two._replace(exchange=False), two


def run(model: Sequence[str] = tuple(TITLE), rounds: int = 3, steps: int = 100) -> dict:
    """Measure the models at SIZES. Returns the input of `table`. steps: per run of LeNet with batch size 256."""
    rows = [(name, size, compared(name, size)) for name in model for size in SIZES[name]]
    measured = measure((subject for *_, subjects in rows for subject in subjects), rounds, steps)
    found = [
        {"model": name, "batch_size": size, "runs": [measured[s] for s in subjects]} for name, size, subjects in rows
    ]
    return {"rounds": rounds, "rows": found}


def table(result: dict) -> str:
    """Format the time, speed-up, lost time and memory for each model and batch size."""
    lines = [f"Medians of {result['rounds']} rounds (min-max); {harness.machine_line()}", NOTES]
    for model in dict.fromkeys(row["model"] for row in result["rows"]):
        rows = [["batch", "1 device, ms/step", "2 devices", "speed-up", "half", "machine", "allreduce", "Python"]]
        memory = [["batch", "1 device, peak MB", "2 devices"]]
        for row in result["rows"]:
            if row["model"] == model:
                one, half, alone, two = row["runs"]
                times = [np.array(one["step_ms"]) / 2, *(run["step_ms"] for run in (half, alone, two))]
                parts = [*np.diff(times, axis=0), two["python_ms"]]  # the three losses of NOTES, by round, and Python
                ms = (harness.spread(run["step_ms"], 1) for run in (one, two))
                speed_up = harness.spread(harness.ratios(one, two), 2)
                rows.append([row["batch_size"], *ms, speed_up, *(harness.spread(part, 1) for part in parts)])
                memory.append([row["batch_size"], *(f"{median(run['peak_mb']):.0f}" for run in (one, two))])
        lines += ["", f"{TITLE[model]}, {IMPLS[model][0]}", *log.table(rows), "", *log.table(memory)]
    return "\n".join(lines)
