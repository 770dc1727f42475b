"""`async` and `copy`: times the functions of gluon_mgpu.asynchrony in rounds."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from bench import harness
from bench.harness import Job
from gluon_mgpu.runtime import devices, engine

# Defaults: (size, products)
ON_GPU = (4000, 50)  # as in the notebook
ON_CPU = (1000, 20)  # about half a second of work for one core

BASE = "one device, until they are done"  # all rows are compared with this row
ROWS = {  # {what is timed: the operations that its rate counts}
    "async": {
        "one device, until the calls return": "",
        BASE: "products",
        "all devices, one after another": "all products",
        "all devices at once": "all products",
    },
    "copy": {
        BASE: "products",
        "copies to the host, once all are done": "copies",
        "products, then copies": "",
        "products and copies, each as soon as possible": "",
        "products and copies, waiting for each copy": "",
    },
}


def run(
    what: str,
    gpus: int | str | Sequence[int],
    device: str = "auto",
    size: int | None = None,
    products: int | None = None,
    rounds: int = 5,
) -> dict:
    """Measure "async", or "copy" on the first device. Returns the input of `table`.

    gpus, device: see `devices.contexts`. size: matrices are (size, size), float32. products: number per device. None:
    the notebook's values on GPUs, smaller values on CPU contexts. CPU contexts get one OpenMP thread each.
    """
    arguments = {"what": what, "gpus": gpus, "device": device, "size": size, "products": products}
    # each nd.dot takes one temporary space; with too few spaces, products wait for products of another device
    spaces = max(engine.TEMP_COPIES, len(devices.parse(gpus)) * (products or ON_CPU[1]))
    env = harness.environment({**harness.ONE_THREAD, "MXNET_CPU_TEMP_COPY": str(spaces)})
    job = Job("asynchrony", arguments, env, advice="use a smaller --size or fewer --products")
    measured = harness.measure({what: job}, rounds)[what]
    rows = dict(zip(ROWS[what], zip(*measured.pop("seconds"))))
    return {"what": what, **{name: values[0] for name, values in measured.items()}, "rows": rows}


def table(result: dict) -> str:
    """Format each row's seconds, rate, and time relative to BASE."""
    n, count = result["size"], result["products"]
    base = result["rows"][BASE]
    cells = [["", "seconds", "rate", "x products of one device"]]
    for name, seconds in result["rows"].items():
        counts = ROWS[result["what"]][name]
        amount = count * (len(result["devices"]) if counts == "all products" else 1) / median(seconds) / 1e9
        rate = f"{4 * n**2 * amount:.1f} GB/s" if counts == "copies" else f"{2 * n**3 * amount:.1f} GFLOP/s"
        ratio = median(a / b for a, b in zip(seconds, base))
        cells.append([name, harness.spread(seconds, 4), rate if counts else "", f"{ratio:.2f}"])
    lines = [f"{_title(result)}, medians of {len(base)} rounds (min-max);", harness.machine_line(), _where(result)]
    return "\n".join([*lines, *harness.table(cells)])


def _title(result: dict) -> str:
    products = harness.plural(result["products"], "product")
    copied = ", copied to host memory" if result["what"] == "copy" else ""
    return f"{products} of {result['size']} x {result['size']} float32 matrices per device{copied}"


def _where(result: dict) -> str:
    return f"on {', '.join(result['devices'])}: {', '.join(dict.fromkeys(result['names']))}"


def work(what: str, gpus: int | str | Sequence[int], device: str, size: int | None, products: int | None) -> Any:
    """Measure one round, after a warm-up round. Returns the seconds of each row, the devices and the sizes."""
    ctx = devices.contexts(gpus, device)[: 1 if what == "copy" else None]
    from gluon_mgpu import asynchrony

    on_gpu = ctx[0].device_type == "gpu"
    default_size, default_products = ON_GPU if on_gpu else ON_CPU
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

    seconds()  # warm up: the first call maps memory and loads a GPU's libraries
    return {
        "devices": [str(c) for c in ctx],
        "names": [devices.gpu(c.device_id)[0] if on_gpu else cpu for c in ctx],
        "size": size,
        "products": products,
        "seconds": seconds(),
    }
