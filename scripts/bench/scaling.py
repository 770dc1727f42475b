"""`scaling`: strong and weak scaling of a training step over CPU contexts. One context has one OpenMP thread.

Each point is measured by a worker of `steps`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from statistics import median
from typing import BinaryIO

from bench import harness, steps
from bench.harness import IMPLS, TITLE

CONTEXTS = (1, 2, 4, 8)


def run(
    models: Sequence[str] = tuple(TITLE), contexts: Sequence[int] = CONTEXTS, rounds: int = 3, steps_per_run: int = 100
) -> dict:
    """Train each model on each number of contexts in turn; returns what `table` and `draw` show.

    Strong scaling: all contexts together have the batch of `steps`; weak: each context has. contexts: 1 is always
    measured too, since all others are compared with it. steps_per_run: of LeNet with its own batch size.
    """
    points = [
        (impl, model, kind, k)
        for model in models
        for impl in IMPLS[model]
        for kind in ("strong", "weak")
        for k in sorted({1, *contexts})
    ]
    subjects = {point: subject(*point) for point in points}
    measured = steps.measure(tuple(dict.fromkeys(subjects.values())), rounds, steps_per_run)
    runs = [
        {
            **{"impl": impl, "model": model, "kind": kind, "contexts": k},
            "batch_size": subjects[impl, model, kind, k].size,
            "step_ms": [run["step_ms"] for run in measured[subjects[impl, model, kind, k]]],
            "peak_mb": [run["peak_mb"] for run in measured[subjects[impl, model, kind, k]]],
        }
        for impl, model, kind, k in points
    ]
    return {"rounds": rounds, "cores": len(os.sched_getaffinity(0)), "runs": runs}


def subject(impl: str, model: str, kind: str, k: int) -> steps.Subject:
    """What a worker of `steps` measures. With one context, strong and weak scaling are the same."""
    found = steps.Subject(impl, k, model=model, batches=k if kind == "weak" else 1)
    return steps.one_thread(found) if k == 1 else found


def efficiencies(one: dict, many: dict, cores: int) -> list[float]:
    """For each round: examples/s of many contexts relative to one's, divided by the cores that they can use."""
    grown = many["batch_size"] / one["batch_size"]
    faster = harness.ratios(one["step_ms"], many["step_ms"])
    return [grown * ratio / min(many["contexts"], cores) for ratio in faster]


def table(result: dict) -> str:
    """Lines for a terminal: for each model, implementation and kind, each number of contexts with its time and
    efficiency; for strong scaling, also the cost of more contexts than cores."""
    cores = result["cores"]
    lines = [
        f"A training step on CPU contexts, medians of {result['rounds']} rounds (min-max);",
        f"{harness.machine_line()}",
        "strong: one batch size for all contexts together; weak: for each context. efficiency: examples/s relative to",
        f"one context with one thread, divided by the number of contexts, or of cores ({cores}) if that is smaller.",
    ]
    for (model, impl, kind), runs in _series(result).items():
        rows = [[f"{TITLE[model]}, {impl}, {kind} scaling", "batch", "ms/step", "examples/s", "efficiency", "peak MB"]]
        for run in runs:
            size, ms = run["batch_size"], run["step_ms"]
            efficiency = harness.spread(efficiencies(runs[0], run, cores), 2)
            rate, peak = f"{1000 * size / median(ms):.0f}", f"{median(run['peak_mb']):.0f}"
            rows.append(
                [harness.plural(run["contexts"], "context"), size, harness.spread(ms, 1), rate, efficiency, peak]
            )
        lines += ["", *harness.table(rows)]
        if kind == "strong":
            lines += _beyond_the_cores(runs, cores)
    return "\n".join(lines)


def _beyond_the_cores(runs: list[dict], cores: int) -> list[str]:
    """A line per run with more contexts than cores: how much longer its step takes than with a context per core."""
    full = [run for run in runs if run["contexts"] == cores]
    lines = []
    for run in runs:
        extra = run["contexts"] - cores
        if full and extra > 0:
            cost = median((a - b) / extra for a, b in zip(run["step_ms"], full[0]["step_ms"]))
            ratio = harness.spread(harness.ratios(run["step_ms"], full[0]["step_ms"]), 2)
            lines.append(
                f"{run['contexts']} contexts against {cores}: {ratio} times as long; {cost:.2f} ms/step for each "
                f"context beyond {cores}"
            )
    return lines


def _series(result: dict) -> dict[tuple[str, str, str], list[dict]]:
    """{(model, impl, kind): its runs, by number of contexts}"""
    series: dict[tuple[str, str, str], list[dict]] = {}
    for run in result["runs"]:
        series.setdefault((run["model"], run["impl"], run["kind"]), []).append(run)
    return series


def draw(result: dict, file: BinaryIO) -> None:
    """Above, examples/s by contexts, and what the cores could do at one context's rate; below, the efficiency. One
    column per model. PNG."""
    from matplotlib.figure import Figure

    models, cores = list(dict.fromkeys(run["model"] for run in result["runs"])), result["cores"]
    figure = Figure(figsize=(5.5 * len(models), 8), layout="constrained")
    figure.suptitle(f"Contexts on {cores} cores, medians of {result['rounds']} rounds (lines: min to max)")
    panels = figure.subplots(2, len(models), squeeze=False)
    for (model, impl, kind), runs in _series(result).items():
        speed, efficiency = panels[:, models.index(model)]
        ks = [run["contexts"] for run in runs]
        color = f"C{IMPLS['lenet'].index(impl)}"
        line = "o-" if kind == "strong" else "s--"
        rates = [[1000 * run["batch_size"] / ms for ms in run["step_ms"]] for run in runs]
        shares = [efficiencies(runs[0], run, cores) for run in runs]
        for axes, values in ((speed, rates), (efficiency, shares)):
            axes.plot(ks, [median(v) for v in values], line, color=color, label=f"{impl}, {kind}")
            axes.vlines(ks, [min(v) for v in values], [max(v) for v in values], color=color)
            axes.set_xscale("log", base=2)
            axes.set_xticks(ks, ks)
            axes.grid(alpha=0.3)
        if kind == "strong":
            ideal = [median(rates[0]) * min(k, cores) for k in ks]
            speed.plot(ks, ideal, ":", color=color, label=f"{impl}, one context's rate times the cores in use")
        speed.set(title=f"{TITLE[model]}, batch {runs[0]['batch_size']}", ylabel="examples/s")
        efficiency.set(xlabel="contexts", ylabel="efficiency", ylim=(0, 1.15))
    for speed in panels[0]:
        speed.set_ylim(bottom=0)
        speed.legend(fontsize="small", loc="lower right")
    figure.savefig(file, format="png", dpi=100)
