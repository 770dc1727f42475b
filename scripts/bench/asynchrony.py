"""Asynchronous execution: calls return before the work is done, devices work side by side, copies run beside products.

`async` and `copy` are the cells of the notebook "Multi-GPU training" on matrix products. A worker,
`python -m bench.asynchrony OPTIONS`, measures; its options, and a line for each round, are JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from tqdm import tqdm

from bench import machine, own_process
from gluon_mgpu.runtime import devices, engine
from gluon_mgpu.training.recipes import ASYNCHRONOUS, PYTORCH

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from mxnet import Context
    from mxnet.ndarray import NDArray

NOTEBOOK = (4000, 50)  # size and products; also what a GPU gets where nothing is asked
ON_CPU = (1000, 20)  # some half a second of work for one core
SECONDS = 900  # a worker that needs more in each round is taken to hang
RECORDED_ON = {"async": "4 GPUs of 2019", "copy": "a GPU of 2019"}


class Row(NamedTuple):
    """Something that is timed."""

    name: str
    recorded: float = 0  # seconds that the notebook printed, on one GPU or on four; 0: none
    all_devices: bool = True  # or only the first one
    rate: str = "GFLOP/s"  # what the seconds are a rate of: that, "GB/s" of copies, or neither


_DONE, _COPIES = ASYNCHRONOUS["one device, until they are done"], ASYNCHRONOUS["copies to the host, once all are done"]
# The first row that waits for its products is the one that all others are compared with.
ROWS = {
    "async": (
        Row("one device, until the calls return", ASYNCHRONOUS["one device, until the calls return"], False, ""),
        Row("one device, until they are done", _DONE, False),
        Row("all devices, one after another", ASYNCHRONOUS["four devices, one after another"]),
        Row("all devices at once", ASYNCHRONOUS["four devices at once"]),
    ),
    "copy": (
        Row("products, until they are done", _DONE),
        Row("copies to the host, once all are done", _COPIES, rate="GB/s"),
        Row("products, then copies", _DONE + _COPIES),
        Row("products and copies, each as soon as it can", ASYNCHRONOUS["products and copies, each as soon as it can"]),
        Row("products, then asnumpy of each"),
        Row("products, asnumpy of each as soon as it can"),
    ),
}


def run(
    what: str,
    gpus: int | str | Sequence[int],
    device: str = "auto",
    size: int | None = None,
    products: int | None = None,
    rounds: int = 5,
) -> dict:
    """Measure "async" or "copy" in a process of its own; returns what `table` and `draw` take, and JSON can hold.

    gpus, device: as of `devices.contexts`. size: matrices are (size, size), float32. products: how many on each device.
    Where size or products is None: the notebook's on GPUs, smaller ones on CPU contexts. rounds: how often all is
    measured, after one round that does not count. CPU contexts get one OpenMP thread each, also where there is one.
    Raises UsageError for devices that are not there, Error where the measuring fails.
    """
    options = {"what": what, "gpus": gpus, "device": device, "size": size, "products": products, "rounds": rounds}
    facts, *measured = _in_own_process(options)
    result = {"what": what, **facts, "rows": {}}
    for row, *seconds in zip(ROWS[what], *(each["seconds"] for each in measured)):
        result["rows"][row.name] = {"seconds": seconds, **_figures(result, row, seconds)}
    return result


def table(result: dict) -> str:
    """Lines for a terminal: the median seconds of each row, what that makes of each product, and how many times as long
    it takes as the products alone; with the notebook's matrices, the seconds recorded there and the same ratio."""
    base = _base(result)
    compared = "x one device" if not base.all_devices else "x products"
    recorded = _is_notebooks(result)
    lines = [
        f"{_title(result)}, medians of {len(result['rows'][base.name]['seconds'])} rounds; {machine.line()}",
        *_where(result),
        f"{'':44}seconds        (min-max)  ms each            rate  {compared:>12}"
        + f"  recorded  {compared:>12}" * recorded,
    ]
    of_base = result["rows"][base.name]["seconds"]
    for row in _rows(result):
        seconds = result["rows"][row.name]["seconds"]
        figures = _figures(result, row, seconds)
        rate = f"{figures[row.rate]:.1f} {row.rate}" if row.rate else ""
        line = (
            f"{row.name:44}{figures['median']:7.4f} {f'({min(seconds):.4f}-{max(seconds):.4f})':>16} "
            f"{figures['ms each']:8.3f} {rate:>15} {median(a / b for a, b in zip(seconds, of_base)):13.2f}"
        )
        if recorded and row.recorded:
            line += f" {row.recorded:9.3f} {row.recorded / base.recorded:13.2f}"
        lines.append(line)
    if recorded:
        lines.append(f"recorded: {PYTORCH}, {RECORDED_ON[result['what']]}")
    return "\n".join(lines)


def draw(result: dict, file: BinaryIO | str | Path) -> None:
    """The medians as horizontal bars, from the fastest round to the slowest a line; beside them, with the notebook's
    matrices, the recorded seconds. A PNG picture. file: binary and open, or a path."""
    from matplotlib.figure import Figure

    rows = _rows(result)
    recorded = [row.recorded if _is_notebooks(result) else 0 for row in rows]
    height = 0.4 if any(recorded) else 0.65
    figure = Figure(figsize=(9, 1.7 + 0.55 * len(rows)), layout="constrained")
    figure.suptitle("\n".join([_title(result), _where(result)[0]]), fontsize="medium")
    axes = figure.subplots()
    for i, (row, there) in enumerate(zip(rows, recorded)):
        seconds = result["rows"][row.name]["seconds"]
        middle = median(seconds)
        place, spread = i - height / 2 * bool(there), [[middle - min(seconds)], [max(seconds) - middle]]
        axes.barh(place, middle, height, xerr=spread, color="tab:blue", label="here" if i == 0 else None)
        _label(axes, middle, max(seconds), place)
        if there:
            name = f"recorded in the notebook, {RECORDED_ON[result['what']]}" if i == 0 else None
            axes.barh(i + height / 2, there, height, color="0.75", label=name)
            _label(axes, there, there, i + height / 2)
    if any(recorded):
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncol=2, frameon=False)
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set(xlabel="seconds", xlim=(0, None))
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    figure.savefig(file, format="png", dpi=120)


def _label(axes: Axes, seconds: float, x: float, y: float) -> None:
    axes.annotate(f"{seconds:#.3g}", (x, y), (5, 0), textcoords="offset points", va="center")


def multiply(x: NDArray, n: int) -> list[NDArray]:
    """The notebook's `run`: n products of a matrix with itself, all on the device of x."""
    from mxnet import nd

    return [nd.dot(x, x) for _ in range(n)]


def multiply_at_once(matrices: list[NDArray], n: int) -> list[NDArray]:
    """n products of each matrix: all are issued before any is waited for, so that devices work side by side."""
    return [product for x in matrices for product in multiply(x, n)]


def copies(arrays: list[NDArray], host: Context) -> list[NDArray]:
    """A copy of each array in the context host; none is waited for."""
    return [array.as_in_context(host) for array in arrays]


def timed(work: Callable[..., Any], *arguments: object) -> tuple[Any, float, float]:
    """What work(*arguments) returns, the seconds until its calls return, and the seconds until all they issued is done.

    The results are held until then, so that freeing them does not count.
    """
    from mxnet import nd

    nd.waitall()
    start = time.perf_counter()
    results = work(*arguments)
    returned = time.perf_counter() - start
    nd.waitall()
    return results, returned, time.perf_counter() - start


def multiply_and(read: Callable[[list[NDArray]], Any], matrices: list[NDArray], n: int) -> tuple[list[NDArray], Any]:
    """n products of each matrix, and what read makes of all of them before they are waited for."""
    products = multiply_at_once(matrices, n)
    return products, read(products)


def asnumpy(arrays: list[NDArray]) -> list[np.ndarray]:
    """Each array as NumPy's, copied by Python's own thread once the array is there."""
    return [array.asnumpy() for array in arrays]


def measure_async(matrices: list[NDArray], n: int, host: Context) -> tuple[float, ...]:
    """The seconds of each row of ROWS["async"], in that order; of the first two only, where there is one device."""
    returned, done = timed(multiply, matrices[0], n)[1:]
    if len(matrices) == 1:
        return returned, done
    one_after_another = sum(timed(multiply, x, n)[2] for x in matrices)
    return returned, done, one_after_another, timed(multiply_at_once, matrices, n)[2]


def measure_copy(matrices: list[NDArray], n: int, host: Context) -> tuple[float, ...]:
    """The seconds of each row of ROWS["copy"], in that order: n products a device, copied to the context host."""
    to_host = partial(copies, host=host)
    products, _, multiplied = timed(multiply_at_once, matrices, n)
    copied, read = timed(to_host, products)[2], timed(asnumpy, products)[2]
    del products
    copied_beside = timed(multiply_and, to_host, matrices, n)[2]
    read_beside = timed(multiply_and, asnumpy, matrices, n)[2]
    return multiplied, copied, multiplied + copied, copied_beside, multiplied + read, read_beside


def settings(gpus: int | str | Sequence[int], products: int | None = None) -> dict[str, str]:
    """The engine's settings of a worker, as CPU contexts need them.

    One OpenMP thread each. And a temporary space for each product that can be waiting: nd.dot takes one, and a product
    that has to share one with another device's waits for that device.
    """
    spaces = max(engine.TEMP_COPIES, len(devices.parse(gpus)) * (products or ON_CPU[1]))
    return {"OMP_NUM_THREADS": "1", "MXNET_CPU_TEMP_COPY": str(spaces)}


def _in_own_process(options: dict) -> list[Any]:
    """What the worker prints: the facts, once it is warm, then the seconds of each round."""
    found, what, given = [], options["what"], json.dumps(options)
    own = settings(options["gpus"], options["products"])
    advice, limit = "give a smaller --size or fewer --products", SECONDS * (1 + options["rounds"])
    bar = tqdm(total=1 + options["rounds"], unit="round", desc=what, leave=False, disable=not sys.stderr.isatty())
    with bar:
        for line in own_process.lines(what, "bench.asynchrony", given, settings=own, seconds=limit, advice=advice):
            found.append(line)
            bar.update()
    return found


def _worker(
    what: str, gpus: int | str | Sequence[int], device: str, size: int | None, products: int | None, rounds: int
) -> None:
    ctx = devices.contexts(gpus, device)
    import mxnet as mx

    on_gpu = ctx[0].device_type == "gpu"
    usual = NOTEBOOK if on_gpu else ON_CPU
    size, products = size or usual[0], products or usual[1]
    host = mx.cpu() if on_gpu else mx.cpu(1 + max(c.device_id for c in ctx))
    machine_facts = machine.facts()
    names = [devices._gpu(c.device_id)[0] if on_gpu else machine_facts["cpu"] for c in ctx]
    measure = {"async": measure_async, "copy": measure_copy}[what]
    mx.random.seed(0)
    matrices = [mx.nd.random.uniform(shape=(size, size), ctx=c) for c in ctx]
    measure(matrices, products, host)  # memory is mapped, and a GPU's libraries are loaded, the first time
    facts = {
        "machine": machine_facts,
        "gpus": mx.context.num_gpus() if on_gpu else 0,
        "devices": [str(c) for c in ctx],
        "names": names,
        "host": str(host),
        "size": size,
        "products": products,
    }
    print(json.dumps(facts), flush=True)
    for _ in range(rounds):
        print(json.dumps({"seconds": measure(matrices, products, host)}), flush=True)


def _figures(result: dict, row: Row, seconds: list[float]) -> dict[str, float]:
    """{"median": seconds, "ms each": a product or a copy, row.rate: in its unit} of a row's seconds."""
    each = median(seconds) / result["products"] / (len(result["devices"]) if row.all_devices else 1)
    figures = {"median": median(seconds), "ms each": 1e3 * each}
    amount = {"GFLOP/s": 2 * result["size"] ** 3, "GB/s": 4 * result["size"] ** 2}.get(row.rate)
    return {**figures, row.rate: amount / each / 1e9} if amount else figures


def _rows(result: dict) -> list[Row]:
    return [row for row in ROWS[result["what"]] if row.name in result["rows"]]


def _base(result: dict) -> Row:
    return next(row for row in ROWS[result["what"]] if row.rate == "GFLOP/s")


def _is_notebooks(result: dict) -> bool:
    return (result["size"], result["products"]) == NOTEBOOK


def _title(result: dict) -> str:
    n, size = result["products"], result["size"]
    copied = f", copied to {result['host']}" * (result["what"] == "copy")
    return f"{n} product{'s'[: n > 1]} of {size} x {size} float32 matrices on each device{copied}"


def _where(result: dict) -> list[str]:
    """Lines that say which devices computed and, of CPU contexts, what they can show."""
    contexts, names = ", ".join(result["devices"]), result["names"]
    if result["gpus"]:
        same = len(set(names)) == 1
        return [f"on {contexts}: {names[0] if same else ', '.join(names)}; GPUs that MXNet sees: {result['gpus']}"]
    cores = result["machine"]["cores"]
    at_once = min(cores, len(names))
    lines = [
        f"on {contexts}, one OpenMP thread each; {cores} core{'s'[: cores > 1]}: "
        f"{at_once} product{'s'[: at_once > 1]} at a time"
    ]
    if result["what"] == "copy":
        lines.append(
            "Host memory to host memory: a CPU context's copies are done by its own worker, after its products; "
            "asnumpy's by Python's thread."
        )
    return lines


if __name__ == "__main__":
    _worker(**json.loads(sys.argv[1]))
