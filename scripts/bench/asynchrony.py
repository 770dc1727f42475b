"""`async` and `copy`: gluon_mgpu.asynchrony measured in rounds, next to the seconds that its notebook prints.

A worker, `python -m bench.asynchrony JOB`, measures one round.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from statistics import median
from typing import Any, BinaryIO, NamedTuple

from bench import harness
from gluon_mgpu.runtime import devices, engine
from gluon_mgpu.training.recipes import ASYNCHRONOUS, PYTORCH

NOTEBOOK = (4000, 50)  # size and products; also the defaults on GPUs
ON_CPU = (1000, 20)  # about half a second of work for one core


class Row(NamedTuple):
    """Something that is timed."""

    name: str
    recorded: float | None = None  # seconds that the notebook prints
    counts: str = "products"  # what the rate counts: products of one device, or of "all" devices, or "copies"


_CALLS, _DONE = (ASYNCHRONOUS[f"one device, until {what}"] for what in ("the calls return", "they are done"))
_COPIED = ASYNCHRONOUS["copies to the host, once all are done"]
ROWS = {
    "async": (
        Row("one device, until the calls return", _CALLS, ""),
        Row("one device, until they are done", _DONE),
        Row("all devices, one after another", ASYNCHRONOUS["four devices, one after another"], "all"),
        Row("all devices at once", ASYNCHRONOUS["four devices at once"], "all"),
    ),
    "copy": (
        Row("products, until they are done", _DONE),
        Row("copies to the host, once all are done", _COPIED, "copies"),
        Row("products, then copies", _DONE + _COPIED),
        Row("products and copies, each as soon as it can", ASYNCHRONOUS["products and copies, each as soon as it can"]),
        Row("products and copies, waiting for each copy"),
    ),
}
BASE = {"async": "one device, until they are done", "copy": "products, until they are done"}


def run(
    what: str,
    gpus: int | str | Sequence[int],
    device: str = "auto",
    size: int | None = None,
    products: int | None = None,
    rounds: int = 5,
) -> dict:
    """Measure "async", or "copy" on the first device; returns what `table` and `draw` show.

    gpus, device: as in `devices.contexts`. size: matrices are (size, size), float32. products: per device. If size or
    products is None: the notebook's on GPUs, fewer on CPU contexts. CPU contexts get one OpenMP thread each.
    """
    job = {"what": what, "gpus": gpus, "device": device, "size": size, "products": products}
    # nd.dot takes a temporary space per product; too few, and products wait for those of another device
    spaces = max(engine.TEMP_COPIES, len(devices.parse(gpus)) * (products or ON_CPU[1]))
    env = harness.environment({**harness.ONE_THREAD, "MXNET_CPU_TEMP_COPY": str(spaces)})

    def measure(name: str) -> dict:
        return harness.worker(name, "asynchrony", job, env=env, advice="use a smaller --size or fewer --products")

    measured = harness.in_turn([what], rounds, measure)[what]
    rows = zip(ROWS[what], *(found.pop("seconds") for found in measured))
    return {"what": what, **measured[0], "rows": {row.name: seconds for row, *seconds in rows}}


def table(result: dict) -> str:
    """Lines for a terminal: the seconds of each row, its rate, its ratio to the products of one device; and the seconds
    that the notebook prints, if the matrices are the notebook's."""
    n, count, rows = result["size"], result["products"], result["rows"]
    base = rows[BASE[result["what"]]]
    recorded = (n, count) == NOTEBOOK
    cells = [["", "seconds", "rate", f"x {'products' if result['what'] == 'copy' else 'one device'}"]]
    for row in ROWS[result["what"]]:
        if row.name in rows:
            seconds, rate = rows[row.name], ""
            if row.counts == "copies":
                rate = f"{4 * n**2 * count / median(seconds) / 1e9:.1f} GB/s"
            elif row.counts:
                done = count * (len(result["devices"]) if row.counts == "all" else 1)
                rate = f"{2 * n**3 * done / median(seconds) / 1e9:.1f} GFLOP/s"
            ratio = f"{median(harness.ratios(seconds, base)):.2f}"
            cells.append([row.name, harness.spread(seconds, 4), rate, ratio])
            if recorded and row.recorded:
                cells[-1].append(f"{row.recorded:.3f}")
    if recorded:
        cells[0].append("notebook's seconds")
    lines = [f"{_title(result)}, medians of {len(base)} rounds (min-max);", harness.machine_line(), _where(result)]
    lines += harness.table(cells)
    return "\n".join([*lines, f"notebook: {PYTORCH}, on 4 GPUs of 2019"] if recorded else lines)


def draw(result: dict, file: BinaryIO) -> None:
    """A bar per row. PNG."""
    harness.draw_bars(file, _title(result), "seconds", {_where(result): result["rows"]})


def _title(result: dict) -> str:
    products = harness.plural(result["products"], "product")
    copied = ", copied to host memory" if result["what"] == "copy" else ""
    return f"{products} of {result['size']} x {result['size']} float32 matrices per device{copied}"


def _where(result: dict) -> str:
    return f"on {', '.join(result['devices'])}: {', '.join(dict.fromkeys(result['names']))}"


def work(what: str, gpus: int | str | Sequence[int], device: str, size: int | None, products: int | None) -> Any:
    """One round, after one that warms up; returns the seconds of each row, and where and what was computed."""
    ctx = devices.contexts(gpus, device)[: 1 if what == "copy" else None]
    from gluon_mgpu import asynchrony

    on_gpu = ctx[0].device_type == "gpu"
    default_size, default_products = NOTEBOOK if on_gpu else ON_CPU
    size, products = size or default_size, products or default_products
    cpu = f"{harness.facts()['cpu']}, one OpenMP thread per context"
    x_devices = asynchrony.matrices(ctx, size)
    x = x_devices[0]

    def seconds() -> list[float]:
        if what == "copy":
            multiplied, copied = asynchrony.run_then_copy(x, products)
            both = [asynchrony.run_and_copy(x, products, non_blocking) for non_blocking in (True, False)]
            return [multiplied, copied, multiplied + copied, *both]
        found = [asynchrony.run_asynchronously(x, products), asynchrony.run_synchronously(x, products)]
        if len(ctx) > 1:
            found += [run(x_devices, products) for run in (asynchrony.run_one_after_another, asynchrony.run_at_once)]
        return found

    seconds()  # the first time, memory is mapped and a GPU's libraries are loaded
    return {
        "devices": [str(c) for c in ctx],
        "names": [devices.gpu(c.device_id)[0] if on_gpu else cpu for c in ctx],
        "size": size,
        "products": products,
        "seconds": seconds(),
    }


if __name__ == "__main__":
    print(json.dumps(work(**json.loads(sys.argv[1]))))
