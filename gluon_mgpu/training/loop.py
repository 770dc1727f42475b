"""The training loop: shuffle, train, evaluate, print and record, epoch by epoch.

`train` prepares a run: it joins the other workers, opens the run's folder, loads the data and builds the replicas.
`Training` is the run itself. This module imports no lesson; `gluon_mgpu.implementations` passes one in.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import Context, nd

from gluon_mgpu.data import datasets
from gluon_mgpu.data.batches import Pending, batches, shuffled
from gluon_mgpu.distributed.workers import Workers, join
from gluon_mgpu.runtime import devices, engine, log
from gluon_mgpu.runtime.errors import Error, Interrupted, UsageError, setting
from gluon_mgpu.training import records, timeline
from gluon_mgpu.training.interrupt import CtrlC
from gluon_mgpu.training.replicas import Replicas
from gluon_mgpu.training.settings import Settings

PLATEAU_STEPS = 50  # before this many steps, a loss as high as that of guessing is normal

# Creates replicas with new parameters: (ctx, settings, workers, image_shape) -> replicas
Build = Callable[[list[Context], Settings, Workers, Sequence[int]], Replicas]


def train(
    given: dict[str, Any], settings: Settings, build: Build, data: datasets.Dataset | None
) -> list[records.Epoch]:
    """Train. Returns one `records.Epoch` per epoch. Exceptions: see `implementations.train`.

    given: the settings that the caller passed. settings: all settings, as far as this process knows them. build:
    creates the replicas. data: None: as in the settings.
    """
    ctx = devices.contexts(settings.num_gpus, settings.device)
    with join(settings.kvstore, settings.compress) as workers:
        kept = settings.recorded()
        facts = {name: kept[name] for name in given if name in kept} if settings.resume else kept
        options = {"kvstore": settings.kvstore, "compress": settings.compress}
        workers.agree({**facts, **options, "resume": bool(settings.resume), "profile": bool(settings.profile)})
        first = workers.rank == 0  # only worker 0 prints and writes files
        where = (settings.out, settings.resume) if first else ()
        with records.RunFolder(*where) as folder:
            return prepare(settings, ctx, workers, folder, build, data).train()


def prepare(
    settings: Settings,
    ctx: list[Context],
    workers: Workers,
    folder: records.RunFolder,
    build: Build,
    data: datasets.Dataset | None,
) -> Training:
    """Load the data and build the replicas. In a resumed run, load the checkpoint. All workers get equal parameters."""
    settings, position, arrays = folder.start(settings)
    drawn = settings.seed is None
    if drawn:
        settings = replace(settings, seed=secrets.randbelow(2**31))
    start = workers.all_gather({"settings": settings.recorded(), "position": position.as_json()})[0]
    settings = replace(settings, **start["settings"])
    position = records.Position.from_json(start["position"])
    _check_batch(settings, len(ctx), workers)
    if data:
        data = data.first(settings.limit)
    else:
        data = datasets.load(settings.dataset, settings.data_dir, settings.limit, settings.seed)
    if arrays is not None and folder.config.get("data_checksum", data.checksum()) != data.checksum():
        raise UsageError("data_dir", settings.data_dir, f"not the data that the run in {folder.folder} was trained on")
    shape = data.train_images.shape[1:]
    mx.random.seed(settings.seed)
    replicas = build(ctx, settings, workers, shape)
    replicas.check_scores(data.classes, exactly=data.name != "own")
    last_batch = len(data.train_labels) % settings.batch_size or settings.batch_size
    if last_batch < replicas.smallest_batch:
        advice = f"leaves {last_batch} examples for the last batch, which needs {replicas.smallest_batch}"
        raise UsageError("batch_size", settings.batch_size, advice)
    if replicas.running_stats and (settings.compress or "").startswith("2bit"):
        raise UsageError("compress", settings.compress, "would also compress the running statistics; omit this setting")
    if drawn:
        log.say(f"drew a seed; pass {setting('seed', settings.seed)} to repeat this run")
    if arrays is not None:
        records.restore(replicas, arrays, folder.folder)
    if workers.count > 1:
        workers.agree({"data with checksum": data.checksum()})
        replicas.load_state_dict(workers.broadcast(replicas.state_dict()))
    return Training(replicas, data, position, folder)


def _check_batch(settings: Settings, devices_here: int, workers: Workers) -> None:
    """Raise UsageError if a batch cannot be split across the devices as the settings require."""
    total = sum(workers.exchange_device_counts(devices_here))
    if settings.batch_size < total:
        raise UsageError("batch_size", settings.batch_size, f"must be at least {total}, the number of devices")
    if settings.shares and (workers.count > 1 or len(settings.shares) != devices_here):
        advice = f"must be one number for each of {devices_here} devices, and works only with a single worker"
        raise UsageError("shares", settings.shares, advice)


class Training:
    """A run in progress."""

    def __init__(
        self, replicas: Replicas, data: datasets.Dataset, position: records.Position, folder: records.RunFolder
    ) -> None:
        self.replicas, self.data, self.position, self.folder = replicas, data, position, folder
        self.settings, self.workers = replicas.settings, replicas.workers
        self.first = self.workers.rank == 0
        self.examples = len(data.train_labels)
        self.steps_per_epoch = -(-self.examples // self.settings.batch_size)
        self.recorder: timeline.Recorder | timeline.NoRecorder = timeline.NoRecorder()
        settings, ctx = replicas.settings, replicas.ctx
        if settings.profile and self.first:
            plural = "s" * (len(ctx) > 1)
            about = f"{settings.model}, {settings.impl}, {len(ctx)} device{plural}, batch {settings.batch_size}"
            if self.workers.count > 1:
                about += f", worker 0 of {self.workers.count}"
            total = settings.epochs * self.steps_per_epoch
            self.recorder = timeline.Recorder(
                settings.profile, ctx, about, total, self.steps_per_epoch, self.steps_issued
            )

    @property
    def steps_issued(self) -> int:
        """The number of steps issued since the start of the run."""
        return len(self.position.history) * self.steps_per_epoch + self.position.steps

    @property
    def config(self) -> dict[str, Any]:
        """The content of config.json."""
        replicas, settings = self.replicas, self.settings
        kept = {name: value for name, value in settings.recorded().items() if name not in replicas.unused}
        where = {"devices": [str(c) for c in replicas.ctx], "threads": engine.openmp_threads()}
        store = {"kvstore": settings.kvstore, "compress": settings.compress, "workers": self.workers.count}
        data = {"data": self.data.source, "image_shape": self.replicas.image_shape}
        if self.data.name == "own":  # the other data sets are determined by their names
            data["data_checksum"] = self.data.checksum()
        return {**kept, **store, **where, **data}

    def train(self) -> list[records.Epoch]:
        """Train the remaining epochs. On Ctrl-C, raises Interrupted; its one-line message says what was saved."""
        folder, position, settings = self.folder, self.position, self.settings
        if len(position.history) == settings.epochs and not settings.profile:
            folder.end(position)  # if the run was killed, metrics.jsonl or curves.png may be out of date
            return position.history
        folder.begin(self.config, self.replicas, position)
        devices.say_if_no_gpu(self.replicas.ctx, settings.device)
        with self.recorder, CtrlC(self.workers, checkpoint=folder.saves) as self.stop:
            if self.first:
                more = [f"as worker 0 of {self.workers.count}"] if self.workers.count > 1 else []
                print("running on:", self.replicas.ctx, *more, flush=True)
            try:
                while len(position.history) < settings.epochs:
                    saved = settings.resume or (settings.out if position.history else None)
                    if saved:
                        self.workers.advise(f"continue from the last checkpoint with {setting('resume', saved)}")
                    self._train_epoch()
                    self._evaluate()
                    folder.end_epoch(self.replicas, position)
            except Interrupted:
                raise Interrupted(folder.interrupt(self.replicas, position)) from None
        folder.end(position)
        if settings.profile and self.first:
            log.say(f"wrote {settings.profile}, which ui.perfetto.dev and chrome://tracing open, and a picture of it")
        return position.history

    def _train_epoch(self) -> None:
        """Train the rest of an epoch. Raises Interrupted on Ctrl-C, and Error if a loss or parameter is not finite."""
        position, settings, size = self.position, self.settings, self.settings.batch_size
        assert settings.seed is not None  # `prepare` has drawn a seed
        number = len(position.history) + 1
        order = shuffled(self.examples, settings.seed, number)[position.steps * size :]
        train_iter = batches(self.data.train_images, self.data.train_labels, size, order, self.workers.part)
        start = time.perf_counter() - position.seconds
        pending, loss_sum = Pending(), position.loss_sum if self.first else 0.0
        progress = Progress(number, self.examples, size, position.steps, loss_sum)
        with progress.bar:
            for X, y in train_iter:
                if self.stop.wanted(self.steps_issued):  # Ctrl-C here or in another worker
                    break
                lr = settings.learning_rate(self.steps_issued, self.steps_per_epoch)
                batch_size = min(size, self.examples - position.steps * size)  # across all workers
                with self.recorder.step():
                    pending.add(self.replicas.train_batch(X, y, lr, batch_size))
                position.steps += 1
                for losses in pending.ready():  # from earlier steps; the engine is still busy with later ones
                    progress.update(losses)
            for losses in pending.rest():
                progress.update(losses)
        nd.waitall()
        loss_sums, stopping = zip(*self.workers.all_gather([progress.loss_sum, self.workers.stopping]))
        position.loss_sum, position.seconds = sum(loss_sums), time.perf_counter() - start
        self.replicas.sync_running_stats()
        self._check_parameters(progress.title)
        if self.stop.stopped or any(stopping):
            raise Interrupted

    def _check_parameters(self, title: str) -> None:
        """Raise Error if a parameter is not finite. Print a notice if the replicas differ."""
        # ReLU turns nan into 0, so the losses can be finite even if some parameters are not.
        broken = [name for name, values in self.replicas.parameters().items() if not np.isfinite(values).all()]
        if broken:
            where = f"{title} ({', '.join(broken)})"
            raise Error(f"parameters are not finite in {where}: training stopped; try a smaller {setting('lr')}")
        differ = self.replicas.differing()
        if differ:
            log.say(
                f"the replicas differ after {title} ({', '.join(differ)}): the devices now train different "
                "networks; after a correct allreduce, every device has the same gradients"
            )

    def _evaluate(self) -> None:
        """Measure and print the test accuracy, and finish the epoch. Each worker evaluates a part of the test set."""
        data, position, workers = self.data, self.position, self.workers
        part = workers.part(len(data.test_labels))
        images, labels = data.test_images[part], data.test_labels[part]
        correct: int | None = 0
        try:
            if len(labels):
                test_iter = batches(images, labels, self.settings.batch_size)
                accuracy = self.replicas.evaluate_accuracy(self.stop.between(test_iter))
                correct = round(accuracy * len(labels))
        except Interrupted:
            correct = None
        of_workers = workers.all_gather(None if workers.stopping else correct)
        if None in of_workers:
            raise Interrupted
        test_acc = sum(of_workers) / len(data.test_labels)
        lr = self.settings.learning_rate(self.steps_issued - 1, self.steps_per_epoch)
        position.end_epoch(self.examples, test_acc, lr)
        if self.first:
            epoch = position.history[-1]
            print(f"epoch {epoch.epoch}, time: {epoch.train_seconds:.1f} sec, test acc: {test_acc:.2f}", flush=True)
            guessing = math.log(data.classes)  # the loss if every class has the same probability
            if abs(epoch.train_loss - guessing) < 0.01 * guessing and self.steps_issued >= PLATEAU_STEPS:
                log.say(
                    f"a mean loss of {epoch.train_loss:.2f} is no better than guessing: this network starts on a "
                    "plateau, and leaves it after a few hundred steps"
                )


class Progress:
    """The losses of an epoch's steps, in order: their sum, and a progress bar that shows the latest one."""

    def __init__(self, epoch: int, examples: int, batch_size: int, steps: int, loss_sum: float) -> None:
        """steps, loss_sum: the values for an earlier part of the epoch."""
        self.title, self.examples, self.batch_size = f"epoch {epoch}", examples, batch_size
        self.steps, self.loss_sum = steps, loss_sum
        options = {"unit": " examples", "unit_scale": True, "desc": self.title}
        self.bar = log.progress(total=examples, initial=steps * batch_size, **options)

    def update(self, losses: np.ndarray) -> None:
        """Add the next step's losses (n,). Raises Error if they are not finite."""
        self.bar.update(min(self.batch_size, self.examples - self.steps * self.batch_size))
        self.steps += 1
        if not len(losses):  # this worker got no examples from a small last batch
            return
        loss = losses.mean(dtype=np.float64)
        self.loss_sum += loss * len(losses)
        if not np.isfinite(loss):
            where = f"{self.title}, step {self.steps}"
            raise Error(f"the loss is not finite at {where}: training stopped; try a smaller {setting('lr')}")
        self.bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
