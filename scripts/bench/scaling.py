"""What more contexts buy, and what they cost once every core has one: strong and weak scaling of a training step.

Each point is trained by a worker of `steps`, in a process of its own; one context has one OpenMP thread.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import BinaryIO

from bench import machine, steps

CONTEXTS = (1, 2, 4, 8)
TITLE = {"lenet": "LeNet", "resnet18": "ResNet-18"}
TRAINED = {"lenet": ("scratch", "highlevel"), "resnet18": ("highlevel",)}  # scratch has LeNet only
LEAST_EFFICIENCY = 0.95  # of as many contexts as cores, beside one
MOST_COST = 1.1  # of 8 contexts, in times as long as as many contexts as cores take


def run(
    models: Sequence[str] = tuple(TITLE), contexts: Sequence[int] = CONTEXTS, rounds: int = 3, steps_a_run: int = 100
) -> dict:
    """Train each model of each implementation on each number of contexts in turn: a dict for `table`, `draw` and JSON.

    Strong scaling: the batch over all contexts is that of `steps`; weak: that of each context is. contexts: one is
    always among them, since all are compared with it. steps_a_run: of LeNet; ResNet-18's are a tenth; with a batch k
    times as large, a k-th of them. Raises Error where a worker fails.
    """
    points = [
        (impl, model, kind, k)
        for model in models
        for impl in TRAINED[model]
        for kind in ("strong", "weak")
        for k in sorted({1, *contexts})
    ]
    subjects = {point: _subject(*point) for point in points}
    measured = steps.measure(tuple(dict.fromkeys(subjects.values())), rounds, steps_a_run)
    runs = [
        {
            "impl": impl,
            "model": model,
            "kind": kind,
            "contexts": k,
            "batch_size": subject.size,
            "step_ms": [run["step_ms"] for run in measured[subject]],
            "peak_mb": [run["peak_mb"] for run in measured[subject]],
        }
        for (impl, model, kind, k), subject in subjects.items()
    ]
    return {"rounds": rounds, "cores": len(os.sched_getaffinity(0)), "runs": runs}


def _subject(impl: str, model: str, kind: str, k: int) -> steps.Subject:
    """On one context, strong and weak scaling are the same."""
    one_thread = steps.ONE_THREAD if k == 1 else {}
    return steps.Subject(impl, k, model=model, batches=k if kind == "weak" else 1, **one_thread)


def efficiencies(one: dict, many: dict, cores: int) -> list[float]:
    """Of each round: the examples/s of many contexts beside one's, divided by the cores that they can use."""
    grown = many["batch_size"] / one["batch_size"]
    return [grown * a / b / min(many["contexts"], cores) for a, b in zip(one["step_ms"], many["step_ms"])]


def costs(runs: list[dict], cores: int) -> dict[int, list[float]]:
    """{contexts: how many times as long a step takes on them as on as many contexts as cores, of each round}, of runs
    of strong scaling with more contexts than cores; empty where as many as cores were not measured."""
    full = next((run for run in runs if run["contexts"] == cores), None)
    return {
        run["contexts"]: [a / b for a, b in zip(run["step_ms"], full["step_ms"])]
        for run in runs
        if full and run["contexts"] > cores
    }


def table(result: dict) -> str:
    """Lines for a terminal: for each model, implementation and kind, each number of contexts with its time, efficiency
    and, beyond the cores, its cost; then what was to be reached."""
    cores = result["cores"]
    lines = [
        f"A training step on more and more CPU contexts, medians of {result['rounds']} rounds (min-max);",
        f"{machine.line()}",
        "strong: the batch over all contexts stays; weak: that of each context does. efficiency: examples/s beside",
        f"those of one context with one thread, divided by the contexts or by the {cores} cores, whichever are fewer.",
    ]
    reached = []
    for (model, impl, kind), runs in _series(result).items():
        title = f"{TITLE[model]}, {impl}, {kind} scaling"
        lines += ["", f"{title:37}{'batch':>5}{'ms/step':>24}{'examples/s':>12}{'efficiency':>19}{'peak MB':>9}"]
        for run in runs:
            k, ms = run["contexts"], run["step_ms"]
            of_it = efficiencies(runs[0], run, cores)
            lines.append(
                f"{f'{k} context' + 's' * (k > 1):37}{run['batch_size']:5}{_spread(ms, 1):>24}"
                f"{1000 * run['batch_size'] / median(ms):12.0f}{_spread(of_it, 2):>19}{median(run['peak_mb']):9.0f}"
            )
            if kind == "strong" and k == cores > 1:
                reached.append(_goal(f"{title}, efficiency on {k} contexts", of_it, LEAST_EFFICIENCY, True))
        if kind == "strong":
            for k, of_it in costs(runs, cores).items():
                full = next(run for run in runs if run["contexts"] == cores)
                here = next(run for run in runs if run["contexts"] == k)
                each = median((a - b) / (k - cores) for a, b in zip(here["step_ms"], full["step_ms"]))
                lines.append(
                    f"{k} contexts against {cores}: {_spread(of_it, 2)} times as long; "
                    f"{each:.2f} ms a step for each context beyond {cores}"
                )
                if k == 8:
                    reached.append(_goal(f"{title}, {k} contexts against {cores}", of_it, MOST_COST, False))
    return "\n".join([*lines, "", *reached])


def _goal(what: str, ratios: list[float], bound: float, least: bool) -> str:
    middle = median(ratios)
    reached = middle >= bound if least else middle <= bound
    wanted = f"at {'least' if least else 'most'} {bound}"
    return f"{what}: {_spread(ratios, 2)}; goal {wanted}: {'' if reached else 'not '}reached"


def _series(result: dict) -> dict[tuple[str, str, str], list[dict]]:
    """{(model, impl, kind): its runs, by contexts}"""
    series: dict[tuple[str, str, str], list[dict]] = {}
    for run in result["runs"]:
        series.setdefault((run["model"], run["impl"], run["kind"]), []).append(run)
    return series


def _spread(values: list[float], digits: int) -> str:
    return f"{median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def draw(result: dict, file: BinaryIO | str | Path) -> None:
    """Above, examples/s by contexts, beside what the cores could give at one context's rate; below, the efficiency: a
    column a model. PNG; file: binary and open, or a path."""
    from matplotlib.figure import Figure

    models, cores = list(dict.fromkeys(run["model"] for run in result["runs"])), result["cores"]
    figure = Figure(figsize=(5.5 * len(models), 8), layout="constrained")
    figure.suptitle(f"Contexts on {cores} cores, medians of {result['rounds']} rounds (lines: min to max)")
    panels = figure.subplots(2, len(models), squeeze=False)
    for (model, impl, kind), runs in _series(result).items():
        speed, efficiency = panels[:, models.index(model)]
        ks = [run["contexts"] for run in runs]
        style = {"color": f"C{TRAINED['lenet'].index(impl)}", "marker": "o" if kind == "strong" else "s"}
        style["linestyle"] = "-" if kind == "strong" else "--"
        rates = [[1000 * run["batch_size"] / ms for ms in run["step_ms"]] for run in runs]
        of_it = [efficiencies(runs[0], run, cores) for run in runs]
        for axes, values in ((speed, rates), (efficiency, of_it)):
            axes.plot(ks, [median(v) for v in values], label=f"{impl}, {kind}", **style)
            axes.vlines(ks, [min(v) for v in values], [max(v) for v in values], color=style["color"])
        if kind == "strong":
            ideal = [median(rates[0]) * min(k, cores) for k in ks]
            speed.plot(ks, ideal, ":", color=style["color"], label=f"{impl}, one context's times the cores in use")
        batch = runs[0]["batch_size"]
        speed.set(title=f"{TITLE[model]}, batch {batch}: of all (strong), of each (weak)", ylabel="examples/s")
        efficiency.set(xlabel="contexts", ylabel="efficiency", ylim=(0, 1.15))
        for axes in (speed, efficiency):
            axes.set_xscale("log", base=2)
            axes.set_xticks(ks, ks)
            axes.grid(alpha=0.3)
    for speed, efficiency in panels.T:
        efficiency.axhline(LEAST_EFFICIENCY, color="0.5", linewidth=0.8)
        speed.set_ylim(bottom=0)
        speed.legend(fontsize="small", loc="lower right")
    figure.savefig(file, format="png", dpi=100)
