"""Compare ways to sum gradients across CPU contexts.

For each number of contexts, one worker measures all of WAYS in turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING

from bench import harness
from bench.harness import TITLE, Job
from gluon_mgpu.runtime import engine, log

if TYPE_CHECKING:
    from mxnet import Context
    from mxnet.ndarray import NDArray

SECONDS = 0.02  # in each round, each of WAYS runs for at least this long

WAYS = {
    "star": "as in the notebook: copy each array to the first context and add it there; copy the sum to all contexts",
    "tree": "copy and add in pairs, then in pairs of pairs; copy the sum back in the reverse order",
    "add_n": "copy all arrays to the first context; compute one sum there; copy the sum back as in star",
    "direct add_n": "add_n without the copies before the sum; possible on CPU contexts only",
    "KVStore local": "pushpull: copy all arrays to the host's store; compute one sum there; copy it to all contexts",
    "KVStore device": "as KVStore local, but with each array's store on one of the contexts",
}


def tree(data: list[NDArray]) -> None:
    """Sum arrays of the same shape, one per device, in place: add pairs in log2(k) rounds (rounded up) for k devices,
    then copy the sum back in reverse order."""
    pairs = list(zip(data[::2], data[1::2]))
    for a, b in pairs:
        a += b.copyto(a.context)
    if pairs:
        tree(data[::2])
    for a, b in pairs:
        a.copyto(b)


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


def each(allreduce: Callable[[list[NDArray]], None], arrays: list[list[NDArray]]) -> None:
    """Sum the arrays, one parameter at a time."""
    for data in arrays:
        allreduce(data)


def ways(arrays: list[list[NDArray]]) -> dict[str, Callable[[], None]]:
    """Create {way: function that sums all arrays in place}. arrays: for each parameter, one array per device."""
    from gluon_mgpu import scratch

    return {
        "star": partial(each, scratch.allreduce, arrays),
        "tree": partial(each, tree, arrays),
        "add_n": partial(each, add_n, arrays),
        "direct add_n": partial(each, partial(add_n, copy=False), arrays),
        "KVStore local": pushpull(arrays, "local"),
        "KVStore device": pushpull(arrays, "device"),
    }


def run(contexts: Sequence[int] = (1, 2, 4, 8), rounds: int = 5) -> dict:
    """Measure all of WAYS, with a separate process for each number of contexts. Returns the input of `table`."""
    workers = {}
    for k in contexts:
        job = Job("allreduce", {"contexts": k, "rounds": rounds}, seconds=120 * rounds)
        name = harness.plural(k, "context")
        workers[name] = harness.start(name, job)
    return {"rounds": rounds, "workers": workers}


def work(contexts: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Sum each model's gradients in each of WAYS on CPU contexts, array by array and as one flat array. Returns
    {gradients: {way: ms by round}}."""
    engine.configure(contexts)
    import mxnet as mx

    ctx = [mx.cpu(i) for i in range(contexts)]
    found = {}
    for model, title in TITLE.items():
        shapes = [gradient.shape for gradient in harness.replicas("highlevel", model, 1).grads()[0].values()]
        found[title] = _measure(shapes, ctx, rounds)
        found[f"{title}, flat"] = _measure([(sum(map(prod, shapes)),)], ctx, rounds)
    return found


def _measure(shapes: list[tuple[int, ...]], ctx: list[Context], rounds: int) -> dict[str, list[float]]:
    """Measure the time until every context holds all sums. Returns {way: ms by round}."""
    from mxnet import nd

    functions = ways([[nd.zeros(shape, c) for c in ctx] for shape in shapes])  # zeros, so that sums stay finite
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
    """Format WAYS and, for each number of contexts, the milliseconds that each of them takes."""
    lines = [
        "Time to sum gradients over CPU contexts, array by array and as one flat array, from the first call until",
        f"every context holds the sums; medians of {result['rounds']} rounds (min-max); {harness.machine_line()}",
        *log.table(WAYS.items(), "<"),
    ]
    for name, gradients in result["workers"].items():
        rows = [[way, *(harness.spread(ms[way]) for ms in gradients.values())] for way in WAYS]
        lines += ["", *log.table([[f"{name}, ms", *gradients], *rows])]
    return "\n".join(lines)
