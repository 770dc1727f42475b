"""Measure steps on one GPU with MXNet and with PyTorch: when a call returns, when it is done, and memory; then copies.

All in float32 without TF32. docs/second-device.md and docs/asynchrony.md show results.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

from bench import harness
from bench.harness import LR, TITLE, Job
from gluon_mgpu.compat import cuda, devices, startup
from gluon_mgpu.support import log, subprocesses
from gluon_mgpu.support.errors import Error

ENGINES = {"mxnet": "MXNet, highlevel", "torch": "PyTorch"}
WARM_UP = 5  # cuDNN tries its algorithms
PRODUCTS = 20
SIZE = {"gpu": 4000, "cpu": 400}  # of the matrices
MIB = {"gpu": 256, "cpu": 16}  # of a copied array
Call = Callable[[], Any]


class MXNet:
    def __init__(self, device: str) -> None:
        startup.configure(1)
        import mxnet as mx

        self.mx, self.ctx, self.wait = mx, devices.contexts(1, device), mx.nd.waitall
        self.is_gpu, self.size, self.mib = device == "gpu", SIZE[device], MIB[device]
        self.product()()
        self.start = self._used()

    def _used(self) -> float:
        self.wait()
        free, total = self.mx.context.gpu_memory_info(0) if self.is_gpu else (0, 0)
        return (total - free) / 1e6

    def step(self, model: str, size: int) -> Call:
        from gluon_mgpu.training.config import Config
        from gluon_mgpu.training.models import create_model

        self.ctx[0].empty_cache() if self.is_gpu else None
        net = create_model("highlevel", self.ctx, Config(impl="highlevel", model=model, batch_size=size))
        X, y = self.mx.nd.random.uniform(shape=(size, 1, 28, 28), ctx=self.ctx[0]), self.mx.nd.zeros(size, self.ctx[0])
        return lambda: net.step(X, y, LR[model])

    def peak(self) -> float:
        return self._used() - self.start

    def product(self) -> Call:
        x = self.mx.nd.ones((self.size, self.size), self.ctx[0])
        return lambda: self.mx.nd.dot(x, x)

    def copies(self) -> dict[str, Call]:
        on_device, pageable = (self.mx.nd.zeros((self.mib, 1 << 18), c) for c in (self.ctx[0], self.mx.cpu()))
        pinned = self.mx.nd.zeros((self.mib, 1 << 18), self.mx.cpu_pinned()) if self.is_gpu else pageable
        return {"pageable": lambda: pageable.copyto(on_device), "pinned": lambda: pinned.copyto(on_device)}


class PyTorch:
    def __init__(self, device: str) -> None:
        import torch

        self.torch, self.is_gpu, self.size, self.mib = torch, device == "gpu", SIZE[device], MIB[device]
        self.device = torch.device("cuda" if self.is_gpu else "cpu")
        torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = False, True
        self.wait = torch.cuda.synchronize if self.is_gpu else lambda: None

    def step(self, model: str, size: int) -> Call:
        from bench.torch_peers import network

        torch = self.torch
        if self.is_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        net = network(model).to(self.device)
        optimizer = torch.optim.SGD(net.parameters(), lr=LR[model])
        X = torch.rand(size, 1, 28, 28, device=self.device)
        y = torch.zeros(size, dtype=torch.long, device=self.device)

        def step() -> None:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(net(X), y).backward()
            optimizer.step()

        return step

    def peak(self) -> float:
        return self.torch.cuda.max_memory_allocated() / 1e6 if self.is_gpu else 0

    def product(self) -> Call:
        x = self.torch.ones(self.size, self.size, device=self.device)
        return lambda: x @ x

    def copies(self) -> dict[str, Call]:
        pageable = self.torch.zeros(self.mib, 1 << 18)
        on_device = self.torch.empty_like(pageable, device=self.device)
        pinned = pageable.pin_memory() if self.is_gpu else pageable
        copies: dict[str, Call] = {}
        for name, array in (("pageable", pageable), ("pinned", pinned)):
            copies[name] = partial(on_device.copy_, array)
            copies[f"{name}, non_blocking"] = partial(on_device.copy_, array, non_blocking=True)
        return copies


def run(model: Sequence[str], batch_size: Sequence[int], device: str, steps: int) -> dict:
    """Measure each engine that is installed, in its own process. Returns the input of `table`."""
    found = [name for name in ENGINES if importlib.util.find_spec(name)]
    of_mxnet = {name: value for name, value in subprocesses.users_environment().items() if name.startswith("MXNET_")}
    tried = {"MXNET_CUDNN_AUTOTUNE_DEFAULT": "1"}  # as with cudnn.benchmark in PyTorch
    env, engines = harness.environment({**tried, **of_mxnet, "NVIDIA_TF32_OVERRIDE": "0"}), {}
    for engine in found:
        arguments = {"engine": engine, "model": model, "batch_size": batch_size, "device": device, "steps": steps}
        try:
            engines[ENGINES[engine]] = harness.start(ENGINES[engine], Job("gpu", arguments, env))
        except Error as error:  # the other engine may work
            log.say(str(error))
    names = [name for name, _, _ in cuda.driver_gpus()] if device == "gpu" else []
    return {"device": device, "name": (names or [device])[0], "engines": engines}


def work(engine: str, model: Sequence[str], batch_size: Sequence[int], device: str, steps: int) -> dict[str, Any]:
    """Measure one engine. Times are in ms, memory in MB."""
    on: MXNet | PyTorch = MXNet(device) if engine == "mxnet" else PyTorch(device)
    rows = []
    for name in model:
        for size in batch_size:
            step = on.step(name, size)
            measured = _times(step, on.wait, steps)
            rows.append({"model": name, "batch_size": size, **measured, "peak_mb": on.peak()})
            del step
    products = _times(on.product(), on.wait, PRODUCTS)
    copies = {name: _times(copy, on.wait, 5) for name, copy in on.copies().items()}
    return {"steps": rows, "products": products, "copies": copies}


def _times(call: Call, wait: Call, count: int) -> dict[str, float]:
    """called_ms: until a call returns, if nothing is queued. alone_ms: until it is done. each_ms: per call, if `count`
    calls are queued and only the last one is waited for."""
    for _ in range(WARM_UP):
        call()
    wait()
    called, alone = [], []
    for _ in range(count):
        start = time.perf_counter()
        held = call()
        called.append(time.perf_counter() - start)
        wait()
        alone.append(time.perf_counter() - start)
    start = time.perf_counter()
    for _ in range(count):
        held = call()
    wait()
    each = (time.perf_counter() - start) / count
    del held
    return {"called_ms": 1e3 * median(called), "alone_ms": 1e3 * median(alone), "each_ms": 1e3 * each}


def table(result: dict) -> str:
    """Format the times of each engine."""
    device = result["device"]
    lines = [f"one {result['name']}, float32 without TF32; {harness.machine_line()}"]

    def row(name: str, times: dict[str, float], *more: float) -> list[str]:
        ms = [f"{times[key]:.2f}" for key in ("called_ms", "alone_ms", "each_ms")]
        return [name, *ms, *(f"{value:.0f}" for value in more)]

    for engine, measured in result["engines"].items():
        rows = [[engine, "ms: call returns", "alone", "queued", "images/s", "MB"]]
        for step in measured["steps"]:
            size = step["batch_size"]
            rows.append(
                row(f"{TITLE[step['model']]}, batch {size}", step, 1e3 * size / step["each_ms"], step["peak_mb"])
            )
        rows.append(row(f"product, {SIZE[device]} x {SIZE[device]}", measured["products"]))
        rows += [row(f"copy of {MIB[device]} MiB, {name}", times) for name, times in measured["copies"].items()]
        lines += ["", *log.table(rows)]
    return "\n".join(lines)
