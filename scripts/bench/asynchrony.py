"""`async` and `copy`: gluon_mgpu.asynchrony measured in rounds, next to the seconds that its notebook prints.

A worker, `python -m bench.asynchrony OPTIONS`, measures one round in a process of its own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from bench import harness
from gluon_mgpu.runtime import devices, engine
from gluon_mgpu.training.recipes import ASYNCHRONOUS, PYTORCH

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from mxnet.ndarray import NDArray

NOTEBOOK = (4000, 50)  # size and products; also the defaults on GPUs
ON_CPU = (1000, 20)  # about half a second of work for one core
SECONDS = 900
RECORDED_ON = {"async": "4 GPUs of 2019", "copy": "a GPU of 2019"}


class Row(NamedTuple):
    """Something that is timed."""

    name: str
    recorded: float = 0  # seconds that the notebook printed; 0: none
    all_devices: bool = False  # whether all devices compute, or only the first one
    rate: str = "GFLOP/s"  # which rate the seconds stand for: that, "GB/s" of copies, or none


_DONE, _COPIED = ASYNCHRONOUS["one device, until they are done"], ASYNCHRONOUS["copies to the host, once all are done"]
# The first row that waits for its products is the one that the others are compared with.
ROWS = {
    "async": (
        Row("one device, until the calls return", ASYNCHRONOUS["one device, until the calls return"], rate=""),
        Row("one device, until they are done", _DONE),
        Row("all devices, one after another", ASYNCHRONOUS["four devices, one after another"], all_devices=True),
        Row("all devices at once", ASYNCHRONOUS["four devices at once"], all_devices=True),
    ),
    "copy": (
        Row("products, until they are done", _DONE),
        Row("copies to the host, once all are done", _COPIED, rate="GB/s"),
        Row("products, then copies", _DONE + _COPIED),
        Row("products and copies, each as soon as it can", ASYNCHRONOUS["products and copies, each as soon as it can"]),
        Row("products and copies, waiting for each copy"),
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
    """Measure "async" or "copy"; returns what `table` and `draw` show.

    gpus, device: as in `devices.contexts`. size: matrices are (size, size), float32. products: per device. If size or
    products is None: the notebook's on GPUs, fewer on CPU contexts. CPU contexts get one OpenMP thread each.
    Raises UsageError if the devices do not exist, Error if a measurement fails.
    """
    job = {"what": what, "gpus": gpus, "device": device, "size": size, "products": products}
    # nd.dot takes a temporary space per product; too few, and products wait for those of another device
    spaces = max(engine.TEMP_COPIES, len(devices.parse(gpus)) * (products or ON_CPU[1]))
    env = harness.environment({**harness.ONE_THREAD, "MXNET_CPU_TEMP_COPY": str(spaces)})
    advice = "choose a smaller --size or fewer --products"

    def measure(name: str) -> dict:
        return harness.worker(name, "asynchrony", job, env=env, seconds=SECONDS, advice=advice)

    measured = harness.in_turn([what], rounds, measure)[what]
    rows = zip(ROWS[what], *(found.pop("seconds") for found in measured))
    return {"what": what, **measured[0], "rows": {row.name: seconds for row, *seconds in rows}}


def table(result: dict) -> str:
    """Lines for a terminal: the seconds of each row, per product or copy, and relative to the products of one device;
    with the notebook's matrices also the seconds that it printed."""
    base = _base(result)
    compared = "x products" if result["what"] == "copy" else "x one device"
    recorded = _is_notebooks(result)
    head = ["", "seconds", "ms each", "rate", compared, *(["recorded", compared] if recorded else [])]
    cells = [head]
    for row in _rows(result):
        seconds = result["rows"][row.name]
        each = median(seconds) / result["products"] / (len(result["devices"]) if row.all_devices else 1)
        amount = {"GFLOP/s": 2 * result["size"] ** 3, "GB/s": 4 * result["size"] ** 2}.get(row.rate, 0)
        rate = f"{amount / each / 1e9:.1f} {row.rate}" if row.rate else ""
        ratio = median(a / b for a, b in zip(seconds, result["rows"][base.name]))
        cells.append([row.name, harness.spread(seconds, 4), f"{1000 * each:.3f}", rate, f"{ratio:.2f}"])
        if recorded and row.recorded:
            cells[-1] += [f"{row.recorded:.3f}", f"{row.recorded / base.recorded:.2f}"]
    rounds = len(result["rows"][base.name])
    lines = [f"{_title(result)}, medians of {rounds} rounds (min-max);", harness.machine_line(), _where(result)]
    lines += harness.table(cells)
    if recorded:
        lines.append(f"recorded: {PYTORCH}, {RECORDED_ON[result['what']]}")
    return "\n".join(lines)


def draw(result: dict, file: BinaryIO) -> None:
    """A bar per row, with a line from the fastest to the slowest round; with the notebook's matrices, also a bar of the
    seconds that it printed. PNG."""
    from matplotlib.figure import Figure

    rows = _rows(result)
    recorded = _is_notebooks(result)
    figure = Figure(figsize=(9, 1.7 + 0.6 * len(rows)), layout="constrained")
    figure.suptitle(f"{_title(result)}\n{_where(result)}", fontsize="medium")
    axes = figure.subplots()
    for i, row in enumerate(rows):
        beside = recorded and row.recorded
        _bar(axes, i - 0.2 * bool(beside), result["rows"][row.name], 0.4 if beside else 0.65, "tab:blue")
        if beside:
            _bar(axes, i + 0.2, [row.recorded], 0.4, "0.75")
    if recorded:
        here, there = axes.patches[:2]
        legend = ["here", f"in the notebook, {RECORDED_ON[result['what']]}"]
        figure.legend([here, there], legend, loc="outside lower center", ncols=2, frameon=False)
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set(xlabel="seconds", xlim=(0, None))
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    figure.savefig(file, format="png", dpi=120)


def _bar(axes: Axes, y: float, seconds: Sequence[float], height: float, color: str) -> None:
    middle = median(seconds)
    axes.barh(y, middle, height, color=color)
    axes.plot([min(seconds), max(seconds)], [y, y], color="black", linewidth=1.5)
    axes.annotate(f"{middle:#.3g}", (max(seconds), y), (5, 0), textcoords="offset points", va="center")


def _rows(result: dict) -> list[Row]:
    return [row for row in ROWS[result["what"]] if row.name in result["rows"]]


def _base(result: dict) -> Row:
    return next(row for row in ROWS[result["what"]] if row.rate == "GFLOP/s")


def _is_notebooks(result: dict) -> bool:
    return (result["size"], result["products"]) == NOTEBOOK


def _title(result: dict) -> str:
    products = harness.plural(result["products"], "product")
    copied = ", copied to host memory" if result["what"] == "copy" else ""
    return f"{products} of {result['size']} x {result['size']} float32 matrices per device{copied}"


def _where(result: dict) -> str:
    names = ", ".join(dict.fromkeys(result["names"]))
    on = f"on {', '.join(result['devices'])}: {names}"
    return on if result["gpus"] else f"{on}, one OpenMP thread each, {harness.plural(result['cores'], 'core')}"


def measure_async(x_devices: list[NDArray], products: int) -> list[float]:
    """The seconds of each row of ROWS["async"], in that order; with one device, only the first two."""
    from gluon_mgpu import asynchrony

    seconds = [
        asynchrony.run_asynchronously(x_devices[0], products),
        asynchrony.run_synchronously(x_devices[0], products),
    ]
    if len(x_devices) > 1:
        seconds.append(asynchrony.run_one_after_another(x_devices, products))
        seconds.append(asynchrony.run_at_once(x_devices, products))
    return seconds


def measure_copy(x_devices: list[NDArray], products: int) -> list[float]:
    """The seconds of each row of ROWS["copy"], in that order, on the first device."""
    from gluon_mgpu import asynchrony

    x = x_devices[0]
    multiplied, copied = asynchrony.run_then_copy(x, products)
    each = [asynchrony.run_and_copy(x, products, non_blocking) for non_blocking in (True, False)]
    return [multiplied, copied, multiplied + copied, *each]


def work(what: str, gpus: int | str | Sequence[int], device: str, size: int | None, products: int | None) -> Any:
    """One round, after one that warms up; returns its seconds, and where and what it computed."""
    ctx = devices.contexts(gpus, device)
    from gluon_mgpu import asynchrony

    on_gpu = ctx[0].device_type == "gpu"
    default_size, default_products = NOTEBOOK if on_gpu else ON_CPU
    size, products = size or default_size, products or default_products
    machine = harness.facts()
    measure = {"async": measure_async, "copy": measure_copy}[what]
    x_devices = asynchrony.matrices(ctx, size)
    measure(x_devices, products)  # the first time, memory is mapped and a GPU's libraries are loaded
    return {
        "gpus": len(ctx) if on_gpu else 0,
        "cores": machine["cores"],
        "devices": [str(c) for c in ctx],
        "names": [devices.gpu(c.device_id)[0] if on_gpu else machine["cpu"] for c in ctx],
        "size": size,
        "products": products,
        "seconds": measure(x_devices, products),
    }


if __name__ == "__main__":
    print(json.dumps(work(**json.loads(sys.argv[1]))))
