"""`model`: a cost model of a data-parallel step, fitted to what `allreduce` and `scaling` measured on this machine.

It is fitted to fewer contexts than CHECKED and compared with CHECKED contexts. Then it predicts clusters, which nobody
measured: every such number is called predicted. Imports no mxnet.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from bench import allreduce, harness
from bench.harness import TITLE
from gluon_mgpu.runtime.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CHECKED = 8  # runs on at least this many contexts are not fitted to

# In one machine, contexts share the memory, so a sum takes as long as all its operations one after another:
#   operations * latency + bytes read and written / bandwidth
# with the bytes of allreduce.moved. The operations on k contexts, per array:
OPERATIONS = {
    "star": ("3k-3", lambda k: 3 * (k - 1)),  # to the first context: a copy and an addition each; back: a copy each
    "tree": ("3k-3", lambda k: 3 * (k - 1)),
    "slices": ("2k^2", lambda k: 2 * k * k),  # for each of k slices: k - 1 copies, a sum, k copies
    "KVStore local": ("2k+1", lambda k: 2 * k + 1),  # k copies, a sum, k copies
    "KVStore device": ("2k+1", lambda k: 2 * k + 1),
}

# In a cluster, each device has a link of its own to a switch that never blocks. The link sends one message and receives
# one message at a time; a message of n bytes takes latency + n / bandwidth, the whole gradient is one message, and
# additions cost nothing (Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH, 2005,
# without its term for additions). So an allreduce takes
#   messages * latency + share * bytes of the gradient / bandwidth
# (messages, share) for k devices, as functions and as text, and what they are:
CLUSTER = {
    "star": (
        lambda k: (2 * (k - 1), 2 * (k - 1)),
        ("2(k-1)", "2(k-1)", "one device receives all gradients, then sends the sum to each"),
    ),
    "tree": (
        lambda k: (2 * (k - 1).bit_length(), 2 * (k - 1).bit_length()),
        (
            "2 log2 k",
            "2 log2 k",
            "pairs, then pairs of pairs: log2(k) rounds, rounded up; as many back (Thakur et al.)",
        ),
    ),
    "ring": (
        lambda k: (2 * (k - 1), 2 * (k - 1) / k),
        ("2(k-1)", "2(k-1)/k", "k-1 rounds of reduce-scatter, k-1 of all-gather, a k-th each (Patarasuk, Yuan 2009)"),
    ),
    "PS": (
        lambda k: (3 * (k - 1), 2 * (k - 1) / k),
        ("3(k-1)", "2(k-1)/k", "parameter servers, one per device with a k-th each: push, ask, pull (Li et al. 2014)"),
    ),
}

# Assumed, not measured.
LINKS = {  # (seconds per message, bytes/s each way)
    "1 Gbit/s, 50 us": (50e-6, 1e9 / 8),
    "10 Gbit/s, 20 us": (20e-6, 10e9 / 8),
    "100 Gbit/s, 2 us": (2e-6, 100e9 / 8),
}
SPEEDS = {1: "devices as fast as one core here", 100: "devices 100 times as fast"}  # the order of magnitude of a GPU
DEVICES = tuple(2**i for i in range(13))  # 1 to 4096
SHOWN = (8, 64, 512, 4096)  # in the table


def allreduce_seconds(way: str, devices: int, size: float, latency: float, bandwidth: float) -> float:
    """Predicted seconds until each device of a cluster holds the sum of all gradients.

    way: a key of CLUSTER. size: bytes of the gradient. latency: seconds per message. bandwidth: bytes/s each way.
    """
    messages, share = CLUSTER[way][0](devices)
    return messages * latency + share * size / bandwidth


def step_row(contexts: int, batch_size: int, cores: int) -> list[float]:
    """What the terms of a step's time are multiplied by; the terms are milliseconds.

    1. What each context adds to a step, whatever the batch: calls, its update, its part of the sum. 2. The time of an
    example on a core if no other core works. 3. What each other working core adds to that.
    """
    working = min(contexts, cores)
    return [contexts / working, batch_size / working, batch_size * (working - 1) / working]


def fit(rows: np.ndarray, times: np.ndarray) -> np.ndarray:
    """The x >= 0 for which rows @ x is nearest to times: least squares of rows @ x / times - 1.

    The errors are relative because times differ by factors of thousands. rows: (points, terms), times: (points,).
    """
    rows, best = rows / times[:, None], (np.inf, np.zeros(rows.shape[1]))
    for terms in range(1, rows.shape[1] + 1):
        for some in combinations(range(rows.shape[1]), terms):
            x = np.zeros(rows.shape[1])
            x[list(some)] = np.linalg.lstsq(rows[:, some], np.ones(len(rows)), rcond=None)[0]
            if (x >= 0).all():
                best = min(best, (((rows @ x - 1) ** 2).sum(), x), key=lambda found: found[0])
    return best[1]


def run(folder: str | Path) -> dict:
    """Fit to allreduce.json and scaling.json in a folder; returns what `table` and `draw` show.

    Raises UsageError if one of the files is missing or incomplete, or if they are from different machines.
    """
    (sums, steps), machines = zip(
        *(_read(folder, name, read) for name, read in (("allreduce", _sums), ("scaling", _steps)))
    )
    if machines[0] != machines[1]:
        raise UsageError(f"{folder}: allreduce.json and scaling.json are from different machines; measure on one")
    cores = machines[0][0]
    found: dict[str, Any] = {"cores": cores, "cpu": machines[0][1], "sums": {}, "steps": {}}
    for way, points in sums["points"].items():
        rows = [
            [p["arrays"] * OPERATIONS[way][1](p["contexts"]), allreduce.moved(way, p["contexts"]) * p["bytes"] / 1e6]
            for p in points
        ]
        found["sums"][way] = _fitted(points, rows)
    for name, points in steps.items():
        found["steps"][name] = _fitted(points, [step_row(p["contexts"], p["batch_size"], cores) for p in points])
    found["predicted"] = [
        _predict(model, found["steps"][f"highlevel, {TITLE[model]}"], sums["bytes"][model], speed, link)
        for model in TITLE
        for speed in SPEEDS
        for link in LINKS
    ]
    return found


def _read(folder: str | Path, name: str, read: Any) -> tuple[Any, tuple[int, str]]:
    """What `read` takes from the JSON file of a subcommand, and the machine: (cores, processor)."""
    path, command = Path(folder) / f"{name}.json", f"`bench.py {name} --out {folder}`"
    try:
        content = json.loads(path.read_bytes())
        machine = content["machine"]["cores"], content["machine"]["cpu"]
        return read(content), machine
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}); run {command} first") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(f"{path}: not a complete result ({type(error).__name__}: {error}); run {command}") from None


def _sums(content: dict) -> dict[str, Any]:
    """{"points": {way: points}, "bytes": {model: of its gradient}} of allreduce.json."""
    points: dict[str, list[dict]] = {way: [] for way in OPERATIONS}
    sizes = {}
    for worker in content["workers"]:
        for found in worker["points"]:
            sizes[found["model"]] = found["bytes"]
            point = {"contexts": worker["contexts"], **{key: found[key] for key in ("name", "arrays", "bytes")}}
            for way in OPERATIONS if worker["contexts"] > 1 else ():
                points[way].append({**point, "ms": _median(found["ms"][way])})
    _check(points)
    return {"points": points, "bytes": {model: sizes[model] for model in TITLE}}


def _steps(content: dict) -> dict[str, list[dict]]:
    """{"impl, model": points} of scaling.json."""
    points: dict[str, list[dict]] = {}
    for run in content["runs"]:
        point = {"name": run["kind"], "contexts": run["contexts"], "batch_size": run["batch_size"]}
        name = f"{run['impl']}, {TITLE[run['model']]}"
        points.setdefault(name, []).append({**point, "ms": _median(run["step_ms"])})
    _check({**{f"highlevel, {title}": [] for title in TITLE.values()}, **points})
    return points


def _median(ms: list[float]) -> float:
    found = median(ms)
    if not 0 < found < 1e9:
        raise ValueError(f"{found} ms")
    return found


def _check(points: dict[str, list[dict]]) -> None:
    """Raise ValueError if something was not measured on enough numbers of contexts."""
    for name, of_it in points.items():
        contexts = {p["contexts"] for p in of_it}
        if len([k for k in contexts if k < CHECKED]) < 2 or max(contexts) < CHECKED:
            raise ValueError(f"{name}: needs two numbers of contexts below {CHECKED}, and {CHECKED} or more")


def _fitted(points: list[dict], rows: Sequence[Sequence[float]]) -> dict[str, Any]:
    """The fitted terms, the points with "modelled_ms" and relative "error", and the median and largest errors."""
    fitted = [i for i, p in enumerate(points) if p["contexts"] < CHECKED]
    terms = fit(np.array([rows[i] for i in fitted]), np.array([points[i]["ms"] for i in fitted]))
    for p, ms in zip(points, np.array(rows) @ terms):
        p.update(modelled_ms=float(ms), error=float(ms / p["ms"] - 1))
    errors = {}
    for name, some in (("fitted_error", True), ("checked_error", False)):
        sizes = [abs(p["error"]) for p in points if (p["contexts"] < CHECKED) is some]
        errors[name] = [median(sizes), max(sizes)]
    return {"terms": terms.tolist(), "points": points, **errors}


def _predict(model: str, step: dict, size: int, speed: int, link: str) -> dict[str, Any]:
    """Weak scaling: each device has the same batch. The allreduce begins after the last gradient, and the next step
    after the allreduce. A faster device shortens examples, not calls."""
    batch_size = next(p["batch_size"] for p in step["points"] if p["contexts"] == 1)
    compute = step["terms"][0] + batch_size * step["terms"][1] / speed
    efficiency = {}
    for way in CLUSTER:
        times = [1000 * allreduce_seconds(way, k, size, *LINKS[link]) for k in DEVICES]
        efficiency[way] = [compute / (compute + ms) for ms in times]
    about = {"model": model, "speed": speed, "link": link, "gradient_bytes": size, "batch_size": batch_size}
    return {**about, "predicted_compute_ms": compute, "predicted_efficiency": efficiency}


def table(result: dict) -> str:
    """Lines for a terminal: the fits and their errors, then what is predicted."""
    cores = result["cores"]
    lines = [
        "A cost model of a data-parallel step, fitted to what bench.py allreduce and scaling measured on contexts of",
        f"{cores} cores of {result['cpu']}. Errors are relative, median (largest);",
        f"{CHECKED} contexts and more were not fitted to.",
        "",
        "FITTED: SUMS OVER k CONTEXTS: operations x latency + bytes read and written / bandwidth",
    ]
    rows = [["", "operations", "latency", "bandwidth", "error, fitted to", "not fitted to"]]
    for way, found in result["sums"].items():
        latency, per_mb = found["terms"]
        bandwidth = f"{1 / per_mb:.1f} GB/s" if per_mb else "no limit"
        rows.append([way, OPERATIONS[way][0], f"{1000 * latency:.1f} us", bandwidth, *_errors(found)])
    lines += harness.table(rows)
    lines += [
        "",
        "FITTED: STEPS OF B EXAMPLES ON k CONTEXTS: (k x a context's ms + B x an example's ms) / cores at work",
    ]
    working = min(CHECKED, cores)
    rows = [["", "ms per context", "examples/s, 1 core", f"{working} cores", "error, fitted to", "not fitted to"]]
    for name, found in result["steps"].items():
        context, example, shared = found["terms"]
        rates = [f"{1000 * k / (example + (k - 1) * shared):.0f}" for k in (1, working)]
        rows.append([name, f"{context:.2f}", *rates, *_errors(found)])
    return "\n".join([*lines, *harness.table(rows), "", *_predicted_table(result["predicted"])])


def _errors(found: dict) -> list[str]:
    return [f"{found[key][0]:.0%} ({found[key][1]:.0%})" for key in ("fitted_error", "checked_error")]


def _predicted_table(cases: list[dict]) -> list[str]:
    lines = [
        "PREDICTED, NOT MEASURED: CLUSTERS",
        "Each of k devices has its own link, which sends one message and receives one at a time; an allreduce takes",
        "messages x latency + share x bytes of the gradient / bandwidth, after the gradients and before the update.",
        "Links and speeds are assumed; 100 times is a GPU's order of magnitude. What a context adds to a step stays.",
        *harness.table([["", "messages", "share", ""], *([way, *texts] for way, (_, texts) in CLUSTER.items())]),
    ]
    for first in range(0, len(cases), len(LINKS)):
        case = cases[first]
        mb, ms = case["gradient_bytes"] / 1e6, case["predicted_compute_ms"]
        lines += [
            "",
            f"predicted efficiency in % (* best): {TITLE[case['model']]}, {SPEEDS[case['speed']]}: {ms:.2f} ms for "
            f"{case['batch_size']} examples per device, {mb:.2f} MB to sum",
        ]
        rows = [["", *(f"{k} devices: {'  '.join(CLUSTER)}" for k in SHOWN)]]
        for of_link in cases[first : first + len(LINKS)]:
            rows.append([of_link["link"], *(_efficiencies(of_link, DEVICES.index(k)) for k in SHOWN)])
        lines += harness.table(rows)
    return lines


def _efficiencies(case: dict, i: int) -> str:
    found = [efficiency[i] for efficiency in case["predicted_efficiency"].values()]
    return " ".join(f"{harness.three_digits(100 * e) + '*' * (e == max(found)):>5}" for e in found)


COLORS = {"star": "#000000", "tree": "#e69f00", "ring": "#0072b2", "PS": "#cc79a7"}  # Okabe and Ito's
STYLES = {"star": ":", "tree": "-.", "ring": "-", "PS": "--"}


def draw(result: dict, file: BinaryIO) -> None:
    """Left, modelled against measured; right, predicted efficiency by devices: a row per network and speed, a column per
    link. PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(17, 11), layout="constrained")
    figure.suptitle(
        f"A cost model fitted on {result['cores']} cores of {result['cpu']} (left), and what it predicts for clusters "
        "(right: predicted, not measured; links and speeds assumed)"
    )
    left, right = figure.subfigures(1, 2, width_ratios=(1, 2.2))
    for axes, title, fits in zip(left.subplots(2, 1), ("Sums", "Steps"), (result["sums"], result["steps"])):
        _scatter(axes, title, fits)
    cases = result["predicted"]
    panels = right.subplots(len(cases) // len(LINKS), len(LINKS), sharex=True, sharey=True)
    for axes, case in zip(panels.flat, cases):
        for way, efficiency in case["predicted_efficiency"].items():
            percent = [100 * e for e in efficiency]
            axes.plot(DEVICES, percent, STYLES[way], color=COLORS[way], linewidth=2, label=way)
        axes.set_xscale("log", base=2)
        axes.set_xticks(DEVICES[::3], [str(k) for k in DEVICES[::3]])
        axes.set_ylim(0, 102)
        axes.grid(alpha=0.3)
        speed = "one core" if case["speed"] == 1 else f"{case['speed']} x one core"
        axes.set_title(f"predicted: {TITLE[case['model']]}, {speed}, {case['link']}", fontsize="small")
    for axes in panels[:, 0]:
        axes.set_ylabel("predicted efficiency, %")
    for axes in panels[-1]:
        axes.set_xlabel("devices")
    panels[0, 0].legend(title="allreduce", fontsize="small")
    figure.savefig(file, format="png", dpi=100)


def _scatter(axes: Axes, title: str, fits: dict[str, dict]) -> None:
    """Modelled against measured ms; filled if not fitted to, hollow if fitted to."""
    for (name, found), color, marker in zip(fits.items(), (*COLORS.values(), "#009e73"), "osDv^"):
        for fitted in (True, False):
            some = [p for p in found["points"] if (p["contexts"] < CHECKED) is fitted]
            x, y = zip(*((p["ms"], p["modelled_ms"]) for p in some))
            face = "none" if fitted else color
            axes.plot(x, y, marker, color=color, markerfacecolor=face, alpha=0.8, label=None if fitted else name)
    every = [p[key] for found in fits.values() for p in found["points"] for key in ("ms", "modelled_ms")]
    ends = [0.7 * min(ms for ms in every if ms > 0), 1.4 * max(every)]
    axes.plot(ends, ends, color="gray", linewidth=1, zorder=0)
    axes.fill_between(ends, [e / 1.25 for e in ends], [1.25 * e for e in ends], color="gray", alpha=0.15, linewidth=0)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="measured, ms", ylabel="modelled, ms")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    note = f"filled: {CHECKED} contexts, not fitted to;\nhollow: fitted to; gray: within a quarter"
    axes.set_title(f"{title}: {note}", fontsize="medium")
    axes.legend(fontsize="small")
