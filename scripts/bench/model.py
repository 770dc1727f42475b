"""A cost model of a data-parallel step, fitted to what `allreduce` and `scaling` measured on this machine's contexts.

Fitted to fewer contexts than CHECKED and held against CHECKED of them, to which it was not fitted. Then it predicts
clusters, which nobody has measured here: every such number is called predicted. Imports no mxnet.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from bench import allreduce
from gluon_mgpu.runtime.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MODELS = allreduce.MODELS
IMPLS = ("scratch", "highlevel")
PREDICTED_IMPL = "highlevel"  # the one that has both networks
NEEDED = {"allreduce": (2, 4, 8), "scaling": (1, 2, 4, 8)}  # contexts
CHECKED = 8  # so many contexts, or more, are kept from the fit

# In one machine contexts share the memory, so a sum's time is that of all its operations, one after another:
#   operations * latency + bytes read and written / bandwidth
# with the bytes of allreduce.moved. For each array, the operations on k contexts:
OPERATIONS = {
    "star": ("3k-3", lambda k: 3 * (k - 1)),  # to the first: a copy and an addition each; back: a copy each
    "tree": ("3k-3", lambda k: 3 * (k - 1)),
    "slices": ("2k^2", lambda k: 2 * k * k),  # of each of k slices: k - 1 copies, a sum, k copies
    "KVStore local": ("2k+1", lambda k: 2 * k + 1),  # k copies, a sum, k copies
    "KVStore device": ("2k+1", lambda k: 2 * k + 1),
}

# In a cluster each device has a link of its own to a switch that never blocks. It sends one message at a time and at
# the same time receives one; a message of n bytes takes latency + n / bandwidth, the whole gradient may be one message,
# and additions cost nothing (that is the model of Thakur, Rabenseifner, Gropp: Optimization of Collective Communication
# Operations in MPICH, 2005, without its term for additions). So an allreduce takes what its longest chain does:
#   messages * latency + share * bytes of the gradient / bandwidth
# For k devices, (messages, share) and what they are:
CLUSTER = {
    "star": (
        lambda k: (2 * (k - 1), 2 * (k - 1)),
        "one device receives all gradients, then sends the sum to each",
    ),
    "tree": (
        lambda k: (2 * (k - 1).bit_length(), 2 * (k - 1).bit_length()),
        "pairs, then pairs of pairs: log2(k) rounds, rounded up; as many back (Thakur et al. 2005)",
    ),
    "ring": (
        lambda k: (2 * (k - 1), 2 * (k - 1) / k),
        "k-1 rounds of reduce-scatter, k-1 of all-gather, a k-th each (Patarasuk, Yuan 2009)",
    ),
    "PS": (
        lambda k: (3 * (k - 1), 2 * (k - 1) / k),
        "parameter servers, one beside each device, a k-th each: push, ask, pull (Li et al. 2014)",
    ),
}
FORMULAS = {
    "star": ("2(k-1)", "2(k-1)"),
    "tree": ("2 log2 k", "2 log2 k"),
    "ring": ("2(k-1)", "2(k-1)/k"),
    "PS": ("3(k-1)", "2(k-1)/k"),
}

# Assumed, not measured.
LINKS = {  # (seconds a message, bytes/s each way)
    "1 Gbit/s, 50 us": (50e-6, 1e9 / 8),
    "10 Gbit/s, 20 us": (20e-6, 10e9 / 8),
    "100 Gbit/s, 2 us": (2e-6, 100e9 / 8),
}
SPEEDS = {1: "devices as fast as one core here", 100: "devices 100 times as fast"}  # GPUs are of that order
DEVICES = tuple(2**i for i in range(13))  # 1 to 4096
SHOWN = (8, 64, 512, 4096)  # in the table


def allreduce_seconds(way: str, devices: int, size: float, latency: float, bandwidth: float) -> float:
    """Predicted seconds until each of so many devices in a cluster holds the sum of all their gradients.

    way: one of CLUSTER. size: bytes of the gradient. latency: seconds a message. bandwidth: a link's bytes/s each way.
    """
    messages, share = CLUSTER[way][0](devices)
    return messages * latency + share * size / bandwidth


def step_ms(
    contexts: int, batch_size: int, cores: int, context_ms: float, example_ms: float, shared_ms: float
) -> float:
    """ms of a step of so many examples on contexts that share the cores of one machine.

    context_ms: what each context adds to a step whatever the batch, in a core's time: calls, its update, its part of
    the sum. Measured alone, a sum would not overlap with other contexts' gradients, as in a step it does; and the sum
    that steps use on CPU contexts, `shared_memory.allreduce`, grows linearly with them, as this term does.
    example_ms: an example's time on a core when no other works; shared_ms: what each other core at work adds to that.
    """
    return float(_step_row(contexts, batch_size, cores) @ [context_ms, example_ms, shared_ms])


def _step_row(contexts: int, batch_size: int, cores: int) -> np.ndarray:
    working = min(contexts, cores)
    return np.array([contexts, batch_size, batch_size * (working - 1)], float) / working


def _sum_row(way: str, contexts: int, arrays: int, size: int) -> np.ndarray:
    """Operations, and MB read and written, of one sum."""
    return np.array([arrays * OPERATIONS[way][1](contexts), allreduce.moved(way, contexts) * size / 1e6], float)


def fit(rows: np.ndarray, times: np.ndarray) -> np.ndarray:
    """The x, none below 0, for which rows @ x is nearest to times: least squares of rows @ x / times - 1.

    Relative, since times span factors of thousands. rows: (points, terms), times: (points,), x: (terms,). Some term of
    x is 0 where any other fit needs it negative.
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

    The result has "machine", that of the files; "sums" and "steps", a list of fits with each point measured and
    modelled; "predicted"; and "engines", of distributed.json, empty where that is not there. Raises UsageError, in one
    line, where a file is not what it must be, or one of the first two is not there.
    """
    sums, steps = _File(folder, "allreduce"), _File(folder, "scaling")
    here = sums.machine()
    for name in ("cores", "cpu"):
        if here[name] != steps.machine()[name]:
            both = f"{_machine_line(here)} and {_machine_line(steps.machine())}"
            raise UsageError(f"{folder}: allreduce.json and scaling.json are of two machines, {both}: measure on one")
    points, sizes = _sum_points(sums)
    result: dict = {
        "machine": here,
        "checked_contexts": CHECKED,
        "sums": [_fit_sum(way, points[way]) for way in OPERATIONS],
        "steps": [_fit_step(steps, *key, runs, here["cores"]) for key, runs in _step_points(steps).items()],
    }
    result["predicted"] = _predict(result["steps"], sizes)
    result["engines"] = []
    if (Path(folder) / "distributed.json").exists():
        distributed = _File(folder, "distributed")
        if distributed.machine()["cpu"] != here["cpu"]:
            raise distributed.error(f"it is of {_machine_line(distributed.machine())}, not {_machine_line(here)}")
        result["engines"] = _engines(distributed)
    return result


def _engines(file: _File) -> list[dict]:
    """Steps of 2 processes held against what the exchange should take by the sums alone: nothing is fitted to them."""
    sums: dict[str, list[dict]] = {}
    alone: dict[tuple[str, str, str], dict] = {}
    steps: dict[tuple[str, str, str], dict] = {}
    for found in file.take(file.content, "sums", "a list"):
        point = {
            "bytes": file.take(found, "bytes", "a whole number above 0"),
            "measured_ms": median(file.take(found, "ms", "numbers above 0")),
        }
        sums.setdefault(file.take(found, "kvstore", "a line"), []).append(point)
    for found in file.take(file.content, "runs", "a list"):
        kvstore, impl, model = (file.take(found, key, "a line") for key in ("kvstore", "impl", "model"))
        if impl not in IMPLS or model not in MODELS:
            raise file.error(f"a run of {impl}, {model} is not known")
        ms = median(file.take(found, "step_ms", "numbers above 0"))
        if kvstore != "local":
            runs = (alone, steps)[file.take(found, "exchange", "true or false")]
            counts = {key: file.take(found, key, "a whole number above 0") for key in ("arrays", "array_bytes")}
            runs[kvstore, impl, model] = {"impl": impl, "model": model, **counts, "measured_ms": ms}
    engines = []
    for kvstore, points in sums.items():
        rows = np.array([[1, p["bytes"] / 1e6] for p in points])
        x = fit(rows, np.array([p["measured_ms"] for p in points]))
        _hold_against(points, rows @ x)
        of_it = {key: p for key, p in steps.items() if key[0] == kvstore}
        if not of_it or not of_it.keys() <= alone.keys():
            raise file.error(f"the steps over {kvstore} were not measured with and without the exchange")
        for key, p in of_it.items():
            without = alone[key]["measured_ms"]
            exchange = np.array([p["arrays"], p["array_bytes"] / 1e6]) @ x
            p["exchange_ms"] = p["measured_ms"] - without
            _hold_against([p], [without + exchange])
        engines.append(
            {
                "kvstore": kvstore,
                "array_us": 1000 * float(x[0]),
                "gb_s": 1 / float(x[1]) if x[1] else None,
                "sums": points,
                "steps": list(of_it.values()),
            }
        )
    return engines


def _fit_sum(way: str, points: list[dict]) -> dict:
    rows = np.array([_sum_row(way, p["contexts"], p["arrays"], p["bytes"]) for p in points])
    operation, mb = x = _fit_points(rows, points)
    _hold_against(points, rows @ x)
    # in 1 ms a MB is a GB in 1 s; JSON has no infinity
    return {"way": way, "operation_us": 1000 * operation, "gb_s": 1 / mb if mb else None, **_errors(points)}


def _fit_step(file: _File, impl: str, model: str, points: list[dict], cores: int) -> dict:
    rows = np.array([_step_row(p["contexts"], p["batch_size"], cores) for p in points])
    x = _fit_points(rows, points)
    context, example, shared = map(float, x)
    if not example:
        raise file.error(f"the steps of {impl}, {MODELS[model]} take no longer with a larger batch")
    _hold_against(points, rows @ x)
    return {
        "impl": impl,
        "model": model,
        "context_ms": context,
        "example_ms": example,
        "shared_ms": shared,
        "batch_size": next(p["batch_size"] for p in points if p["contexts"] == 1),
        **_errors(points),
    }


def _fit_points(rows: np.ndarray, points: list[dict]) -> np.ndarray:
    fitted = [i for i, p in enumerate(points) if p["fitted"]]
    return fit(rows[fitted], np.array([points[i]["measured_ms"] for i in fitted]))


def _hold_against(points: list[dict], modelled: Iterable[float]) -> None:
    for p, ms in zip(points, modelled):
        p.update(modelled_ms=float(ms), error=float(ms / p["measured_ms"] - 1))


def _errors(points: list[dict]) -> dict:
    """Median and largest relative error of the points fitted to, and of those not."""
    found: dict = {"points": points}
    for name, wanted in (("fitted_error", True), ("checked_error", False)):
        errors = [abs(p["error"]) for p in points if p["fitted"] is wanted]
        found[name] = {"median": median(errors), "largest": max(errors)}
    return found


def _predict(steps: list[dict], sizes: dict[str, int]) -> dict:
    """Weak scaling: a device's batch stays. The allreduce begins when the last gradient is there, and the next step
    when it is done: this project's loop overlaps nothing over links."""
    cases = []
    for model, size in sizes.items():
        step = next(s for s in steps if (s["impl"], s["model"]) == (PREDICTED_IMPL, model))
        for speed, device in SPEEDS.items():
            # calls are Python's and the engine's: a faster device does not shorten them
            compute = step["context_ms"] + step["batch_size"] * step["example_ms"] / speed
            for link, (latency, bandwidth) in LINKS.items():
                ms = {
                    way: [1000 * allreduce_seconds(way, k, size, latency, bandwidth) for k in DEVICES]
                    for way in CLUSTER
                }
                cases.append(
                    {
                        "model": model,
                        "device": device,
                        "speed": speed,
                        "link": link,
                        "gradient_bytes": size,
                        "batch_a_device": step["batch_size"],
                        "predicted_compute_ms": compute,
                        "predicted_allreduce_ms": ms,
                        "predicted_efficiency": {way: [compute / (compute + t) for t in ms[way]] for way in ms},
                    }
                )
    return {"note": "Predicted, not measured. Links and speeds are assumed.", "devices": list(DEVICES), "cases": cases}


class _File:
    """What a subcommand left in a folder, checked as it is read: every error names the file and what to run."""

    def __init__(self, folder: str | Path, name: str) -> None:
        self.path = Path(folder) / f"{name}.json"
        self.name, self.command = name, f"`bench.py {name} --out {folder}`"
        try:
            self.content = json.loads(self.path.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            raise UsageError(f"{self.path} is not there: run {self.command} first") from None
        except OSError as error:
            raise UsageError(f"{self.path} cannot be read ({error.strerror}): run {self.command} again") from None
        except (ValueError, RecursionError):
            raise self.error("it is not JSON") from None

    def error(self, what: str) -> UsageError:
        return UsageError(f"{self.path}: {what}: run {self.command} again")

    def take(self, found: Any, key: str, kind: str) -> Any:
        """found[key], which must be one of _KINDS."""
        value = found.get(key) if isinstance(found, dict) else None
        if not _KINDS[kind](value):
            raise self.error(f"{key} {reprlib.repr(value)} is not {kind}")
        return value

    def machine(self) -> dict:
        machine = self.take(self.content, "machine", "an object")
        self.take(machine, "cores", "a whole number above 0")
        self.take(machine, "cpu", "a line")
        return machine

    def need(self, contexts: set[int], of: str) -> None:
        """Raise where a number of contexts was not measured."""
        lacking = [str(k) for k in NEEDED[self.name] if k not in contexts]
        if lacking:
            needed = ", ".join(map(str, NEEDED[self.name]))
            raise self.error(f"{of} was not measured on {', '.join(lacking)} contexts, and {needed} are needed")


def _positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 1e-12 < value < 1e18


_KINDS = {
    "an object": lambda value: isinstance(value, dict),
    "a list": lambda value: isinstance(value, list) and bool(value),
    "a line": lambda value: isinstance(value, str) and value.isprintable(),
    "a whole number above 0": lambda value: _positive(value) and isinstance(value, int),
    "true or false": lambda value: isinstance(value, bool),
    "numbers above 0": lambda value: isinstance(value, list) and bool(value) and all(map(_positive, value)),
}


def _sum_points(file: _File) -> tuple[dict[str, list[dict]], dict[str, int]]:
    """({way: points}, {model: bytes of its gradient}) of allreduce.json."""
    points: dict[str, list[dict]] = {way: [] for way in OPERATIONS}
    sizes: dict[str, int] = {}
    for worker in file.take(file.content, "workers", "a list"):
        contexts = file.take(worker, "contexts", "a whole number above 0")
        for found in file.take(worker, "points", "a list"):
            point = {
                "name": file.take(found, "name", "a line"),
                "contexts": contexts,
                "arrays": file.take(found, "arrays", "a whole number above 0"),
                "bytes": file.take(found, "bytes", "a whole number above 0"),
                "fitted": contexts < CHECKED,
            }
            if found.get("model") in tuple(MODELS):  # which compares what a set cannot hold
                sizes[found["model"]] = point["bytes"]
            if contexts > 1:  # on one, there is nothing to sum
                ms = file.take(found, "ms", "an object")
                for way in OPERATIONS:
                    points[way].append({**point, "measured_ms": median(file.take(ms, way, "numbers above 0"))})
    file.need({p["contexts"] for p in points["star"]}, "a sum")
    for model in MODELS:
        if model not in sizes:
            raise file.error(f"the gradients of {MODELS[model]} were not measured")
    return points, {model: sizes[model] for model in MODELS}


def _step_points(file: _File) -> dict[tuple[str, str], list[dict]]:
    """{(impl, model): points} of scaling.json."""
    points: dict[tuple[str, str], list[dict]] = {}
    for found in file.take(file.content, "runs", "a list"):
        impl, model, kind = (file.take(found, key, "a line") for key in ("impl", "model", "kind"))
        if impl not in IMPLS or model not in MODELS or kind not in ("strong", "weak"):
            raise file.error(f"a run of {impl}, {model}, {kind} is not known")
        contexts = file.take(found, "contexts", "a whole number above 0")
        point = {
            "name": kind,
            "contexts": contexts,
            "batch_size": file.take(found, "batch_size", "a whole number above 0"),
            "fitted": contexts < CHECKED,
            "measured_ms": median(file.take(found, "step_ms", "numbers above 0")),
        }
        points.setdefault((impl, model), []).append(point)
    for impl, model in sorted({*points, *((PREDICTED_IMPL, model) for model in MODELS)}):
        file.need({p["contexts"] for p in points.get((impl, model), [])}, f"{impl}, {MODELS[model]}")
    return points


def table(result: dict) -> str:
    """Lines for a terminal: the fits and their errors; then what is predicted."""
    lines = [
        "A cost model of a data-parallel step, fitted to what bench.py allreduce and scaling measured on contexts of",
        f"{_machine_line(result['machine'])}. Errors are relative, median (largest);",
        f"{CHECKED} contexts were not fitted to.",
        "",
        "FITTED: SUMS OVER k CONTEXTS: operations x latency + bytes read and written / bandwidth",
        f"{'':17}{'operations':>11}{'latency':>11}{'bandwidth':>12}{'error, fitted to':>20}{'not fitted to':>18}"
        "   the largest",
    ]
    for found in result["sums"]:
        rate = f"{found['gb_s']:.1f} GB/s" if found["gb_s"] else "no limit"
        lines.append(
            f"{found['way']:17}{OPERATIONS[found['way']][0]:>11}{found['operation_us']:>8.1f} us{rate:>12}"
            f"{_spread(found['fitted_error']):>20}{_spread(found['checked_error']):>18}   {_worst(found)}"
        )
    cores = result["machine"]["cores"]
    working = min(CHECKED, cores)
    lines += [
        "",
        "FITTED: STEPS OF B EXAMPLES ON k CONTEXTS: (k x a context's + B x an example's) / cores at work; a context's:",
        "calls, its update, its part of the sum; an example's is longer where more cores share the memory",
        f"{'':22}{'a context':>12}{'examples/s of a core alone, of ' + str(working):>35}{'error, fitted to':>18}"
        f"{'not fitted to':>16}   the largest",
    ]
    for found in result["steps"]:
        alone = 1000 / found["example_ms"]
        shared = 1000 / (found["example_ms"] + (working - 1) * found["shared_ms"])
        lines.append(
            f"{found['impl'] + ', ' + MODELS[found['model']]:22}{found['context_ms']:>9.2f} ms"
            f"{f'{alone:.0f}, {shared:.0f}':>35}{_spread(found['fitted_error']):>18}"
            f"{_spread(found['checked_error']):>16}   {_worst(found)}"
        )
    return "\n".join([*lines, *_engines_table(result["engines"]), "", *_predicted_table(result["predicted"])])


def _engines_table(engines: list[dict]) -> list[str]:
    if not engines:
        return []
    lines = [
        "",
        "HELD AGAINST STEPS OF 2 PROCESSES: the step without the exchange, and for that arrays x latency + bytes /",
        "bandwidth, fitted to arrays summed alone, as if nothing overlapped; an engine that overlaps takes less",
    ]
    for engine in engines:
        rate = f"{engine['gb_s']:.2f} GB/s" if engine["gb_s"] else "no limit"
        errors = [abs(p["error"]) for p in engine["sums"]]
        error = _spread({"median": median(errors), "largest": max(errors)})
        lines.append(f"{engine['kvstore']:11}{engine['array_us']:.0f} us an array, {rate}; error of the sums {error}")
        for p in engine["steps"]:
            arrays = f"{p['arrays']} array{'s'[: p['arrays'] > 1]}, {p['array_bytes'] / 1e6:.2f} MB"
            name = f"  {p['impl']}, {MODELS[p['model']]}, {arrays}:"
            lines.append(
                f"{name:50}{p['measured_ms']:8.1f} ms measured, {p['exchange_ms']:.1f} of it the exchange; "
                f"modelled {p['modelled_ms']:.1f} ({p['error']:+.0%})"
            )
    return lines


def _predicted_table(predicted: dict) -> list[str]:
    lines = [
        "PREDICTED, NOT MEASURED: CLUSTERS",
        "Each of k devices has a link of its own, which sends a message and receives one at a time; an allreduce takes",
        "messages x latency + share x bytes of the gradient / bandwidth, after the gradients and before the update.",
        "Links and speeds are assumed, 100 times as a GPU's order of magnitude. What a context adds to a step stays.",
        f"{'':9}{'messages':10}share",
    ]
    for way, (_, about) in CLUSTER.items():
        messages, share = FORMULAS[way]
        lines.append(f"{way:9}{messages:10}{share:10}{about}")
    at = [predicted["devices"].index(k) for k in SHOWN]
    heads = None
    for case in predicted["cases"]:
        head = (case["model"], case["device"])
        if head != heads:
            heads = head
            compute, size = case["predicted_compute_ms"], case["gradient_bytes"] / 1e6
            lines += [
                "",
                f"predicted: {MODELS[case['model']]}, {case['device']}: {compute:.2f} ms for {case['batch_a_device']} "
                f"examples a device, {size:.2f} MB to sum",
                f"{'efficiency, %':17}" + "".join(f"{f'{k} devices':>25}" for k in SHOWN),
                f"{'* best':17}" + "".join(" " + "".join(f"{way:>6}" for way in CLUSTER) for _ in SHOWN),
            ]
        efficiency, line = case["predicted_efficiency"], f"{case['link']:17}"
        for i in at:
            best = max(efficiency[way][i] for way in CLUSTER)
            cells = (f"{_percent(efficiency[way][i])}{'*' * (efficiency[way][i] == best)}" for way in CLUSTER)
            line += " " + "".join(f"{cell:>6}" for cell in cells)
        lines.append(line)
    return lines


def _percent(share: float) -> str:
    return f"{100 * share:.{0 if share >= 0.9995 else 1 if share >= 0.0995 else 2}f}"


def _spread(error: dict[str, float]) -> str:
    return f"{error['median']:.0%} ({error['largest']:.0%})"


def _worst(found: dict) -> str:
    """The point with the largest error of those not fitted to."""
    worst = max((p for p in found["points"] if not p["fitted"]), key=lambda p: abs(p["error"]))
    return f"{worst['error']:+.0%} {worst['name']}"


def _machine_line(machine: dict) -> str:
    return f"{machine['cores']} cores of {machine['cpu']}"


COLORS = {"star": "#000000", "tree": "#e69f00", "ring": "#0072b2", "PS": "#cc79a7"}  # Okabe and Ito's


def draw(result: dict, file: BinaryIO | str | Path) -> None:
    """Left, modelled against measured; right, predicted efficiency by devices: a row a network and speed, a column a
    link. PNG; file: binary and open, or a path."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(17, 11), layout="constrained")
    figure.suptitle(
        f"A cost model fitted on {_machine_line(result['machine'])} (left), and what it predicts for clusters (right: "
        "predicted, not measured; links and speeds assumed)"
    )
    left, right = figure.subfigures(1, 2, width_ratios=(1, 2.2))
    sums, steps = left.subplots(2, 1)
    _scatter(sums, "Sums over contexts", {found["way"]: found for found in result["sums"]})
    names = {f"{found['impl']}, {MODELS[found['model']]}": found for found in result["steps"]}
    _scatter(steps, "Steps", names)
    cases, devices = result["predicted"]["cases"], result["predicted"]["devices"]
    panels = right.subplots(len(cases) // len(LINKS), len(LINKS), sharex=True, sharey=True)
    styles = {"star": ":", "tree": "-.", "ring": "-", "PS": "--"}
    for axes, case in zip(panels.flat, cases):
        for way, efficiency in case["predicted_efficiency"].items():
            axes.plot(devices, [100 * e for e in efficiency], styles[way], color=COLORS[way], linewidth=2, label=way)
        axes.set_xscale("log", base=2)
        axes.set_xticks(devices[::3], [str(k) for k in devices[::3]])
        axes.set_ylim(0, 102)
        axes.grid(alpha=0.3)
        speed = "one core" if case["speed"] == 1 else f"{case['speed']} x one core"
        axes.set_title(f"predicted: {MODELS[case['model']]}, {speed}, {case['link']}", fontsize="small")
    for axes in panels[:, 0]:
        axes.set_ylabel("predicted efficiency, %")
    for axes in panels[-1]:
        axes.set_xlabel("devices")
    panels[0, 0].legend(title="allreduce", fontsize="small")
    figure.savefig(file, format="png", dpi=100)


def _scatter(axes: Axes, title: str, fits: dict[str, dict]) -> None:
    """Modelled against measured ms; filled where not fitted to, hollow where fitted to."""
    colors = ("#000000", "#e69f00", "#0072b2", "#009e73", "#cc79a7")
    for (name, found), color, marker in zip(fits.items(), colors, "osDv^"):
        for fitted in (True, False):
            some = [p for p in found["points"] if p["fitted"] is fitted]
            x, y = zip(*((p["measured_ms"], p["modelled_ms"]) for p in some))
            face = "none" if fitted else color
            axes.plot(x, y, marker, color=color, markerfacecolor=face, alpha=0.8, label=None if fitted else name)
    every = [p[key] for found in fits.values() for p in found["points"] for key in ("measured_ms", "modelled_ms")]
    ends = [0.7 * min(ms for ms in every if ms > 0), 1.4 * max(every)]
    axes.plot(ends, ends, color="gray", linewidth=1, zorder=0)
    axes.fill_between(ends, [e / 1.25 for e in ends], [1.25 * e for e in ends], color="gray", alpha=0.15, linewidth=0)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="measured, ms", ylabel="modelled, ms")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.set_title(
        f"{title}: filled, {CHECKED} contexts, not fitted to;\nhollow, fitted to; gray, within a quarter",
        fontsize="medium",
    )
    axes.legend(fontsize="small")
