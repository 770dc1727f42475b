"""Summing arrays over CPU contexts until each holds the sum: the ways to do it, and the bytes each has to move.

A worker, `python -m bench.allreduce CONTEXTS SIZES MODELS ROUNDS`, measures all ways on so many contexts in
turn; SIZES and MODELS are JSON, and so is each line that it prints.
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import prod
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
from tqdm import tqdm

from bench import machine, own_process
from gluon_mgpu.runtime import engine
from gluon_mgpu.runtime.errors import Error
from gluon_mgpu.training.settings import Settings, shard_sizes

if TYPE_CHECKING:
    from mxnet import Context
    from mxnet.ndarray import NDArray

SIZES = (4 << 10, 64 << 10, 1 << 20, 8 << 20, 64 << 20)  # bytes of an array of float32
MODELS = {"lenet": "LeNet", "resnet18": "ResNet-18"}
CONTEXTS = (1, 2, 4, 8)
SECONDS = 0.02  # for so long, and at least once, a way sums in each round
COPY = 128 << 20  # bytes of the plain copy: more than a cache holds
ROUND_SECONDS = 120  # a worker that needs more in each round is taken to hang

# What each way does, and the bytes it reads and writes on k contexts: (a, b) is a * k + b times those of the array,
# where a copy is 2, an addition 3 and a sum of k arrays k + 1. On one context there is nothing to sum.
WAYS = {
    "star": ((7, -7), "the notebook's: each is copied to the first context and added there; the sum is copied back"),
    "tree": ((7, -7), "copied and added in pairs, then pairs of pairs; back the same way"),
    "add_n": ((5, -3), "all are copied to the first, one sum there; back as in the star"),
    "turns": ((5, -3), "add_n, the i-th array of several on context i % k"),
    "slices": ((5, -1), "each context sums a slice, copied from all, and copies it to all"),
    "direct add_n": ((3, -1), "add_n without copies before the sum: CPU contexts share memory, GPUs do not"),
    "direct slices": ((3, 1), "slices without copies before the sums"),
    "KVStore local": ((5, 1), "pushpull: all are copied to the host's store, one sum there, copied back to all"),
    "KVStore device": ((5, 1), "the same, the store of each array on one of the contexts"),
}
ON_CPU_ONLY = "direct"  # so these names begin


def tree(data: list[NDArray]) -> None:
    """Sum arrays of one shape, one a device, in place: in log2(k) rounds of pairs, whose sums are then passed back."""
    distance = 1
    while distance < len(data):
        for i in range(0, len(data) - distance, 2 * distance):
            data[i] += data[i + distance].copyto(data[i].context)
        distance *= 2
    while distance > 1:
        distance //= 2
        for i in range(0, len(data) - distance, 2 * distance):
            data[i].copyto(data[i + distance])


def add_n(data: list[NDArray], copy: bool = True) -> None:
    """Sum arrays of one shape, one a device, in place: one sum on the first device.

    copy: False sums the arrays where they lie. MXNet lets an operator of one CPU context read another's array.
    """
    import mxnet as mx

    if len(data) > 1:
        others = [x.copyto(data[0].context) if copy else x for x in data[1:]]
        mx.nd.add_n(data[0], *others, out=data[0])
        for x in data[1:]:
            data[0].copyto(x)


def slices(data: list[NDArray], copy: bool = True) -> None:
    """Sum arrays of one shape, one a device, in place: each device sums a slice (reduce-scatter) and hands it to all
    (all-gather).

    copy: as of `add_n`.
    """
    import mxnet as mx

    k = len(data)
    if k == 1:
        return
    flat = [x.reshape(-1) for x in data]  # the same memory
    start, parts, sums = 0, [], []
    for i, size in enumerate(shard_sizes(flat[0].size, k)):
        if not size:  # fewer elements than devices
            break
        parts.append([x[start : start + size] for x in flat])
        start += size
        own_first = parts[i][i:] + parts[i][:i]  # MXNet computes on the context of the first
        here = [x.as_in_context(data[i].context) for x in own_first] if copy else own_first
        sums.append(mx.nd.add_n(*here))
    # The engine knows whole arrays only. So the sums are arrays of their own: written into data, each would wait until
    # nothing is read there any more. And in this order k devices write into k arrays at once.
    for turn in range(k):
        for i, total in enumerate(sums):
            total.copyto(parts[i][(i + turn) % k])


def ways(arrays: list[list[NDArray]]) -> dict[str, Callable[[], None]]:
    """{way: a function that sums every list of arrays, one a device, in place}. arrays: a list a parameter."""
    from gluon_mgpu import scratch

    def each(allreduce: Callable[[list[NDArray]], None]) -> None:
        for data in arrays:
            allreduce(data)

    def turns() -> None:
        for i, data in enumerate(arrays):
            first = i % len(data)
            add_n(data[first:] + data[:first])

    found: dict[str, Callable[[], None]] = {
        "star": partial(each, scratch.allreduce),
        "tree": partial(each, tree),
        "add_n": partial(each, add_n),
        "turns": turns,
        "slices": partial(each, slices),
        "direct add_n": partial(each, partial(add_n, copy=False)),
        "direct slices": partial(each, partial(slices, copy=False)),
        "KVStore local": _pushpull("local", arrays),
        "KVStore device": _pushpull("device", arrays),
    }
    if len(arrays) == 1:
        del found["turns"]  # it is add_n
    return found


def _pushpull(kind: str, arrays: list[list[NDArray]]) -> Callable[[], None]:
    """The sums by a KVStore, as gluon.Trainer asks for them."""
    import mxnet as mx

    store = mx.kv.create(kind)
    for key, data in enumerate(arrays):
        store.init(key, data[0])

    def pushpull() -> None:
        for key, data in enumerate(arrays):
            store.pushpull(key, data, priority=-key)

    return pushpull


def moved(way: str, contexts: int) -> int:
    """How many times the array's own bytes a way reads and writes, all contexts together."""
    a, b = WAYS[way][0]
    return a * contexts + b if contexts > 1 else 0


def run(
    contexts: Sequence[int] = CONTEXTS,
    rounds: int = 5,
    sizes: Sequence[int] = SIZES,
    models: Sequence[str] = tuple(MODELS),
) -> dict:
    """Measure all ways, each number of contexts in a process of its own: a dict that `table` and `draw` take.

    sizes: bytes of single arrays. models: networks whose gradients are measured as the list of arrays they are, and as
    one flat array. Raises Error where a worker fails or does not end.
    """
    workers = []
    points = len(sizes) + 2 * len(models)
    with tqdm(total=len(contexts) * points, unit="point", leave=False, disable=not sys.stderr.isatty()) as bar:
        for k in contexts:
            bar.set_description(_contexts(k))
            given = k, json.dumps(sizes), json.dumps(models), rounds
            said, limit = [], ROUND_SECONDS * rounds
            name, advice = f"allreduce on {_contexts(k)}", "give fewer contexts"
            for line in own_process.lines(name, "bench.allreduce", *given, seconds=limit, advice=advice):
                said.append(line)
                bar.update(len(said) > 2)  # the first two lines are no points
            settings, copy, *measured = said
            workers.append({"contexts": k, "settings": settings, "copy_gb_s": copy, "points": measured})
    return {"rounds": rounds, "workers": workers}


def _worker(contexts: int, sizes: list[int], models: list[str], rounds: int) -> None:
    engine.configure(contexts)
    import mxnet as mx

    ctx = [mx.cpu(i) for i in range(contexts)]
    engine.check(ctx)
    _say(machine.facts()["settings"])
    _say(_copy_rates(rounds))
    points: list[tuple[str, str | None, list[tuple[int, ...]]]] = [
        (_size(size), None, [(size // 4,)]) for size in sizes
    ]
    for model in models:
        name, shapes = MODELS[model], gradient_shapes(model)
        points += [(name, model, shapes), (f"{name}, flat", model, [(sum(map(prod, shapes)),)])]
    for name, of, shapes in points:
        elements, ms = sum(map(prod, shapes)), _measure(shapes, ctx, rounds)
        _say({"name": name, "model": of, "arrays": len(shapes), "bytes": 4 * elements, "ms": ms})


def gradient_shapes(model: str) -> list[tuple[int, ...]]:
    """The shapes of a network's gradients, in the order in which Gluon's Trainer has them."""
    import mxnet as mx

    from gluon_mgpu import highlevel

    return [p.shape for p in highlevel.Replicas([mx.cpu()], Settings(model=model)).trained.values()]


def _measure(shapes: list[tuple[int, ...]], ctx: list[Context], rounds: int) -> dict[str, list[float]]:
    """{way: [ms of each round]}: from the first call until every context holds the sums."""
    from mxnet import nd

    arrays = [[nd.zeros(shape, c) for c in ctx] for shape in shapes]
    functions = ways(arrays)
    for way, allreduce in functions.items():
        check(way, allreduce, arrays)
    nd.waitall()
    ms: dict[str, list[float]] = {way: [] for way in functions}
    for _ in range(rounds):
        for way, allreduce in functions.items():
            times, start, spent = 0, time.perf_counter(), 0.0
            while spent < SECONDS:
                allreduce()
                nd.waitall()
                times, spent = times + 1, time.perf_counter() - start
            ms[way].append(1000 * spent / times)
    return ms


def check(way: str, allreduce: Callable[[], None], arrays: list[list[NDArray]]) -> None:
    """Raise Error where a way does not sum. Leaves zeros, which stay finite however often they are summed."""
    for data in arrays:
        for i, x in enumerate(data):
            x[:] = i + 1
    allreduce()
    for data in arrays:
        for x in data:
            if (x.asnumpy() != sum(range(len(data) + 1))).any():
                raise Error(f"{way}: {x.context} does not hold the sum over {_contexts(len(data))}")
            x[:] = 0


def _copy_rates(rounds: int) -> dict[int, list[float]]:
    """{threads: [GB/s of each round]}, read and written, of a NumPy copy by one thread and by one a core."""
    source, target = np.ones(COPY // 4, np.float32), np.zeros(COPY // 4, np.float32)
    cores = len(os.sched_getaffinity(0))
    rates: dict[int, list[float]] = {threads: [] for threads in sorted({1, cores})}
    with ThreadPoolExecutor(cores) as pool:
        for _ in range(rounds + 1):
            for threads, found in rates.items():
                pieces = [np.array_split(x, threads) for x in (target, source)]
                start = time.perf_counter()
                list(pool.map(np.copyto, *pieces))
                found.append(2 * COPY / (time.perf_counter() - start) / 1e9)
    return {threads: found[1:] for threads, found in rates.items()}  # in the first round, threads start


def table(result: dict) -> str:
    """Lines for a terminal: the ways; then for each number of contexts ms, GB/s and the best way for each network."""
    lines = [
        "Arrays of float32 summed over CPU contexts, from the first call until every context holds the sums;",
        f"medians of {result['rounds']} rounds (min-max); {machine.line()}",
        "a network: its gradients, array by array, and flat: all in one array;",
        "bytes read and written on k contexts, in those of the array:",
    ]
    for way, ((a, b), about) in WAYS.items():
        lines.append(f"  {way:15}{f'{a}k{b:+d}':6}{about}")
    for worker in result["workers"]:
        lines += ["", *_worker_table(worker)]
    return "\n".join(lines)


def _worker_table(worker: dict) -> list[str]:
    k, points = worker["contexts"], worker["points"]
    copy = "; ".join(
        f"{threads} thread{'s'[: threads != '1']} {median(rates):.1f} GB/s ({min(rates):.1f}-{max(rates):.1f})"
        for threads, rates in worker["copy_gb_s"].items()
    )
    lines = [f"{_contexts(k).upper()}. A NumPy copy of {_size(COPY)}, read and written: {copy}"]
    if k == 1:
        most, way, name = max((median(ms), way, point["name"]) for point in points for way, ms in point["ms"].items())
        return [*lines, f"nothing to sum: the calls alone take at most {_digits(most)} ms ({way}, {name})"]
    for some in ([p for p in points if not p["model"]], [p for p in points if p["model"]]):
        if some:
            lines.append(f"{'ms':15}" + "".join(f"{p['name']:>21}" for p in some))
            lines += _rows(some, 21, lambda way, point: _spread(point["ms"][way]))

    def rates(way: str, point: dict) -> str:
        rate = point["bytes"] / median(point["ms"][way]) / 1e6
        return f"{_digits(rate, 2)}/{_digits(moved(way, k) * rate, 2)}"

    lines.append("GB/s: bytes of the array / all bytes read and written")
    lines.append(f"{'':15}" + "".join(f"{p['name'].split(', ')[-1]:>11}" for p in points))
    return [*lines, *_rows(points, 11, rates), *_best_lines(points)]


def _rows(points: list[dict], width: int, cell: Callable[[str, dict], str]) -> list[str]:
    """A line a way; where it was not measured, nothing."""
    lines = []
    for way in WAYS:
        cells = [cell(way, point) if way in point["ms"] else "" for point in points]
        if any(cells):
            lines.append(f"{way:15}{''.join(f'{text:>{width}}' for text in cells)}".rstrip())
    return lines


def _best_lines(points: list[dict]) -> list[str]:
    """For each network the fastest way that GPUs have too, array by array or flat; which others have a median within
    its spread; which are faster on CPU contexts only."""
    lines = []
    for model in dict.fromkeys(p["model"] for p in points if p["model"]):
        times = {
            f"{way}{', flat' * (p['arrays'] == 1)}": ms
            for p in points
            if p["model"] == model
            for way, ms in p["ms"].items()
        }
        alone = {name: ms for name, ms in times.items() if name.startswith(ON_CPU_ONLY)}
        best, *others = sorted((name for name in times if name not in alone), key=lambda name: median(times[name]))
        ratio = median(star / ms for star, ms in zip(times["star"], times[best]))
        line = f"best for {MODELS[model]}: {best}, {_spread(times[best])} ms, {ratio:.2f} times as fast as the star"
        as_fast = [name for name in others if median(times[name]) <= max(times[best])]
        faster = [f"{name} {_spread(ms)}" for name, ms in alone.items() if median(ms) < median(times[best])]
        line += f"; within its spread: {'; '.join(as_fast)}" * bool(as_fast)
        line += f"; faster, on CPU contexts only: {'; '.join(faster)}" * bool(faster)
        lines += textwrap.wrap(line, 120, subsequent_indent="  ")
    return lines


def draw(result: dict, file: BinaryIO | str | Path) -> None:
    """Above, how many times as fast as the star each way is by size; below, the time of the networks' gradients; a
    column a number of contexts. PNG; file: binary and open, or a path."""
    from matplotlib.figure import Figure

    workers = [w for w in result["workers"] if w["contexts"] > 1] or result["workers"]
    figure = Figure(figsize=(4 * len(workers), 8.4))
    figure.suptitle(
        f"Arrays summed over CPU contexts, medians of {result['rounds']} rounds (lines: min to max)", y=0.95
    )
    above, below = figure.subplots(2, len(workers), sharey="row", squeeze=False)
    colors = ("black", *(f"C{i}" for i in range(len(WAYS) - 1)))
    for worker, by_size, networks in zip(workers, above, below):
        single = [p for p in worker["points"] if not p["model"]]
        by_size.set_title(_contexts(worker["contexts"]))
        by_size.set_xscale("log")
        by_size.set_yscale("log", base=2)
        by_size.set_xticks([p["bytes"] for p in single], [p["name"] for p in single], fontsize="small")
        by_size.yaxis.set_major_formatter("{x:g}")
        for way, color, marker in zip(WAYS, colors, "osv^DPXd*"):
            measured = [p for p in single if way in p["ms"]]
            faster = [median(star / ms for star, ms in zip(p["ms"]["star"], p["ms"][way])) for p in measured]
            line = "--" if way.startswith("KVStore") else ":" if way.startswith(ON_CPU_ONLY) else "-"
            if measured:
                by_size.plot([p["bytes"] for p in measured], faster, line, color=color, marker=marker, label=way)
        networks.set_xscale("log")
        networks.xaxis.set_major_formatter("{x:g}")
        networks.set_xlabel("ms")
        for point in (p for p in worker["points"] if p["model"]):
            flat, color = point["arrays"] == 1, "tab:blue" if point["model"] == "lenet" else "tab:orange"
            rows = [list(WAYS).index(way) + (0.15 if flat else -0.15) for way in point["ms"]]
            networks.hlines(rows, *zip(*((min(ms), max(ms)) for ms in point["ms"].values())), color=color)
            middle = [median(ms) for ms in point["ms"].values()]
            label = point["name"] if flat else f"{point['name']}, array by array"
            networks.plot(middle, rows, "o", color=color, markerfacecolor=color if flat else "white", label=label)
        for axes in (by_size, networks):
            axes.minorticks_off()
            axes.grid(alpha=0.3)
    above[0].set_ylabel("times as fast as the star")
    below[0].set(yticks=range(len(WAYS)), yticklabels=WAYS, ylim=(len(WAYS) - 0.5, -0.5))
    for row in (above, below):
        row[-1].legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    figure.savefig(file, format="png", dpi=100, bbox_inches="tight")


def _contexts(k: int) -> str:
    return f"{k} context{'s'[: k > 1]}"


def _size(size: int) -> str:
    for unit in ("B", "KiB"):
        if size < 1024 or size % 1024:
            return f"{size} {unit}"
        size //= 1024
    return f"{size} MiB"


def _spread(ms: list[float]) -> str:
    return f"{_digits(median(ms))} ({_digits(min(ms))}-{_digits(max(ms))})"


def _digits(value: float, most: int = 3) -> str:
    """Three digits, and at most so many after the point: 1234, 123, 12.3, 1.23, 0.123, 0.012."""
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else most}f}"


def _say(fact: object) -> None:
    print(json.dumps(fact), flush=True)


if __name__ == "__main__":
    _worker(int(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3]), int(sys.argv[4]))
