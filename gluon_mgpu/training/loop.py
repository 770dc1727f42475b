"""Epochs over the replicas of either implementation: shuffle, train, time, evaluate, print, record.

The engine runs behind Python: steps are issued in bursts and their losses read later; Python waits once a burst.
The loop knows nothing of `scratch` and `highlevel`; it drives the methods of their `Replicas`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from tqdm import tqdm

from gluon_mgpu.distributed import process as place
from gluon_mgpu.distributed.workers import ALONE, Workers
from gluon_mgpu.runtime import engine
from gluon_mgpu.runtime.errors import Error, Interrupted, UsageError
from gluon_mgpu.training import datasets, records, timeline
from gluon_mgpu.training.settings import Settings, Shares, joined, shard_sizes

engine.configure()

import mxnet as mx  # noqa: E402
from mxnet import Context, nd  # noqa: E402
from mxnet.base import _LIB, check_call  # noqa: E402
from mxnet.ndarray import NDArray  # noqa: E402

# How far Python may run ahead of the engine. It issues steps in a burst and then sleeps, which disturbs the workers on
# the same cores less than waking at every step (docs/engine.md). One step in eight is left to the engine while the next
# burst is issued. The seconds bound what Ctrl-C has to wait for.
MOST_STEPS_AHEAD = 16
MOST_SECONDS_AHEAD = 0.4
SAME_CTRL_C = 0.5  # seconds

Batch = tuple[NDArray, NDArray]  # (X, y); (None, None) for a worker without a part
Item = TypeVar("Item")


class Replicas(Protocol):
    """What the loop drives: the network on every device, as `scratch.Replicas` and `highlevel.Replicas` are."""

    ctx: list[Context]

    @property
    def statistics(self) -> Sequence[Any]: ...  # arrays that are counted and not trained: batch normalization's

    def train_batch(self, X: NDArray | None, y: NDArray | None, lr: float, batch_size: int = 0) -> list[NDArray]: ...

    def settle(self) -> None: ...

    def forward_backward(self, X: NDArray, y: NDArray, shares: Shares) -> list[NDArray]: ...

    def predict(self, X: NDArray) -> list[NDArray]: ...

    def evaluate_accuracy(self, data_iter: Iterable[Batch]) -> float: ...

    def parameters(self, device: int = 0) -> dict[str, np.ndarray]: ...

    def velocities(self) -> dict[str, np.ndarray]: ...

    def load(self, parameters: dict[str, np.ndarray], velocities: dict[str, np.ndarray]) -> None: ...


def run(
    make_replicas: Callable[[Settings], Replicas],
    ctx: list[Context],
    settings: Settings,
    *,
    config: dict[str, Any],
    data_dir: str | Path | None = None,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    tensorboard: bool = False,
    profile: str | Path | None = None,
    workers: Workers = ALONE,
) -> list[records.Epoch]:
    """Train for some epochs and evaluate after each; prints the notebook's lines and returns a list of `records.Epoch`.

    make_replicas: builds the replicas on ctx from settings, called once the random numbers are seeded. config: what
    config.json shall say of the implementation. data_dir: as in `datasets.load`. out: a folder to leave the run in.
    resume: such a folder, to go on from its checkpoint; the settings must be those of the run, except that there may be
    more epochs, and other devices and shares. tensorboard: write each epoch's numbers for TensorBoard there too.
    profile: a file for the engine's profile of some steps (`timeline.recorded`). workers: of which this process is one,
    with its own ctx; worker 0 alone prints and writes.
    Raises UsageError for fewer examples in a batch than devices and for what cannot be resumed, Error when a loss is
    not a number, KeyboardInterrupt on Ctrl-C, between two steps, once the checkpoint is left.
    """
    devices = sum(workers.meet(len(ctx)))
    if settings.batch_size < devices:
        size = settings.batch_size
        raise UsageError(f"a batch of {size} on {devices} devices: give a larger batch, or fewer devices")
    if isinstance(settings.shares, tuple) and len(settings.shares) != len(ctx):
        devices_here = f"{len(ctx)} device{'s'[: len(ctx) != 1]}"
        raise UsageError(
            f"shares {joined(settings.shares)}: {len(settings.shares)} for {devices_here}; give one for each"
        )
    if workers.count > 1 and settings.shares:
        given = settings.shares if isinstance(settings.shares, str) else joined(settings.shares)
        raise UsageError(f"shares {given}: they are of one worker's devices: leave them away")
    workers.agree({**config, "resume": bool(resume), **({} if resume else asdict(settings))})
    first = workers.rank == 0
    with records.Run(out, resume, tensorboard) if first else records.Run() as kept:
        arrays, position = None, records.Position()
        if first:
            settings, arrays, position = kept.position(settings)
            if settings.seed is None:
                settings = replace(settings, seed=int(np.random.SeedSequence().generate_state(1)[0] >> 1))
        decided = workers.gather([asdict(settings), position.as_json(), profile is None])[0]  # by worker 0
        settings, position = Settings(**decided[0]), records.Position.from_json(decided[1])
        if len(position.history) == settings.epochs and decided[2]:  # a profile of no steps is refused below
            kept.end(position)  # a run that was killed may lack its last line, or picture
            return position.history
        data = datasets.load(settings.dataset, data_dir, settings.limit, settings.seed)
        if settings.shares == "auto":
            settings = replace(settings, shares=measured_shares(make_replicas, ctx, settings, data))
        mx.random.seed(settings.seed)
        replicas = make_replicas(settings)
        if arrays is not None:
            kept.restore(replicas, arrays)
        if workers.count > 1:
            workers.agree({"data with checksum": data.checksum()})
            records.give(replicas, workers.broadcast(records.own(replicas)))
        where = {"devices": [str(c) for c in ctx], "threads": engine.openmp_threads(), "data": data.source}
        where["workers"] = workers.count
        workers.on_failure(kept.failed)
        kept.begin({**config, **asdict(settings), **where}, replicas, position)
        steps_an_epoch = -(-len(data.train_labels) // settings.batch_size)
        steps = (
            settings.epochs * steps_an_epoch,
            steps_an_epoch,
            len(position.history) * steps_an_epoch + position.steps,
        )
        about = f"{settings.model}, {config['impl']}, {len(ctx)} devices, batch {settings.batch_size}"
        with timeline.recorded(profile if first else None, replicas, about, *steps), CtrlC(workers) as ctrl_c:
            if first:
                print("running on:", ctx, *workers.shown(), flush=True)
            try:
                while len(position.history) < settings.epochs:
                    _epoch(replicas, data, settings, position, ctrl_c, workers)
                    kept.epoch(replicas, position)
            except Interrupted:  # a second Ctrl-C, perhaps within a step, leaves the checkpoint of the last epoch
                kept.interrupted(replicas, position, steps_an_epoch)
                raise
        kept.end(position)
        return position.history


def _epoch(
    replicas: Replicas,
    data: datasets.Dataset,
    settings: Settings,
    position: records.Position,
    ctrl_c: CtrlC,
    workers: Workers,
) -> None:
    """What is left of an epoch: train, evaluate, print. Moves the position on; Interrupted on Ctrl-C."""
    number, size, examples = len(position.history) + 1, settings.batch_size, len(data.train_labels)
    steps_an_epoch = -(-examples // size)
    before = (number - 1) * steps_an_epoch
    assert settings.seed is not None  # `run` drew one
    order = shuffled(examples, settings.seed, number)

    def train_batch(X: NDArray, y: NDArray) -> list[NDArray]:
        step = position.steps
        lr = settings.learning_rate(before + step, steps_an_epoch)
        position.steps += 1
        if workers.count == 1:
            return replicas.train_batch(X, y, lr)
        return replicas.train_batch(X, y, lr, min(size, examples - step * size))

    start = time.perf_counter() - position.seconds
    train_iter = batches(data.train_images, data.train_labels, size, order[position.steps * size :], workers.part)
    loss_sum = train_epoch(
        train_batch,
        ctrl_c.until(train_iter, lambda: before + position.steps),
        examples,
        f"epoch {number}",
        position.steps,
        size,
        position.loss_sum if workers.rank == 0 else 0.0,
        workers,
    )
    losses, stopping = zip(*workers.gather([loss_sum, workers.stopping]))
    position.loss_sum = sum(losses)
    position.seconds = time.perf_counter() - start
    if workers.count > 1:
        replicas.settle()
    _refuse_broken(replicas.parameters(), number)
    if ctrl_c.stopped or any(stopping):
        raise Interrupted
    test_acc = _evaluate(replicas, data, size, ctrl_c, workers)
    lr = settings.learning_rate(before + steps_an_epoch - 1, steps_an_epoch)
    position.ended(examples, test_acc, lr)
    if workers.rank == 0:
        seconds = position.history[-1].train_seconds
        print(f"epoch {number}, time: {seconds:.1f} sec, test acc: {test_acc:.2f}", flush=True)


def _evaluate(replicas: Replicas, data: datasets.Dataset, size: int, ctrl_c: CtrlC, workers: Workers) -> float:
    """The accuracy on the test set, of which each worker takes a part."""
    own = np.arange(len(data.test_labels))[workers.part(len(data.test_labels))]
    test_iter = batches(data.test_images, data.test_labels, size, own)
    try:
        right = round(replicas.evaluate_accuracy(ctrl_c.between(test_iter)) * len(own)) if len(own) else 0
    except Interrupted:
        right = None
    rights = workers.gather(None if workers.stopping else right)
    if None in rights:
        raise Interrupted
    return sum(rights) / len(data.test_labels)


def measured_shares(
    make_replicas: Callable[[Settings], Replicas],
    ctx: list[Context],
    settings: Settings,
    data: datasets.Dataset,
    rounds: int = 3,
    steps: int = 5,
) -> tuple[int, ...]:
    """What each device's part of a batch should be, in 100 (with many devices, in more), and a line that says so.

    Every device computes gradients of its part of one batch, all at the same time, and is timed; the next round gives
    each a part in proportion to its speed. The first step of a round is cold and does not count.
    """
    replicas = make_replicas(replace(settings, shares=None))
    n = -(-min(settings.batch_size, len(data.train_labels)) // settings.accumulate)
    X, y = next(batches(data.train_images, data.train_labels, n))
    shares = (1,) * len(ctx)
    with ThreadPoolExecutor(len(ctx)) as waiting:

        def seconds() -> list[float]:
            nd.waitall()
            start = time.perf_counter()

            def done(array: NDArray) -> float:
                array.wait_to_read()
                return time.perf_counter() - start

            return list(waiting.map(done, replicas.forward_backward(X, y, shares)))

        for _ in range(rounds):
            seconds()
            times = np.median([seconds() for _ in range(steps)], axis=0)
            speeds = np.array(shard_sizes(X.shape[0], len(ctx), shares)) / times
            shares = tuple(shard_sizes(max(100, 10 * len(ctx)), len(ctx), tuple(speeds)))
    place.say(f"--shares auto measured the devices and chose {joined(shares)}")
    return shares


def shuffled(examples: int, seed: int, epoch: int) -> np.ndarray:
    """The order in which an epoch takes the examples: their indices."""
    return np.random.default_rng([seed, epoch]).permutation(examples)


def batches(
    images: np.ndarray,
    labels: np.ndarray,
    batch_size: int,
    order: np.ndarray | None = None,
    part: Callable[[int], slice] | None = None,
) -> Iterator[Batch]:
    """Batches in host memory: X float32 (n, 1, 28, 28) in [0, 1], y float32 (n,). The last one may be smaller.

    images, labels: uint8 arrays. order: the indices to take, in turn; default all of them as they lie. part: from the
    size of a batch to the slice of it that is wanted; where that is empty, the batch is (None, None).
    """
    order = np.arange(len(labels)) if order is None else order
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        if part:
            chosen = chosen[part(len(chosen))]
        if not len(chosen):
            yield None, None
            continue
        (X, pixels), (y, classes) = _empty((len(chosen), *images.shape[1:])), _empty(chosen.shape)
        np.divide(images[chosen], 255, out=pixels, dtype=np.float32)
        classes[:] = labels[chosen]
        yield X, y


def _empty(shape: tuple[int, ...]) -> tuple[NDArray, np.ndarray]:
    """A new float32 NDArray in host memory, and that memory as a NumPy array, to fill before the engine sees it.

    nd.array would copy, after waiting for all that cpu(0) has still to do. nd.from_numpy calls Python from an engine
    thread to give the memory back, which aborts a process that is just ending.
    """
    array, memory = nd.empty(shape, mx.cpu()), ctypes.c_void_p()
    check_call(_LIB.MXNDArrayGetData(array.handle, ctypes.byref(memory)))
    return array, np.ctypeslib.as_array(ctypes.cast(memory, ctypes.POINTER(ctypes.c_float)), shape)


def pieces(X: NDArray, y: NDArray, parts: int) -> Iterator[Batch]:
    """A batch in so many pieces, one after the other, as even as can be."""
    if parts == 1 or X is None:
        yield X, y
        return
    start = 0
    for size in shard_sizes(X.shape[0], min(parts, X.shape[0])):
        yield X[start : start + size], y[start : start + size]
        start += size


def train_epoch(
    train_batch: Callable[[NDArray, NDArray], list[NDArray]],
    train_iter: Iterable[Batch],
    examples: int,
    title: str,
    steps: int = 0,
    batch_size: int = 0,
    loss_sum: float = 0.0,
    workers: Workers = ALONE,
) -> float:
    """Train on each batch once; returns the sum of the examples' losses, each at the step that trained on it: of those
    that this worker had.

    examples: how many the epoch has. steps: how many steps of batch_size came before, loss_sum: what they summed to.
    """
    issued = (train_batch(X, y) for X, y in train_iter)
    with tqdm(
        total=examples,
        initial=steps * batch_size,
        unit=" examples",
        unit_scale=True,
        desc=title,
        leave=False,
        disable=workers.rank > 0 or not sys.stderr.isatty(),
    ) as bar:
        for step, losses in enumerate(read_behind(issued), steps + 1):
            done = len(losses) if workers.count == 1 else min(batch_size, examples - (step - 1) * batch_size)
            if not len(losses):  # this worker had no example of a last, small batch
                bar.update(done)
                continue
            loss = losses.mean(dtype=np.float64)
            loss_sum += loss * len(losses)
            if not np.isfinite(loss):
                raise Error(
                    f"the loss is not a number, first seen at {title}, step {step}: training stopped; "
                    "a smaller --lr may help"
                )
            bar.update(done)
            bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
    nd.waitall()
    return loss_sum


def _refuse_broken(parameters: dict[str, np.ndarray], epoch: int) -> None:
    """A ReLU turns not-a-number into 0, so that the loss can look well where the parameters are not."""
    broken = [name for name, values in parameters.items() if not np.isfinite(values).all()]
    if broken:
        raise Error(
            f"parameters are not numbers ({', '.join(broken)}), first seen in epoch {epoch}: training stopped; "
            "a smaller --lr may help"
        )


def read_behind(issued: Iterable[list[NDArray]]) -> Iterator[np.ndarray]:
    """The results (n,) of every step as NumPy, in order, while later steps are issued ahead of the engine.

    issued: an iterator that issues a step when asked for the next and gives its results, such as the losses: a vector
    a device.
    """
    ahead: deque[list[NDArray]] = deque()
    allowed, began = 1, time.perf_counter()
    for shards in issued:
        ahead.append(shards)
        if len(ahead) >= allowed:
            burst = len(ahead) - allowed // 8
            for _ in range(burst):
                yield _joined(ahead.popleft())
            now = time.perf_counter()
            allowed = int(np.clip(MOST_SECONDS_AHEAD * burst / (now - began), 1, MOST_STEPS_AHEAD))
            began = now
    for shards in ahead:
        yield _joined(shards)


def _joined(shards: list[NDArray]) -> np.ndarray:
    return np.concatenate([shard.asnumpy() for shard in shards] or [np.empty(0, np.float32)])


def mean(issued: Iterable[list[NDArray]]) -> float:
    """The mean of all the results that `issued` gives, as `read_behind` reads them."""
    return float(np.concatenate(list(read_behind(issued))).mean(dtype=np.float64))


class CtrlC:
    """Holds Ctrl-C, or SIGTERM, back until a step is issued whole: half a step would leave replicas that differ.

    A second one is not held back. Within SAME_CTRL_C it is the first: a launcher and a cluster may both pass it on.
    Where no step is left, the run is finished and ends as such. Outside the main thread, where Python delivers no
    signal, this does nothing. Several workers stop at the same step, whichever was asked.
    """

    def __init__(self, workers: Workers = ALONE) -> None:
        self.workers = workers

    def __enter__(self) -> CtrlC:
        self.asked, self.stopped, self.since = False, False, 0.0
        main = threading.current_thread() is threading.main_thread()
        self.before = {s: signal.signal(s, self._hold) for s in (signal.SIGINT, signal.SIGTERM) if main}
        return self

    def __exit__(self, *_: object) -> None:
        for which, handler in self.before.items():
            signal.signal(which, handler)

    def _hold(self, *_: object) -> None:
        if self.asked:
            if time.monotonic() - self.since < SAME_CTRL_C:
                return
            raise KeyboardInterrupt
        self.asked, self.since = True, time.monotonic()
        with suppress(OSError):  # whoever read it may have heard the same Ctrl-C, and be gone
            os.write(2, b"\ngluon_mgpu: ending after this step; Ctrl-C again ends at once, without a checkpoint\n")

    def between(self, items: Iterable[Item]) -> Iterator[Item]:
        """The items; Interrupted instead of the next one once Ctrl-C was pressed."""
        yield from self.until(items)
        if self.stopped:
            raise Interrupted

    def until(self, items: Iterable[Item], step: Callable[[], int] | None = None) -> Iterator[Item]:
        """The items; none of those left, and `stopped`, once Ctrl-C was pressed.

        step: says how many steps of the run were issued. With it, several workers stop together.
        """
        for item in items:
            if step and self.workers.count > 1:
                if self.asked and not self.workers.stopping:
                    self.workers.ask_to_stop()
                on = self.workers.may_step(step())
            else:
                on = not self.asked
            if not on:
                self.stopped = True
                return
            yield item
