"""`allreduce`: measures ways to sum arrays across CPU contexts, and computes the bytes that each way moves.

A worker measures all ways, in turn, for one number of contexts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import prod
from statistics import median
from typing import TYPE_CHECKING, Any

from bench import harness
from bench.harness import TITLE, Job
from gluon_mgpu.runtime import engine

if TYPE_CHECKING:
    from mxnet import Context
    from mxnet.ndarray import NDArray

CONTEXTS = (1, 2, 4, 8)
SECONDS = 0.02  # each way runs for at least this long in each round

# {way: (bytes it reads and writes on k contexts, what it does)}. (a, b) means a * k + b times the array's size. A copy
# moves 2 times the size, an addition 3 times, and a sum of k arrays k + 1 times.
WAYS = {
    "star": ((7, -7), "as in the notebook: copy each array to the first context and add it there; copy the sum back"),
    "tree": ((7, -7), "copy and add in pairs, then in pairs of pairs; copy the sum back in the reverse order"),
    "add_n": ((5, -3), "copy all arrays to the first context; compute one sum there; copy it back as in star"),
    "direct add_n": ((3, -1), "add_n without the copies before the sum; possible on CPU contexts only"),
    "KVStore local": ((5, 1), "pushpull: copy all arrays to the host's store; compute one sum there; copy it to all"),
    "KVStore device": ((5, 1), "the same, with each array's store on one of the contexts"),
}


def tree(data: list[NDArray]) -> None:
    """Sum arrays of the same shape, one per device, in place: add pairs in log2(k) rounds, then copy in reverse
    order."""
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
    """Sum arrays of the same shape, one per device, in place, with a single operator on the first device.

    copy: if False, the operator reads the arrays in place, which MXNet allows between CPU contexts.
    """
    import mxnet as mx

    if len(data) > 1:
        others = [x.copyto(data[0].context) if copy else x for x in data[1:]]
        mx.nd.add_n(data[0], *others, out=data[0])
        for x in data[1:]:
            data[0].copyto(x)


def pushpull(arrays: list[list[NDArray]], kind: str) -> Callable[[], None]:
    """Create a function that sums with a KVStore in the same way as gluon.Trainer."""
    import mxnet as mx

    store = mx.kv.create(kind)
    for key, data in enumerate(arrays):
        store.init(key, data[0])

    def sum_all() -> None:
        for key, data in enumerate(arrays):
            store.pushpull(key, data, priority=-key)

    return sum_all


def ways(arrays: list[list[NDArray]]) -> dict[str, Callable[[], None]]:
    """{way: a function that sums all arrays in place}. arrays: for each parameter, one array per device."""
    from gluon_mgpu import scratch

    def each(allreduce: Callable[..., None], **options: bool) -> Callable[[], None]:
        def sum_all() -> None:
            for data in arrays:
                allreduce(data, **options)

        return sum_all

    return {
        "star": each(scratch.allreduce),
        "tree": each(tree),
        "add_n": each(add_n),
        "direct add_n": each(add_n, copy=False),
        "KVStore local": pushpull(arrays, "local"),
        "KVStore device": pushpull(arrays, "device"),
    }


def moved(way: str, contexts: int) -> int:
    """The total bytes read and written on all contexts, as a multiple of the size of an array."""
    a, b = WAYS[way][0]
    return a * contexts + b if contexts > 1 else 0


def run(contexts: Sequence[int] = CONTEXTS, rounds: int = 5, models: Sequence[str] = tuple(TITLE)) -> dict:
    """Measure all ways, with a separate process per number of contexts. Returns the input of `table`.

    models: networks whose gradients are summed, array by array and as one flat array.
    """
    arguments = {"models": models, "rounds": rounds}
    jobs = {
        harness.plural(k, "context"): Job("allreduce", {"contexts": k, **arguments}, seconds=120 * rounds)
        for k in contexts
    }
    measured = zip(contexts, harness.measure(jobs, 1).values())
    return {"rounds": rounds, "workers": [{"contexts": k, "points": run["points"][0]} for k, run in measured]}


def work(contexts: int, models: list[str], rounds: int) -> dict[str, Any]:
    """Measure all ways with all models' gradients, on CPU contexts."""
    engine.configure(contexts)
    import mxnet as mx

    ctx = [mx.cpu(i) for i in range(contexts)]
    points = []
    for model in models:
        shapes = [gradient.shape for gradient in harness.replicas("highlevel", model, 1).gradients().values()]
        size = sum(map(prod, shapes))
        for name, some in ((TITLE[model], shapes), (f"{TITLE[model]}, flat", [(size,)])):
            about = {"name": name, "arrays": len(some), "bytes": 4 * size}
            points.append({**about, "ms": _measure(some, ctx, rounds)})
    return {"points": points}


def _measure(shapes: list[tuple[int, ...]], ctx: list[Context], rounds: int) -> dict[str, list[float]]:
    """Measure {way: ms of each round}, from the first call until every context holds the sums."""
    from mxnet import nd

    arrays = [[nd.zeros(shape, c) for c in ctx] for shape in shapes]  # zeros, so that sums stay finite
    functions = ways(arrays)
    for sum_all in functions.values():  # warm up: the first sums allocate memory
        sum_all()
    nd.waitall()
    ms: dict[str, list[float]] = {way: [] for way in functions}
    for _ in range(rounds):
        for way, sum_all in functions.items():
            times, start, seconds = 0, time.perf_counter(), 0.0
            while seconds < SECONDS:
                sum_all()
                nd.waitall()
                times, seconds = times + 1, time.perf_counter() - start
            ms[way].append(1000 * seconds / times)
    return ms


def table(result: dict) -> str:
    """Format the ways and, for each number of contexts, milliseconds and GB/s moved."""
    lines = [
        "Time to sum gradients over CPU contexts, array by array and as one flat array, from the first call until",
        f"every context holds the sums; medians of {result['rounds']} rounds (min-max); {harness.machine_line()}",
        "Bytes read and written on k contexts, as multiples of the array's size:",
        *(f"  {way:16}{a}k{b:+d}  {about}" for way, ((a, b), about) in WAYS.items()),
    ]
    for worker in result["workers"]:
        k, points = worker["contexts"], worker["points"]
        lines += ["", harness.plural(k, "context").upper()]
        rows = [[way, *(harness.spread(p["ms"][way]) for p in points)] for way in WAYS]
        lines += harness.table([["ms", *(p["name"] for p in points)], *rows])
        rows = [[way, *(_gb_s(way, k, p) for p in points)] for way in WAYS]
        lines += harness.table([["GB/s moved", *(p["name"] for p in points)], *rows])
    return "\n".join(lines)


def _gb_s(way: str, contexts: int, point: dict) -> str:
    return harness.three_digits(moved(way, contexts) * point["bytes"] / median(point["ms"][way]) / 1e6)
