"""Measure strong and weak scaling across CPU contexts.

Workers of `steps` measure the times, with one OpenMP thread per context.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

from bench import harness
from bench.harness import BATCH_SIZE, IMPLS, TITLE
from bench.steps import Subject, measure
from gluon_mgpu.support import log

Series = dict[tuple[str, int, str, str], list[dict[str, Any]]]


def run(model: Sequence[str], contexts: Sequence[int], batch_size: Sequence[int], rounds: int, steps: int) -> dict:
    """Train the models on each number of contexts in turn. Returns the input of `table`.

    Strong scaling: all contexts share the batch; weak scaling: each context has a whole batch. contexts: numbers of
    contexts; 1 is always measured, for comparison. batch_size: batch sizes; empty: BATCH_SIZE[model]. steps: per run of
    LeNet with batch size 256.
    """
    subjects = {}
    for name, kind, k in product(model, ("strong", "weak"), sorted({1, *contexts})):
        for impl, size in product(IMPLS[name], batch_size or [BATCH_SIZE[name]]):
            batch = size * (k if kind == "weak" else 1)
            subjects[name, size, impl, kind, k] = Subject(impl, k, name, batch, one_thread=k == 1)
    measured = measure(subjects.values(), rounds, steps)
    names = ("model", "size", "impl", "kind", "contexts")
    runs = [
        {**dict(zip(names, point)), "batch_size": subject.size, **measured[subject]}
        for point, subject in subjects.items()
    ]
    return {"rounds": rounds, "cores": harness.facts()["cores"], "runs": runs}


def efficiencies(one: dict, many: dict, cores: int) -> list[float]:
    """For each round, the speed-up in examples/s over one context, divided by the number of cores in use."""
    grown = many["batch_size"] / one["batch_size"]
    return [grown * ratio / min(many["contexts"], cores) for ratio in harness.ratios(one, many)]


def table(result: dict) -> str:
    """Format, for each model, implementation and kind of scaling, the time and efficiency by number of contexts."""
    cores = result["cores"]
    lines = [
        f"A training step on CPU contexts, medians of {result['rounds']} rounds (min-max);",
        harness.machine_line(),
        "strong: all contexts share one batch; weak: each context has its own batch. efficiency: examples/s relative",
        f"to one context with one thread, divided by the number of contexts or cores ({cores}), whichever is smaller.",
    ]
    for (model, size, impl, kind), runs in _series(result["runs"]).items():
        rows = []
        for run in runs:
            columns = {"batch": str(run["batch_size"]), "efficiency": efficiencies(runs[0], run, cores)}
            rows.append(
                (f"{run['contexts']} {log.plural(run['contexts'], 'context')}", run["batch_size"], run, columns)
            )
        lines += ["", *harness.speed_table(f"{TITLE[model]}, batch {size}, {impl}, {kind} scaling", rows)]
    return "\n".join(lines)


def _series(runs: Iterable[dict[str, Any]]) -> Series:
    """Group runs: {(model, batch size, impl, kind): runs, ordered by number of contexts}."""
    series: Series = {}
    for run in runs:
        series.setdefault((run["model"], run["size"], run["impl"], run["kind"]), []).append(run)
    return series
