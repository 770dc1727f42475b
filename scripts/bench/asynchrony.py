"""Measure when calls return and when their work is done. Multiplies matrices on one device at a time, then on all.

`async` and `copy` time the functions of gluon_mgpu.asynchrony in several rounds.
"""

from __future__ import annotations

from statistics import median
from typing import Any

from bench import harness
from bench.harness import Job
from gluon_mgpu.runtime import devices, engine, log

# (size, products): each device computes this number of products of matrices (size, size), in float32
ON_GPU = (4000, 50)  # as in the notebook
ON_CPU = (1000, 20)  # about half a second of work for one core

BASE = "one device, until all products are done"  # all rows are compared with this row
CALLS = "one device, until the calls return"
COPIES = "copies to the host, after all products"
ALL_DEVICES = ("all devices, one after another", "all devices at once")


def run(what: str, num_gpus: str, device: str = "auto", rounds: int = 5) -> dict:
    """Measure `what`: "async", or "copy", which uses only the first device. Returns the input of `table`.

    num_gpus, device: see `devices.contexts`. CPU contexts get one OpenMP thread each.
    """
    # each nd.dot takes one temporary space; with too few spaces, products wait for products of another device
    spaces = max(engine.TEMP_COPIES, len(devices.parse(num_gpus)) * ON_CPU[1])
    env = harness.environment({**harness.ONE_THREAD, "MXNET_CPU_TEMP_COPY": str(spaces)})
    job = Job("asynchrony", {"what": what, "gpus": num_gpus, "device": device}, env)
    rows = harness.measure({what: job}, rounds)[what]
    about = rows.pop("about")
    return {**about[0], "rows": rows}


def table(result: dict) -> str:
    """Format each row's seconds, GFLOP/s, and time relative to BASE."""
    size, products, contexts = result["size"], result["products"], result["devices"]
    base = result["rows"][BASE]
    cells = [["", "seconds", "GFLOP/s", "x products of one device"]]
    for name, seconds in result["rows"].items():
        count = products * (len(contexts) if name in ALL_DEVICES else 1)
        rate = f"{2 * size**3 * count / median(seconds) / 1e9:.1f}"
        ratio = median(a / b for a, b in zip(seconds, base))
        cells.append([name, harness.spread(seconds, 4), "" if name in (CALLS, COPIES) else rate, f"{ratio:.2f}"])
    title = f"{harness.plural(products, 'product')} of {size} x {size} float32 matrices per device"
    where = f"on {', '.join(contexts)}: {result['names']}"
    lines = [f"{title}, medians of {len(base)} rounds (min-max);", harness.machine_line(), where]
    return "\n".join([*lines, *log.table(cells)])


def work(what: str, gpus: str, device: str) -> dict[str, Any]:
    """Measure one round, after a warm-up round. Returns the seconds of each row, the devices and the sizes."""
    ctx = devices.contexts(gpus, device)[: 1 if what == "copy" else None]
    from gluon_mgpu import asynchrony

    on_gpu = ctx[0].device_type == "gpu"
    size, products = ON_GPU if on_gpu else ON_CPU
    x_devices = asynchrony.matrices(ctx, size)
    x = x_devices[0]

    def copy() -> dict[str, float]:
        multiplied, copied = asynchrony.run_then_copy(x, products)
        return {
            BASE: multiplied,
            COPIES: copied,
            "products, then copies": multiplied + copied,
            "products and copies, each as soon as possible": asynchrony.run_and_copy(x, products),
            "products and copies, waiting for each copy": asynchrony.run_and_copy(x, products, non_blocking=False),
        }

    def multiply() -> dict[str, float]:
        seconds = {
            CALLS: asynchrony.run_asynchronously(x, products),
            BASE: asynchrony.run_synchronously(x, products),
        }
        if len(ctx) > 1:
            in_turn, at_once = ALL_DEVICES
            seconds[in_turn] = asynchrony.run_one_after_another(x_devices, products)
            seconds[at_once] = asynchrony.run_at_once(x_devices, products)
        return seconds

    measure = copy if what == "copy" else multiply
    measure()  # warm up: the first call maps memory and loads the GPU libraries
    cpu = f"{harness.facts()['cpu']}, one OpenMP thread each"
    names = dict.fromkeys(devices.driver_gpus()[c.device_id][0] for c in ctx) if on_gpu else [cpu]
    about = {"devices": list(map(str, ctx)), "names": ", ".join(names), "size": size, "products": products}
    return {**measure(), "about": about}
