"""The training loop: shuffle, train, evaluate, print and save, epoch by epoch."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
from mxnet import nd

from gluon_mgpu.data.batches import LARGEST_BATCH, batches, shuffled
from gluon_mgpu.data.datasets import Dataset
from gluon_mgpu.support import log
from gluon_mgpu.support.errors import Error, Interrupted, setting
from gluon_mgpu.training.checkpoint import Arrays
from gluon_mgpu.training.folder import Folder
from gluon_mgpu.training.losses import Losses
from gluon_mgpu.training.models import Model, read_arrays
from gluon_mgpu.training.record import Epoch, Run, exists
from gluon_mgpu.training.seeds import seed_step
from gluon_mgpu.training.state import LessonState
from gluon_mgpu.training.step import Step
from gluon_mgpu.training.workers import Group

PLATEAU_STEPS = 50  # before this many steps, a loss as high as that of guessing is normal
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the last one: the terminal was closed
SAME_SIGNAL = 0.5  # seconds; a second signal within this time is a duplicate from mpiexec or a cluster manager
Item = TypeVar("Item")


class Setup(NamedTuple):
    """A run, and what `fit` needs to train it; nothing in it changes afterward, except the run's position.

    run: its arrays are in the model. state: the arrays that the lesson itself keeps, if any. warning: a line to repeat
    at the end; empty if there is none.
    """

    run: Run
    data: Dataset
    model: Model
    step: Step  # (X, y, lr) -> the losses of each shard
    group: Group
    state: LessonState | None = None
    warning: str = ""

    def now(self) -> Run:
        """The run with its arrays, as a checkpoint holds it. All workers must call this at the same time."""
        of_lesson = self.state.read() if self.state else {}
        return self.run._replace(arrays={**read_arrays(self.model), **of_lesson})


def fit(setup: Setup, folder: Folder | None) -> list[Epoch]:
    """Train the remaining epochs of a run. Returns all epochs.

    folder: where worker 0 saves the run. On Ctrl-C, raises Interrupted; its one-line message says what was saved.
    Raises Error if a loss or a parameter is not finite.
    """
    config, position, data, group = setup.run.config, setup.run.position, setup.data, setup.group
    steps_per_epoch = -(-len(data.train_labels) // config.batch_size)
    if not group.rank:
        several = [f"as worker 0 of {group.size}"] if group.size > 1 else []
        _print(" ".join(["running on:", str(setup.model.ctx), *several]), folder)
    with CtrlC(folder is not None) as ctrl_c:
        while len(position.history) < config.epochs:
            number = len(position.history) + 1
            stopped = _train_epoch(number, setup, ctrl_c)
            run = setup.now()
            _check_replicas(setup, run.arrays, f"epoch {number}")
            accuracy = None if stopped else _evaluate(setup, ctrl_c)
            if accuracy is None:
                raise Interrupted(f"interrupted after {position}" if group.rank else _interrupted(run, folder))
            last_lr = config.learning_rate(number * steps_per_epoch - 1, steps_per_epoch)
            epoch = position.end_epoch(len(data.train_labels), accuracy, last_lr)
            if folder:
                folder.write(run)
            if not group.rank:
                _print(f"epoch {number}, time: {epoch.train_seconds:.1f} sec, test acc: {accuracy:.2f}", folder)
                _say_if_guessing(position.history, data.classes, steps_per_epoch)
        if folder:
            folder.end(setup.run)
        if setup.warning:
            log.say(f"remember: {setup.warning}")
        if group.is_set_anywhere(ctrl_c.asked):
            raise Interrupted(f"interrupted after {position}; all epochs are finished")
    return position.history


def _train_epoch(number: int, setup: Setup, ctrl_c: CtrlC) -> bool:
    """Take the remaining steps of an epoch, and count them in the run's position. Returns whether Ctrl-C ended it
    early."""
    config, position, data, model = setup.run.config, setup.run.position, setup.data, setup.model
    group = setup.group
    assert config.seed is not None
    examples, size = len(data.train_labels), config.batch_size
    steps_per_epoch = -(-examples // size)
    earlier = (number - 1) * steps_per_epoch  # steps in earlier epochs
    order = shuffled(examples, config.seed, number)[position.steps * size :]
    part = partial(group.local_indices, device_count=len(model.ctx)) if group.size > 1 else None
    start = time.perf_counter() - position.seconds
    losses = Losses(number, examples, size, position.steps, group)
    stopped = False
    for X, y in batches(data.train_images, data.train_labels, size, order, part):
        if group.is_set_anywhere(ctrl_c.asked):  # Ctrl-C in any worker stops all of them at the same step
            stopped = True
            break
        seed_step(config.seed, group.rank, earlier + position.steps)
        lr = config.learning_rate(earlier + position.steps, steps_per_epoch)
        losses.add(setup.step(X, y, lr), X.shape[0])
        position.steps += 1
    position.loss_sum += losses.finish()
    nd.waitall()
    position.seconds = time.perf_counter() - start
    return stopped


def _evaluate(setup: Setup, ctrl_c: CtrlC) -> float | None:
    """Measure the test accuracy; each worker evaluates a part of the test set. Returns None after Ctrl-C."""
    config, data, model, group = setup.run.config, setup.data, setup.model, setup.group
    batch_size = min(config.batch_size, LARGEST_BATCH)
    mine = group.local_indices(len(data.test_labels), len(model.ctx))
    correct, stopped = 0.0, False
    try:
        if len(mine):
            test_iter = ctrl_c.between(batches(data.test_images, data.test_labels, batch_size, mine))
            correct = round(model.evaluate_accuracy(test_iter) * len(mine))
    except Interrupted:
        stopped = True
    correct = group.total(correct)
    return None if group.is_set_anywhere(stopped) else correct / len(data.test_labels)


def _check_replicas(setup: Setup, arrays: Arrays, title: str) -> None:
    """Raise Error if a parameter is not finite. Print a notice if the replicas of all workers differ.

    arrays: of the run as it is now, which contain this worker's first replica.
    """
    model, group = setup.model, setup.group
    first = {name: arrays[name] for name in model.arrays()}
    # ReLU turns nan into 0, so the losses can be finite even if some parameters are not.
    broken = [name for name, values in first.items() if not np.isfinite(values).all()]
    if broken:
        place = f"{title} ({', '.join(broken)})"
        raise Error(f"parameters are not finite in {place}: training stopped; try a smaller {setting('lr')}")
    others = [read_arrays(model, device) for device in range(1, len(model.ctx))]
    differ = [name for name in first if any(first[name].tobytes() != other[name].tobytes() for other in others)]
    if group.size > 1:
        checksum = zlib.crc32(b"".join(array.tobytes() for array in first.values()))
        if group.is_set_anywhere(group.total(checksum) != group.size * checksum):
            differ.append("between workers")
    if differ:
        log.say(
            f"the replicas differ after {title} ({', '.join(differ)}): the devices now train different networks; after "
            "a correct allreduce, every device has the same gradients"
        )


def _print(line: str, folder: Folder | None) -> None:
    try:
        print(line, flush=True)
    except OSError as error:
        saved = f"; continue with {setting('resume', folder.path)}" if folder and exists(folder.path) else ""
        raise Error(f"cannot print ({error.strerror}), so training stopped{saved}") from None


def _say_if_guessing(history: list[Epoch], classes: int, steps_per_epoch: int) -> None:
    """Print a notice after the first epoch whose loss should be better than guessing, and is not."""
    guessing = math.log(classes)  # the loss if every class has the same probability
    late = [epoch for epoch in history if epoch.epoch * steps_per_epoch >= PLATEAU_STEPS]
    guesses = [epoch for epoch in late if abs(epoch.train_loss - guessing) < 0.01 * guessing]
    if len(guesses) == 1 and guesses[0] is history[-1]:
        log.say(
            f"a mean loss of {history[-1].train_loss:.2f} is no better than guessing: with small initial weights, this "
            "is normal for a few hundred steps; after that, check that each image keeps its label, and try a larger "
            f"{setting('lr')}"
        )


def _interrupted(run: Run, folder: Folder | None) -> str:
    """Save a checkpoint of an interrupted run. Returns one line that says what was saved."""
    if folder is None:
        return f"interrupted after {run.position}; nothing was saved"
    folder.write(run)
    folder.end(run)
    return f"interrupted after {run.position}; checkpoint saved; continue with {setting('resume', folder.path)}"


class CtrlC:
    """Defers Ctrl-C, SIGTERM and SIGHUP until the whole step is issued, because half a step would make the replicas
    unequal.

    A second Ctrl-C takes effect immediately. Python delivers signals only to the main thread; in any other thread, this
    class does nothing.
    """

    def __init__(self, saves: bool) -> None:
        """saves: whether the run saves a checkpoint when it stops; used only in the notice."""
        self.saves = saves

    def __enter__(self) -> CtrlC:
        self.asked, self.since = False, 0.0
        main = threading.current_thread() is threading.main_thread()
        signals = [s for s in SIGNALS if main and signal.getsignal(s) is not signal.SIG_IGN]
        self.before = {s: signal.signal(s, self._handle) for s in signals}
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        for which, handler in self.before.items():
            signal.signal(which, handler)
        if self.asked and kind is None:  # the signal arrived after the last step
            raise Interrupted("interrupted; all epochs are finished")

    def _handle(self, *_: object) -> None:
        if self.asked:
            if time.monotonic() - self.since < SAME_SIGNAL:
                return
            raise KeyboardInterrupt
        self.asked, self.since = True, time.monotonic()
        if not log.rank():
            notice = f"stopping; press Ctrl-C again to stop now{', without a checkpoint' * self.saves}"
            with suppress(OSError):  # the reader of standard error may be gone
                os.write(2, f"\ngluon_mgpu: {notice}\n".encode())

    def between(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yields the items; after Ctrl-C, raises Interrupted instead of yielding the next item."""
        for item in items:
            if self.asked:
                raise Interrupted
            yield item
