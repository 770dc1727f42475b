"""Compare ways to sum the gradients of two CPU contexts. One worker measures all of WAYS in turn."""

from __future__ import annotations

import timeit
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from bench import harness
from bench.harness import TITLE, Job
from gluon_mgpu.support import log

if TYPE_CHECKING:
    from mxnet.ndarray import NDArray

WAYS = {
    "star": "as in the notebook: copy each array to the first context and add it there; copy the sum to all contexts",
    "tree": "as in the exercise: copy and add in pairs, then in pairs of pairs; copy the sum back in the reverse order",
    "direct add_n": "one sum on the first context, which reads all arrays; copy the sum back. Only for CPU contexts",
    "KVStore device": "pushpull, as in gluon.Trainer: a store on one context for each array",
}

Arrays = list[list["NDArray"]]  # for each parameter, one array per context


def ways(arrays: Arrays) -> dict[str, Callable[[], Any]]:
    """Create {way: function that sums all arrays in place}."""
    import mxnet as mx

    from gluon_mgpu import scratch
    from gluon_mgpu.exercises.solutions.tree import tree_allreduce

    store = mx.kv.create("device")
    for key, data in enumerate(arrays):
        store.init(key, data[0])

    def add_n(data: list[NDArray]) -> None:
        mx.nd.add_n(*data, out=data[0])
        for x in data[1:]:
            data[0].copyto(x)

    return {
        "star": lambda: list(map(scratch.allreduce, arrays)),
        "tree": lambda: list(map(tree_allreduce, arrays)),
        "direct add_n": lambda: list(map(add_n, arrays)),
        "KVStore device": lambda: [store.pushpull(key, data, priority=-key) for key, data in enumerate(arrays)],
    }


def run(rounds: int) -> dict:
    """Measure all of WAYS. Returns the input of `table`."""
    return {"rounds": rounds, "gradients": harness.start("allreduce", Job("allreduce", {"rounds": rounds}))}


def work(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Sum each model's gradients in each of WAYS. Returns {model: {way: ms by round}}."""
    from mxnet import nd

    measured = {}
    for model, title in TITLE.items():
        built = harness.build("highlevel", model, 2)
        arrays = [[nd.zeros(grad.shape, c) for c in built.ctx] for grad in built.grads().values()]  # sums stay finite
        measured[title] = _measure(ways(arrays), rounds)
    return measured


def _measure(functions: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Measure the time until every context holds all sums. Returns {way: ms by round}."""
    from mxnet import nd

    ms: dict[str, list[float]] = {way: [] for way in functions}
    for _ in range(1 + rounds):
        for way, sum_all in functions.items():
            timer = timeit.Timer("sum_all(), waitall()", globals={"sum_all": sum_all, "waitall": nd.waitall})
            number, seconds = timer.autorange()
            ms[way].append(1000 * seconds / number)
    return {way: by_round[1:] for way, by_round in ms.items()}  # the first sums allocate memory


def table(result: dict) -> str:
    """Format WAYS, and the milliseconds that each of them takes."""
    gradients = result["gradients"]
    rows = [[way, *(harness.spread(ms[way], 3) for ms in gradients.values())] for way in WAYS]
    lines = [
        "Time to sum gradients over 2 CPU contexts, array by array, from the first call until both contexts hold the",
        f"sums; medians of {result['rounds']} rounds (min-max); {harness.machine_line()}",
    ]
    return "\n".join([*lines, *log.table(WAYS.items(), "<"), "", *log.table([["ms", *gradients], *rows])])
