"""The training loop of both lessons: shuffle, train, evaluate, print and record, epoch by epoch.

The loop imports neither `scratch` nor `highlevel`; it calls the methods of each lesson's `Replicas`.
"""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import nd
from mxnet.ndarray import NDArray

from gluon_mgpu.distributed.workers import Workers, join
from gluon_mgpu.runtime import devices, engine, log
from gluon_mgpu.runtime.errors import Error, Interrupted, UsageError
from gluon_mgpu.training import datasets, records, timeline
from gluon_mgpu.training.batches import batches, read_behind, shuffled, split_by_shares
from gluon_mgpu.training.interrupt import CtrlC, as_keyboard_interrupt
from gluon_mgpu.training.replicas import Replicas, check_model, implementation_name
from gluon_mgpu.training.settings import BUILT_IN, Settings, add_model

# {setting: the lesson's function that a step does not call if this setting is used}
BYPASSED = {"momentum": "sgd", "weight_decay": "sgd", "shares": "split_and_load"}


def train(
    lesson: type[Replicas],
    num_gpus: int | Sequence[int],
    batch_size: int,
    lr: float,
    *,
    device: str = "auto",
    kvstore: str = "local",
    compress: str | None = None,
    data_dir: str | Path | None = None,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    tensorboard: bool = False,
    verbose: bool = False,
    profile: str | Path | None = None,
    **options: Any,
) -> list[records.Epoch]:
    """Train, and print the same lines as the notebook. Returns one `records.Epoch` per epoch.

    lesson: the lesson's class `Replicas`. num_gpus: number of devices, or their indices ([0, 2]). batch_size: examples
    per step, across all devices. lr: learning rate. device: "auto", "gpu" or "cpu". kvstore, compress: see
    `distributed.workers.join`. data_dir: see `datasets.load`. out: folder for the run's files. resume: folder of an
    earlier run, which continues from its checkpoint; only the settings epochs and shares can be changed. tensorboard:
    also log the metrics of each epoch to TensorBoard. verbose: also print all settings, as in config.json. profile: a
    file for `timeline.Recorder`. options: the other fields of `Settings` (epochs, dataset, momentum, ...), and the
    options in the lesson's `Replicas.own_options`.
    Raises UsageError for invalid arguments, Error if a loss or a parameter is not finite, and KeyboardInterrupt on
    Ctrl-C, once the step is complete and the checkpoint is saved.
    """
    own = {name: options.pop(name) for name in lesson.own_options if name in options}
    options["model"] = _model_name(lesson, own.get("net"), own.get("params"), options.get("model", "lenet"))
    settings = Settings.create(batch_size, lr, **options)
    _check_replaced(lesson, settings)
    ctx = devices.contexts(num_gpus, device)
    config: dict[str, Any] = {"impl": implementation_name(lesson), "kvstore": kvstore, "compress": compress}
    with as_keyboard_interrupt(), join(kvstore, compress) as workers:
        _check_batch(settings, len(ctx), workers)
        given = {"resume": bool(resume), "profile": bool(profile), **({} if resume else asdict(settings))}
        flags = {name: own.get(name, True) for name in lesson.flags}
        if resume:  # only worker 0 may be able to read the run's tuning plan
            flags = {name: bool(value) for name, value in flags.items()}
        workers.agree({**config, **flags, **given})
        first = workers.rank == 0  # only worker 0 prints and writes files
        with records.Run(out, resume, tensorboard) if first else records.Run() as run:
            settings, position, arrays = run.start(settings)
            if settings.seed is None:
                settings = replace(settings, seed=secrets.randbelow(2**31))
            start = workers.all_gather({"settings": asdict(settings), "position": position.as_json()})[0]
            settings, position = Settings(**start["settings"]), records.Position.from_json(start["position"])
            if len(position.history) == settings.epochs and not profile:
                run.end(position)  # if the run was killed, metrics.jsonl or curves.png may be out of date
                return position.history
            data = datasets.load(settings.dataset, data_dir, settings.limit, settings.seed)
            if settings.shares == "auto":
                equal = replace(settings, shares=None)
                settings = replace(settings, shares=measured_shares(lesson(ctx, equal, **own), data))
            mx.random.seed(settings.seed)
            replicas = lesson(ctx, settings, workers, **own)
            replaced = _replaced(lesson, "train_batch")
            if replicas.extras and replaced:
                raise UsageError(
                    f"{replaced} is your own function, but a step with several workers, grad_accum_steps, "
                    f"max_grad_norm or shares, or in scratch with momentum or weight_decay, does not call it"
                )
            if replicas.running_stats and (compress or "").startswith("2bit"):
                raise UsageError(f"compress={compress}: would also compress the running statistics; omit this setting")
            if arrays is not None:
                records.restore(replicas, arrays, run.folder)
            if workers.count > 1:
                workers.agree({"data with checksum": data.checksum()})
                replicas.load_state_dict(workers.broadcast(replicas.state_dict()))
            training = Training(replicas, data, position, run)
            recorder = training.recorder(profile) if profile and first else None
            where = {"devices": [str(c) for c in ctx], "threads": engine.openmp_threads(), "workers": workers.count}
            own_config = {**replicas.own_config, **asdict(settings), **where, "data": data.source}
            config |= own_config
            if verbose:
                log.say(", ".join(f"{name}: {value}" for name, value in config.items()))
            run.begin(config, replicas, position)
            devices.say_if_no_gpu(ctx, device)
            return training.train(recorder)


def _model_name(lesson: type[Replicas], net: Any, params: Any, model: str) -> str:
    """Return the network's name in the run's records. Raises UsageError if the network cannot be trained."""
    if (net is None) != (not params):
        raise UsageError("pass both net and params, the network's initial parameters, or neither")
    if net is None:
        check_model(lesson, model)
        return model
    name = getattr(net, "__name__", "net")
    if name in BUILT_IN:
        raise UsageError(f"net={name}: this package already has a network with this name; rename the function")
    add_model(name)
    return name


def _check_replaced(lesson: type[Replicas], settings: Settings) -> None:
    """Raise UsageError if the caller has replaced a function of the lesson that these settings bypass."""
    for name, bypassed in BYPASSED.items():
        replaced = _replaced(lesson, bypassed)
        if getattr(settings, name) and replaced:
            raise UsageError(f"{name}={getattr(settings, name)}: would bypass your own {replaced}; omit this setting")


def _replaced(lesson: type[Replicas], name: str) -> str:
    """The full name of a lesson's function if the caller has replaced it, otherwise ""."""
    function = getattr(sys.modules.get(lesson.__module__), name, None)
    home = getattr(function, "__globals__", {}).get("__name__", "")  # functools.wraps copies __module__
    return f"{implementation_name(lesson)}.{name}" if function and not home.startswith("gluon_mgpu.") else ""


class Training:
    """A run in progress."""

    def __init__(
        self, replicas: Replicas, data: datasets.Dataset, position: records.Position, run: records.Run
    ) -> None:
        self.replicas, self.data, self.position, self.run = replicas, data, position, run
        self.settings, self.workers = replicas.settings, replicas.workers
        self.examples = len(data.train_labels)
        self.steps_per_epoch = -(-self.examples // self.settings.batch_size)

    @property
    def step(self) -> int:
        """The number of steps issued since the start of the run."""
        return len(self.position.history) * self.steps_per_epoch + self.position.steps

    def recorder(self, profile: str | Path) -> timeline.Recorder:
        """Create a recorder for this run's steps. Raises UsageError if the steps cannot be recorded."""
        settings, ctx = self.settings, self.replicas.ctx
        impl = implementation_name(type(self.replicas))
        about = f"{settings.model}, {impl}, {len(ctx)} device{'s' * (len(ctx) > 1)}, batch {settings.batch_size}"
        if self.workers.count > 1:
            about += f", worker 0 of {self.workers.count}"
        total = settings.epochs * self.steps_per_epoch
        return timeline.Recorder(profile, ctx, about, total, self.steps_per_epoch, self.step)

    def train(self, recorder: timeline.Recorder | None) -> list[records.Epoch]:
        """Train the remaining epochs. On Ctrl-C, raises Interrupted; its one-line message says what was saved."""
        self.record_step = recorder.step if recorder else nullcontext
        with recorder or nullcontext(), CtrlC(self.workers, checkpoint=self.run.saves) as self.ctrl_c:
            if self.workers.rank == 0:
                more = [f"as worker 0 of {self.workers.count}"] if self.workers.count > 1 else []
                print("running on:", self.replicas.ctx, *more, flush=True)
            try:
                while len(self.position.history) < self.settings.epochs:
                    self._train_epoch()
                    self._evaluate()
                    self.run.end_epoch(self.replicas, self.position)
            except Interrupted:
                raise Interrupted(self.run.interrupt(self.replicas, self.position)) from None
        self.run.end(self.position)
        return self.position.history

    def _train_epoch(self) -> None:
        """Train the rest of an epoch. Raises Interrupted on Ctrl-C, and Error if a loss or parameter is not finite."""
        position, settings, workers = self.position, self.settings, self.workers
        assert settings.seed is not None  # `train` has chosen a seed
        size, title = settings.batch_size, f"epoch {len(position.history) + 1}"
        order = shuffled(self.examples, settings.seed, len(position.history) + 1)[position.steps * size :]
        train_iter = batches(self.data.train_images, self.data.train_labels, size, order, workers.part)
        issued = (self._train_batch(X, y) for X, y in self.ctrl_c.steps(train_iter, lambda: self.step))
        loss_sum = position.loss_sum if workers.rank == 0 else 0.0
        start = time.perf_counter() - position.seconds
        done = position.steps * size
        with log.progress(total=self.examples, initial=done, unit=" examples", unit_scale=True, desc=title) as bar:
            for step, losses in enumerate(read_behind(issued), position.steps + 1):
                bar.update(min(size, self.examples - (step - 1) * size))
                if not len(losses):  # this worker got no examples from a small last batch
                    continue
                loss = losses.mean(dtype=np.float64)
                loss_sum += loss * len(losses)
                if not np.isfinite(loss):
                    raise Error(f"the loss is not finite at {title}, step {step}: training stopped; try a smaller lr")
                bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
        nd.waitall()
        loss_sums, stopping = zip(*workers.all_gather([loss_sum, workers.stopping]))
        position.loss_sum, position.seconds = sum(loss_sums), time.perf_counter() - start
        self.replicas.sync_running_stats()
        # ReLU turns nan into 0, so the losses can be finite even if some parameters are not.
        broken = [name for name, values in self.replicas.parameters().items() if not np.isfinite(values).all()]
        if broken:
            raise Error(
                f"parameters are not finite in {title} ({', '.join(broken)}): training stopped; try a smaller lr"
            )
        if self.ctrl_c.stopped or any(stopping):
            raise Interrupted

    def _train_batch(self, X: NDArray | None, y: NDArray | None) -> list[NDArray]:
        lr = self.settings.learning_rate(self.step, self.steps_per_epoch)
        batch_size = min(self.settings.batch_size, self.examples - self.position.steps * self.settings.batch_size)
        with self.record_step():
            losses = self.replicas.train_batch(X, y, lr, batch_size)
        self.position.steps += 1
        return losses

    def _evaluate(self) -> None:
        """Measure and print the test accuracy, and finish the epoch. Each worker evaluates a part of the test set."""
        data, position, workers = self.data, self.position, self.workers
        part = workers.part(len(data.test_labels))
        images, labels = data.test_images[part], data.test_labels[part]
        correct: int | None = 0
        try:
            if len(labels):
                test_iter = batches(images, labels, self.settings.batch_size)
                accuracy = self.replicas.evaluate_accuracy(self.ctrl_c.between(test_iter))
                correct = round(accuracy * len(labels))
        except Interrupted:
            correct = None
        of_workers = workers.all_gather(None if workers.stopping else correct)
        if None in of_workers:
            raise Interrupted
        test_acc = sum(of_workers) / len(data.test_labels)
        lr = self.settings.learning_rate(self.step - 1, self.steps_per_epoch)  # the learning rate of the last step
        position.end_epoch(self.examples, test_acc, lr)
        if workers.rank == 0:
            epoch = position.history[-1]
            print(f"epoch {epoch.epoch}, time: {epoch.train_seconds:.1f} sec, test acc: {test_acc:.2f}", flush=True)


def _check_batch(settings: Settings, devices_here: int, workers: Workers) -> None:
    """Raise UsageError if a batch cannot be split across the devices as the settings require."""
    total = sum(workers.exchange_device_counts(devices_here))
    if settings.batch_size < total:
        raise UsageError(f"batch_size={settings.batch_size}: must be at least {total}, the number of devices")
    shares = settings.shares
    if shares is None:
        return
    shown = shares if isinstance(shares, str) else devices.joined(shares)
    if workers.count > 1:
        raise UsageError(f"shares={shown}: works only with a single worker; omit it")
    if devices_here == 1:
        raise UsageError(f"shares={shown}: needs several devices; omit it")
    if isinstance(shares, tuple) and len(shares) != devices_here:
        raise UsageError(f"shares={shown}: {len(shares)} shares for {devices_here} devices")


def measured_shares(replicas: Replicas, data: datasets.Dataset, rounds: int = 3, steps: int = 5) -> tuple[int, ...]:
    """Measure each device's speed. Returns proportional shares, which sum to 100, or to 10 per device if that is more.

    All devices compute the gradients of their shards at the same time, and each device is timed. After each round, the
    shares are adjusted. The first step of each round is a warm-up, and its time is ignored.
    """
    ctx, settings = replicas.ctx, replicas.settings
    n = max(len(ctx), -(-settings.batch_size // settings.grad_accum_steps))
    if n > len(data.train_labels):
        few = f"measuring shares takes {n} examples, but there are only {len(data.train_labels)}"
        raise UsageError(f"batch_size={settings.batch_size}: {few}; omit shares=auto")
    X, y = next(batches(data.train_images, data.train_labels, n))
    assert X is not None and y is not None
    shares: tuple[float, ...] = (1,) * len(ctx)
    with ThreadPoolExecutor(len(ctx)) as waiting:

        def seconds() -> list[float]:
            nd.waitall()
            start = time.perf_counter()

            def done(grads: dict[str, NDArray]) -> float:
                for grad in grads.values():
                    grad.wait_to_read()
                return time.perf_counter() - start

            replicas.forward_backward(split_by_shares(X, ctx, shares), split_by_shares(y, ctx, shares))
            return list(waiting.map(done, replicas.grads()))

        for _ in range(rounds):
            seconds()
            times = np.median([seconds() for _ in range(steps)], axis=0)
            speeds = np.array(devices.shard_sizes(n, len(ctx), shares)) / times
            shares = tuple(devices.shard_sizes(max(100, 10 * len(ctx)), len(ctx), tuple(speeds)))
    log.say(f"shares=auto measured the devices and chose {devices.joined(shares)}")
    return tuple(int(share) for share in shares)
