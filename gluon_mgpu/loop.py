"""Epochs over the replicas of either implementation: shuffle, train, time, evaluate, print, record.

The engine runs behind Python: steps are issued in bursts and their losses read later; Python waits once a burst.
The loop knows nothing of `scratch` and `highlevel`; it drives the three methods of `Replicas`.
"""

import ctypes
import signal
import sys
import threading
import time
from collections import deque
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from gluon_mgpu import datasets, engine, records
from gluon_mgpu.errors import Error, UsageError

engine.configure()

import mxnet as mx  # noqa: E402
from mxnet import nd  # noqa: E402
from mxnet.base import _LIB, check_call  # noqa: E402

# How far Python may run ahead of the engine. It issues steps in a burst and then sleeps, which disturbs the workers on
# the same cores less than waking at every step (docs/engine.md). One step in eight is left to the engine while the next
# burst is issued. The seconds bound what Ctrl-C has to wait for.
MOST_STEPS_AHEAD = 16
MOST_SECONDS_AHEAD = 0.4


class Epoch(NamedTuple):
    """What an epoch leaves: a line of metrics.jsonl."""

    epoch: int  # from 1
    train_seconds: float  # of training alone, without the evaluation
    samples_per_second: float
    train_loss: float  # mean over the examples, each at the step that trained on it
    test_accuracy: float  # share of the test set, 0 to 1


def run(
    make_replicas,
    ctx,
    batch_size,
    *,
    epochs=4,
    dataset="fashion-mnist",
    data_dir=None,
    limit=None,
    seed=None,
    out=None,
    config=None,
):
    """Train for some epochs and evaluate after each; prints the notebook's lines and returns a list of `Epoch`.

    make_replicas: builds the replicas on ctx, called once the random numbers are seeded. batch_size: the global one.
    dataset, data_dir, limit: as in `datasets.load`. seed: makes a run on CPU contexts repeatable bit for bit; None
    draws one. out: a folder to leave the run in (`records.Run`). config: what else its config.json shall say.
    Raises UsageError for fewer examples in a batch than devices, Error when a loss is not a number, KeyboardInterrupt
    on Ctrl-C, between two steps, once the checkpoint is left.
    """
    if batch_size < len(ctx):
        raise UsageError(f"a batch of {batch_size} on {len(ctx)} devices: give a batch of {len(ctx)} or fewer devices")
    kept = records.Run(out) if out else None
    if seed is None:
        seed = int(np.random.SeedSequence().generate_state(1)[0] >> 1)
    data = datasets.load(dataset, data_dir, limit, seed)
    mx.random.seed(seed)
    replicas = make_replicas()
    if kept:
        facts = {"batch_size": batch_size, "epochs": epochs, "dataset": dataset, "limit": limit, "seed": seed}
        kept.begin({**(config or {}), "devices": [str(c) for c in ctx], **facts, "data": data.source})
    print("running on:", ctx, flush=True)
    history, steps = [], 0

    def train_batch(X, y):
        nonlocal steps
        steps += 1
        return replicas.train_batch(X, y)

    with CtrlC() as ctrl_c:
        try:
            for number in range(1, epochs + 1):
                steps = 0
                order = np.random.default_rng([seed, number]).permutation(len(data.train_labels))
                start = time.perf_counter()
                train_iter = batches(data.train_images, data.train_labels, batch_size, order)
                train_loss = train_epoch(train_batch, ctrl_c.between(train_iter), len(order), f"epoch {number}")
                train_time = time.perf_counter() - start
                parameters = replicas.parameters()
                _refuse_broken(parameters, number)
                test_iter = batches(data.test_images, data.test_labels, batch_size)
                test_acc = replicas.evaluate_accuracy(ctrl_c.between(test_iter))
                history.append(Epoch(number, train_time, len(order) / train_time, train_loss, test_acc))
                print(f"epoch {number}, time: {train_time:.1f} sec, test acc: {test_acc:.2f}", flush=True)
                if kept:
                    kept.epoch(history, parameters, seed)
        except BetweenSteps:  # a second Ctrl-C, perhaps within a step, leaves the checkpoint of the last epoch
            if kept:
                kept.interrupted(history, replicas.parameters(), seed, steps)
            raise
    return history


def batches(images, labels, batch_size, order=None):
    """Batches in host memory: X float32 (n, 1, 28, 28) in [0, 1], y float32 (n,). The last one may be smaller.

    images, labels: uint8 arrays. order: the indices to take, in turn; default all of them as they lie.
    """
    order = np.arange(len(labels)) if order is None else order
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        (X, pixels), (y, classes) = _empty((len(chosen), *images.shape[1:])), _empty(chosen.shape)
        np.divide(images[chosen], 255, out=pixels, dtype=np.float32)
        classes[:] = labels[chosen]
        yield X, y


def _empty(shape):
    """A new float32 NDArray in host memory, and that memory as a NumPy array, to fill before the engine sees it.

    nd.array would copy, after waiting for all that cpu(0) has still to do. nd.from_numpy calls Python from an engine
    thread to give the memory back, which aborts a process that is just ending.
    """
    array, memory = nd.empty(shape), ctypes.c_void_p()
    check_call(_LIB.MXNDArrayGetData(array.handle, ctypes.byref(memory)))
    return array, np.ctypeslib.as_array(ctypes.cast(memory, ctypes.POINTER(ctypes.c_float)), shape)


def train_epoch(train_batch, train_iter, examples, title):
    """Train on each batch once; returns the mean loss. examples: how many the batches hold, for the progress bar."""
    total = 0.0
    issued = (train_batch(X, y) for X, y in train_iter)
    with tqdm(
        total=examples, unit=" examples", unit_scale=True, desc=title, leave=False, disable=not sys.stderr.isatty()
    ) as bar:
        for step, losses in enumerate(read_behind(issued), 1):
            loss = losses.mean(dtype=np.float64)
            total += loss * len(losses)
            if not np.isfinite(loss):
                raise Error(
                    f"the loss is not a number, first seen at {title}, step {step}: training stopped; "
                    "a smaller --lr may help"
                )
            bar.update(len(losses))
            bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
    nd.waitall()
    return total / examples


def _refuse_broken(parameters, epoch):
    """A ReLU turns not-a-number into 0, so that the loss can look well where the parameters are not."""
    broken = [name for name, values in parameters.items() if not np.isfinite(values).all()]
    if broken:
        raise Error(
            f"parameters are not numbers ({', '.join(broken)}), first seen after epoch {epoch}: training stopped; "
            "a smaller --lr may help"
        )


def read_behind(issued):
    """The results (n,) of every step as NumPy, in order, while later steps are issued ahead of the engine.

    issued: an iterator that issues a step when asked for the next and gives its results, such as the losses: a vector
    a device.
    """
    ahead, allowed, began = deque(), 1, time.perf_counter()
    for shards in issued:
        ahead.append(shards)
        if len(ahead) >= allowed:
            burst = len(ahead) - allowed // 8
            for _ in range(burst):
                yield np.concatenate([shard.asnumpy() for shard in ahead.popleft()])
            now = time.perf_counter()
            allowed = int(np.clip(MOST_SECONDS_AHEAD * burst / (now - began), 1, MOST_STEPS_AHEAD))
            began = now
    for shards in ahead:
        yield np.concatenate([shard.asnumpy() for shard in shards])


def mean(issued):
    """The mean of all the results that `issued` gives, as `read_behind` reads them."""
    return float(np.concatenate(list(read_behind(issued))).mean(dtype=np.float64))


class BetweenSteps(KeyboardInterrupt):
    """Ctrl-C, held back until the replicas are whole."""


class CtrlC:
    """Holds Ctrl-C back until a step is issued whole: half a step would leave replicas that differ.

    A second Ctrl-C is not held back. Where no step is left, the run is finished and ends as such. Outside the main
    thread, where Python delivers no signal, this does nothing.
    """

    def __enter__(self):
        self.asked = False
        self.main = threading.current_thread() is threading.main_thread()
        if self.main:
            self.before = signal.signal(signal.SIGINT, self._hold)
        return self

    def __exit__(self, *_):
        if self.main:
            signal.signal(signal.SIGINT, self.before)

    def _hold(self, *_):
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def between(self, items):
        """The items; BetweenSteps instead of the next one once Ctrl-C was pressed."""
        for item in items:
            if self.asked:
                raise BetweenSteps
            yield item
