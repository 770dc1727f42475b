"""Fit a cost model, and predict step times on clusters. FOLDER contains the result of `scaling --out`.

The model of a data-parallel step is fitted to measurements on fewer than CHECKED contexts, and checked against the
rest. Clusters were not measured, so their times are labeled as predicted. This module does not import mxnet.
"""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any, BinaryIO

import numpy as np

from bench import harness
from bench.harness import TITLE
from gluon_mgpu.runtime import log
from gluon_mgpu.runtime.errors import UsageError

CHECKED = 8  # measurements on at least this many contexts are not used for the fit
GRADIENT_BYTES = {"lenet": 516_272, "resnet18": 44_703_272}

# In the modeled clusters, each device has its own link to a non-blocking switch. A link sends at most one message and
# receives at most one message at a time. A message of n bytes takes latency + n / bandwidth. The gradients of all
# parameters are sent as one array, and additions cost nothing (Thakur, Rabenseifner, Gropp: Optimization of Collective
# Communication Operations in MPICH, 2005, without the term for additions). So an allreduce takes
#   messages * latency + share * bytes of the gradient / bandwidth
# with these (messages, share) for k devices:
CLUSTER = {
    # one device receives all gradients, then sends the sum to each device
    "star": lambda k: (2 * (k - 1), 2 * (k - 1)),
    # sum pairs, then pairs of pairs, and back: log2(k) rounds each way, rounded up (Thakur et al. 2005)
    "tree": lambda k: (2 * (k - 1).bit_length(), 2 * (k - 1).bit_length()),
    # k - 1 rounds of reduce-scatter and k - 1 rounds of all-gather, each with 1/k of the bytes (Patarasuk, Yuan 2009)
    "ring": lambda k: (2 * (k - 1), 2 * (k - 1) / k),
    # parameter servers, one per device, each with 1/k of the bytes: push, request, pull (Li et al. 2014)
    "PS": lambda k: (3 * (k - 1), 2 * (k - 1) / k),
}

# These values are assumed, not measured.
LINKS = {  # (seconds per message, bytes/s each way)
    "1 Gbit/s, 50 us": (50e-6, 1e9 / 8),
    "10 Gbit/s, 20 us": (20e-6, 10e9 / 8),
    "100 Gbit/s, 2 us": (2e-6, 100e9 / 8),
}
SPEEDS = {1: "as fast as one core here", 100: "100 times as fast"}  # {speed of a device: text}; 100 is roughly a GPU
DEVICES = tuple(2**i for i in range(13))  # 1 to 4096
SHOWN = (8, 64, 512, 4096)  # numbers of devices in the table


def allreduce_seconds(way: str, devices: int, size: float, latency: float, bandwidth: float) -> float:
    """Predict how many seconds an allreduce takes on a cluster.

    way: a key of CLUSTER. size: bytes of the gradient. latency: seconds per message. bandwidth: bytes/s each way.
    """
    messages, share = CLUSTER[way](devices)
    return messages * latency + share * size / bandwidth


def step_row(contexts: int, batch_size: int, cores: int) -> list[float]:
    """Compute the weights of the terms below; the weighted sum is the time of a step. The terms are in milliseconds.

    1. The time that each context adds to a step at any batch size: calls, its update, and its part of the sum.
    2. The time per example on a core while no other core works. 3. The time that each additional working core adds to
    term 2.
    """
    working = min(contexts, cores)
    return [contexts / working, batch_size / working, batch_size * (working - 1) / working]


def fit(rows: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Find x >= 0 that minimizes the sum of squares of rows @ x / times - 1.

    The errors are relative because times span several orders of magnitude. rows: (points, terms), times: (points,).
    """
    rows, best = rows / times[:, None], (np.inf, np.zeros(rows.shape[1]))
    for terms in range(1, rows.shape[1] + 1):
        for some in combinations(range(rows.shape[1]), terms):
            x = np.zeros(rows.shape[1])
            x[list(some)] = np.linalg.lstsq(rows[:, some], np.ones(len(rows)), rcond=None)[0]
            if (x >= 0).all():
                best = min(best, (((rows @ x - 1) ** 2).sum(), x), key=lambda found: found[0])
    return best[1]


def run(folder: str | Path) -> dict[str, Any]:
    """Fit the model to scaling.json in a folder. Returns the input of `table` and `draw`. Raises UsageError if the file
    is missing or incomplete."""
    path = Path(folder) / "scaling.json"
    measure = f"run `bench.py scaling --out {folder}`, with all models and all contexts"
    try:
        return _model(json.loads(path.read_bytes()))
    except OSError as error:
        raise UsageError(None, path, f"{error.strerror}; {measure}") from None
    except (LookupError, TypeError, ValueError) as error:
        raise UsageError(None, path, f"incomplete ({error!r}); {measure}") from None


def _model(scaling: dict[str, Any]) -> dict[str, Any]:
    cores = scaling["machine"]["cores"]
    runs: dict[str, list[dict]] = {}
    for run in scaling["runs"]:
        runs.setdefault(f"{run['impl']}, {TITLE[run['model']]}", []).append(run)
    steps = {name: _fitted(of_it, cores) for name, of_it in runs.items()}
    predicted = []
    for model in TITLE:
        terms = steps[f"highlevel, {TITLE[model]}"]["terms"]
        predicted += [_predict(model, terms, speed, link) for speed in SPEEDS for link in LINKS]
    return {"cores": cores, "cpu": scaling["machine"]["cpu"], "steps": steps, "predicted": predicted}


def _fitted(runs: list[dict], cores: int) -> dict[str, Any]:
    """Fit the runs. Returns the terms, the measured and modeled times, and [median, largest] relative errors. "fitted"
    says which runs were used for the fit."""
    rows = np.array([step_row(run["contexts"], run["batch_size"], cores) for run in runs], float)
    ms = np.array([median(run["step_ms"]) for run in runs], float)
    fitted = np.array([run["contexts"] < CHECKED for run in runs])
    if fitted.all() or np.linalg.matrix_rank(rows[fitted]) < 2 or (ms <= 0).any():
        raise ValueError(f"needs positive times for {CHECKED} contexts and for several smaller numbers of contexts")
    terms = fit(rows[fitted], ms[fitted])
    modelled = rows @ terms
    errors = np.abs(modelled / ms - 1)
    return {
        "terms": terms.tolist(),
        "fitted": fitted.tolist(),
        "ms": ms.tolist(),
        "modelled_ms": modelled.tolist(),
        "fitted_error": [float(np.median(errors[fitted])), float(errors[fitted].max())],
        "checked_error": [float(np.median(errors[~fitted])), float(errors[~fitted].max())],
    }


def _predict(model: str, terms: list[float], speed: int, link: str) -> dict[str, Any]:
    """Predict weak scaling: all devices have the same batch size. The allreduce starts after the last gradient, and the
    next step starts after the allreduce. A faster device reduces the time per example, but not the time for calls."""
    compute = terms[0] + harness.BATCH_SIZE[model] * terms[1] / speed
    efficiency = {}
    for way in CLUSTER:
        times = [1000 * allreduce_seconds(way, k, GRADIENT_BYTES[model], *LINKS[link]) for k in DEVICES]
        efficiency[way] = [compute / (compute + ms) for ms in times]
    predicted = {"predicted_compute_ms": compute, "predicted_efficiency": efficiency}
    return {"model": model, "speed": speed, "link": link, **predicted}


def table(result: dict) -> str:
    """Format the fit and its errors, then the best prediction for each cluster."""
    cores = result["cores"]
    working = min(CHECKED, cores)
    steps = [["steps", "ms per context", "examples/s, 1 core", f"{working} cores", "error, fitted", "not fitted"]]
    for name, found in result["steps"].items():
        context, example, shared = found["terms"]
        rates = [f"{1000 * k / (example + (k - 1) * shared):.0f}" for k in (1, working)]
        errors = [f"{found[key][0]:.0%} ({found[key][1]:.0%})" for key in ("fitted_error", "checked_error")]
        steps.append([name, f"{context:.2f}", *rates, *errors])
    predicted = [["", "compute ms", *(f"{k} devices" for k in SHOWN)]]
    for case in result["predicted"]:
        name = f"{TITLE[case['model']]}, devices {SPEEDS[case['speed']]}, {case['link']}"
        row = [name, f"{case['predicted_compute_ms']:.2f}"]
        for k in SHOWN:
            best, way = max((of_it[DEVICES.index(k)], way) for way, of_it in case["predicted_efficiency"].items())
            row.append(f"{harness.three_digits(100 * best)}% {way}")
        predicted.append(row)
    lines = [
        f"A cost model fitted to the result of bench.py scaling on {cores} cores of {result['cpu']}.",
        f"Errors are relative, median (largest); {CHECKED} or more contexts were not used for the fit.",
        "",
        "FITTED: (contexts x ms per context + examples x ms per example) / cores in use",
        *log.table(steps),
        "",
        "PREDICTED, NOT MEASURED: efficiency of clusters with the fastest allreduce",
        "Each device has its own link, which sends one message and receives one at a time. Nothing overlaps with",
        "the allreduce. Links and speeds are assumptions; 100 times one core is about the speed of a GPU.",
        *log.table(predicted),
    ]
    return "\n".join(lines)


COLORS = {"star": "#000000", "tree": "#e69f00", "ring": "#0072b2", "PS": "#cc79a7"}  # Okabe and Ito's palette
STYLES = {"star": ":", "tree": "-.", "ring": "-", "PS": "--"}


def draw(result: dict, file: BinaryIO) -> None:
    """Draw a PNG image. Left: modeled against measured times. Right: predicted efficiency by number of devices, with
    one row per network and speed and one column per link."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(17, 9), layout="constrained")
    figure.suptitle(
        f"A cost model fitted on {result['cores']} cores of {result['cpu']} (left), and what it predicts for clusters "
        "(right: predicted, not measured; links and speeds assumed)"
    )
    left, right = figure.subfigures(1, 2, width_ratios=(1, 2.2))
    _scatter(left.subplots(), result["steps"])
    panels = right.subplots(len(TITLE) * len(SPEEDS), len(LINKS), sharex=True, sharey=True)
    for axes, case in zip(panels.flat, result["predicted"]):
        for way, efficiency in case["predicted_efficiency"].items():
            axes.plot(DEVICES, 100 * np.array(efficiency), STYLES[way], color=COLORS[way], linewidth=2, label=way)
        axes.set_xscale("log", base=2)
        axes.set_xticks(DEVICES[::3], [str(k) for k in DEVICES[::3]])
        axes.set_ylim(0, 102)
        axes.grid(alpha=0.3)
        speed = "one core" if case["speed"] == 1 else f"{case['speed']} x one core"
        axes.set_title(f"predicted: {TITLE[case['model']]}, {speed}, {case['link']}", fontsize="small")
    right.supxlabel("devices")
    right.supylabel("predicted efficiency, %")
    panels[0, 0].legend(title="allreduce", fontsize="small")
    figure.savefig(file, format="png", dpi=100)


def _scatter(axes: Any, fits: dict[str, dict]) -> None:
    """Plot modeled against measured times: hollow markers for points used in the fit, filled markers for the rest."""
    for (name, found), color, marker in zip(fits.items(), COLORS.values(), "osD"):
        fitted, ms, modelled = (np.array(found[key]) for key in ("fitted", "ms", "modelled_ms"))
        axes.plot(ms[fitted], modelled[fitted], marker, color=color, markerfacecolor="none", alpha=0.8)
        axes.plot(ms[~fitted], modelled[~fitted], marker, color=color, alpha=0.8, label=name)
    every = [ms for found in fits.values() for ms in found["ms"] + found["modelled_ms"]]
    ends = np.array([0.7 * min(every), 1.4 * max(every)])
    axes.plot(ends, ends, color="gray", linewidth=1, zorder=0)
    axes.fill_between(ends, ends / 1.25, 1.25 * ends, color="gray", alpha=0.15, linewidth=0)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="measured, ms", ylabel="modeled, ms")
    markers = f"filled: {CHECKED} or more contexts, not used for the fit; hollow: used"
    axes.set_title(f"Steps\n{markers}; gray: within a factor of 1.25", fontsize="small")
    axes.legend(fontsize="small")
    axes.set_box_aspect(1)
