"""Measures a point with MXNet: a lesson, the notebook's code, or a way to split LeNet.

What imports mxnet is imported inside functions, after the settings of the point are made.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from bench import timeline, timing
from bench.grids import TUNED, WAYS, Point
from bench.timing import LR, Train
from gluon_mgpu.compat import devices, startup
from gluon_mgpu.data import datasets
from gluon_mgpu.data.datasets import Dataset

RECORDED_STEPS, RECORDED_WARM_UP = 20, 5
Step = Callable[[Any, Any, float], Any]  # a training step: takes X, y and lr, returns the losses of each shard


def measure(point: Point, steps: int, pipe: str) -> None:
    """Measure a point in this process, or as one of its workers, at each turn."""
    if point.workers == 1:
        timing.take_turns(pipe, results(point, steps))
        return
    from gluon_mgpu.training import workers

    with workers.join("mpi") as group:
        timing.take_turns(pipe, _of_worker(group, point, steps))


def results(point: Point, steps: int) -> Iterator[dict[str, Any]]:
    """Yield the results of a point that has one worker."""
    if point.impl == "notebook":
        startup.use_stock_settings()
        return timing.steps_of(trainer(_notebook(point), point), point, steps)
    startup.configure(point.contexts)
    if point.device:
        return _calls(point, steps)
    if point.impl in WAYS:
        train = trainer(_partitioned(point), point)
        return ({**measured, **_idle(train, point)} for measured in timing.steps_of(train, point, steps))
    return timing.steps_of(trainer(create(point).step, point), point, steps)


def create(point: Point) -> Any:
    """Create a lesson's model on its devices, with the parameters of `timing.initial`."""
    from gluon_mgpu.training.config import Config
    from gluon_mgpu.training.models import create_model, read_arrays

    config = Config(batch_size=point.batch_size, model=point.model, tune=point.impl == TUNED)
    ctx = devices.contexts(point.contexts, point.device or "cpu")
    model = create_model(point.impl.split()[0], ctx, config)
    model.load(timing.initial(read_arrays(model)))
    return model


def trainer(step: Step, point: Point, part: Any = None, barrier: Callable[[], Any] = lambda: None) -> Train:
    """Create a function that trains in the same way as the training loop, and measures the time.

    part: see `batches.batches`. barrier: waits for all workers.
    """

    from mxnet import nd

    from gluon_mgpu.data import batches
    from gluon_mgpu.training.losses import Pending

    def train(data: Dataset, order: np.ndarray) -> tuple[float | None, float]:
        barrier()
        start = time.perf_counter()
        pending, losses = Pending(), list[np.ndarray]()
        for X, y in batches.batches(data.train_images, data.train_labels, point.batch_size, order, part):
            shards = step(X, y, LR[point.model])
            if shards:
                pending.add(shards)
                losses += pending.ready()
        losses += pending.rest()
        nd.waitall()  # waits for the last update
        barrier()
        seconds = time.perf_counter() - start
        return float(np.concatenate(losses).mean(dtype=np.float64)) if losses else None, seconds

    return train


def _of_worker(group: Any, point: Point, steps: int) -> Iterator[dict[str, Any] | None]:
    """Yield the results of all workers together in the first one, and None in the others."""
    startup.configure(point.contexts)
    from gluon_mgpu.training.step import assemble

    step = assemble(create(point), group)
    train = trainer(step, point, lambda n: group.local_indices(n, point.contexts), lambda: group.total(0))
    for measured in timing.steps_of(train, point, steps):
        measured["peak MB"] = group.total(measured["peak MB"])
        measured["loss"] = group.total(measured["loss"]) / group.size
        yield measured if group.rank == 0 else None


def _notebook(point: Point) -> Step:
    """Create a step of the notebook's own code, which waits for each step and returns no losses."""
    import mxnet as mx
    from parity import notebook

    ctx = [mx.cpu(i) for i in range(point.contexts)]
    # The dense weights have the shape (inputs, outputs): drawn transposed, as all others are.
    arrays = timing.initial(
        {i: p.asnumpy().T if p.ndim == 2 else p.asnumpy() for i, p in enumerate(notebook.init_params())}
    )
    params = [mx.nd.array(p.T if p.ndim == 2 else p) for p in arrays.values()]
    device_params = [notebook.get_params(params, c) for c in ctx]

    def step(X: Any, y: Any, lr: float) -> list:
        notebook.train_batch(X, y, device_params, ctx, lr)
        mx.nd.waitall()
        return []

    return step


def _partitioned(point: Point) -> Step:
    """Create a step of one of gluon_mgpu.partition.WAYS."""
    from gluon_mgpu import partition, scratch

    way, _, micro_batches = point.impl.partition(", ")
    options = {"micro_batches": int(micro_batches.split()[0])} if micro_batches else {}
    place, train_batch = partition.WAYS[way]
    ctx = devices.contexts(point.contexts, "cpu")
    device_params = place(scratch.init_params(), ctx)
    return lambda X, y, lr: train_batch(X, y, device_params, ctx, lr, **options)


def _idle(train: Train, point: Point) -> dict[str, float]:
    """The percentage of the time in which each device is idle, in steps with MXNet's profiler."""
    end = RECORDED_WARM_UP * point.batch_size
    data = datasets.synthetic(end + RECORDED_STEPS * point.batch_size, 100, seed=0)
    train(data, np.arange(end))
    with timeline.recorded() as spans:
        train(data, np.arange(end, len(data.train_labels)))
    return {f"% idle, {i}": 100 * (1 - timeline.busy(spans, i, point.contexts)) for i in range(point.contexts)}


def _calls(point: Point, steps: int) -> Iterator[dict[str, float]]:
    model = create(point)
    from mxnet import nd

    (ctx,) = model.ctx
    X, y = nd.random.uniform(shape=(point.batch_size, 1, 28, 28), ctx=ctx), nd.zeros(point.batch_size, ctx)
    return timing.calls_of(lambda: model.step(X, y, LR[point.model]), nd.waitall, steps)
