"""The training loop of both lessons: shuffle, train, evaluate, print and record, epoch by epoch.

The loop does not know `scratch` and `highlevel`; it drives the methods of their `Replicas`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import Context, nd
from mxnet.ndarray import NDArray

from gluon_mgpu.distributed.workers import ALONE, Workers, join
from gluon_mgpu.runtime import devices, engine, log
from gluon_mgpu.runtime.errors import Error, Interrupted, UsageError
from gluon_mgpu.training import datasets, records, settings, timeline
from gluon_mgpu.training.batches import batches, read_behind, shuffled, split_by_shares
from gluon_mgpu.training.interrupt import CtrlC
from gluon_mgpu.training.replicas import Replicas, check_model, implementation_name
from gluon_mgpu.training.settings import Settings

Make = Callable[[Settings, Workers], Replicas]


def train(
    replicas: type[Replicas],
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
    profile: str | Path | None = None,
    **options: Any,
) -> list[records.Epoch]:
    """Train and print the notebook's lines. Returns one `records.Epoch` per epoch.

    replicas: the class that implements a lesson's step. num_gpus: how many devices, or which ([0, 2]). batch_size:
    examples per step, over all devices. lr: learning rate. device: "auto", "gpu" or "cpu". kvstore, compress: see
    `distributed.workers.join`. data_dir: see `datasets.load`. out: a folder to keep the run in. resume: the folder of
    an earlier run, to continue it from its checkpoint; its settings cannot change, except epochs and shares.
    tensorboard: write each epoch's numbers for TensorBoard too. profile: a file for `timeline.Recorder`. options: the
    other fields of `Settings` (epochs, dataset, momentum, ...) and the implementation's own (`Replicas.own_options`).
    Raises UsageError for invalid arguments, Error if a loss is not finite, KeyboardInterrupt on Ctrl-C, between two
    steps, after the checkpoint is saved.
    """
    own = {name: options.pop(name) for name in replicas.own_options if name in options}
    options["model"] = _model_name(replicas, own.get("net"), own.get("params"), options.get("model", "lenet"))
    checked = Settings.create(batch_size, lr, **options)
    ctx = devices.contexts(num_gpus, device)
    flags = {name: value for name, value in own.items() if isinstance(value, bool)}
    config = {"impl": implementation_name(replicas), "kvstore": kvstore, "compress": compress, **flags}
    try:
        with join(kvstore, compress, checked.model) as workers:
            return run(
                lambda settings, workers: replicas(ctx, settings, workers, **own),
                ctx,
                checked,
                device=device,
                config=config,
                data_dir=data_dir,
                out=out,
                resume=resume,
                tensorboard=tensorboard,
                profile=profile,
                workers=workers,
            )
    except Interrupted as interruption:
        raise KeyboardInterrupt(*interruption.args) from None


def _model_name(replicas: type[Replicas], net: Any, params: Any, model: str) -> str:
    """The name under which a run records its network. Raises UsageError for a network that cannot be trained."""
    if net is None:
        if params:
            raise UsageError("params: needs net, the network that the parameters belong to")
        check_model(replicas, model)
        return model
    if not params:
        raise UsageError("net: needs params, its initial parameters")
    name = getattr(net, "__name__", "net")
    if name in settings.BUILT_IN:
        raise UsageError(f"net={name}: {name} is the name of a network of this package; rename the function")
    settings.add_model(name)
    return name


def run(
    make_replicas: Make,
    ctx: list[Context],
    settings: Settings,
    *,
    device: str = "cpu",
    config: dict[str, Any],
    data_dir: str | Path | None = None,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    tensorboard: bool = False,
    profile: str | Path | None = None,
    workers: Workers = ALONE,
) -> list[records.Epoch]:
    """What `train` does once the settings are checked and the workers are connected.

    make_replicas: builds the replicas on ctx, called after the random numbers are seeded. config: what config.json says
    about the implementation. workers: this process is one of them, with its own ctx; only worker 0 prints and writes.
    """
    _check_batch(settings, len(ctx), workers)
    workers.agree({**config, "resume": bool(resume), **({} if resume else asdict(settings))})
    first = workers.rank == 0
    with records.Run(out, resume, tensorboard) if first else records.Run() as kept:
        arrays, position = None, records.Position()
        if first:
            settings, arrays, position = kept.position(settings)
            if settings.seed is None:
                settings = replace(settings, seed=int(np.random.SeedSequence().generate_state(1)[0] >> 1))
        decided = workers.all_gather([asdict(settings), position.as_json(), profile is None])[0]  # by worker 0
        settings, position = Settings(**decided[0]), records.Position.from_json(decided[1])
        if len(position.history) == settings.epochs and decided[2]:  # a profile without steps is refused below
            kept.end(position)  # a killed run may lack its last line or picture
            return position.history
        data = datasets.load(settings.dataset, data_dir, settings.limit, settings.seed)
        if settings.shares == "auto":
            settings = replace(settings, shares=measured_shares(make_replicas, ctx, settings, data))
        mx.random.seed(settings.seed)
        replicas = make_replicas(settings, workers)
        if replicas.running_stats and (workers.compress or "").startswith("2bit"):
            raise UsageError(f"compress={workers.compress}: would compress the running statistics too; omit it")
        if arrays is not None:
            kept.restore(replicas, arrays)
        if workers.count > 1:
            workers.agree({"data with checksum": data.checksum()})
            replicas.load_state_dict(workers.broadcast(replicas.state_dict()))
        training = Training(replicas, data, settings, position, kept, workers)
        recorder = training.recorder(profile if first else None, config["impl"])
        where = {"devices": [str(c) for c in ctx], "threads": engine.openmp_threads(), "workers": workers.count}
        workers.on_failure(kept.failed)
        kept.begin({**config, **asdict(settings), **where, "data": data.source}, replicas, position)
        if first:
            devices.say_if_no_gpu(ctx, device)
        return training.run(recorder)


class Training:
    """A run in progress: the state that its epochs share."""

    def __init__(
        self,
        replicas: Replicas,
        data: datasets.Dataset,
        settings: Settings,
        position: records.Position,
        kept: records.Run,
        workers: Workers,
    ) -> None:
        self.replicas, self.data, self.settings, self.position = replicas, data, settings, position
        self.kept, self.workers = kept, workers
        self.examples = len(data.train_labels)
        self.steps_per_epoch = -(-self.examples // settings.batch_size)

    def recorder(self, profile: str | Path | None, impl: str) -> timeline.Recorder:
        """Records steps of this run in a file, if there is one. Raises UsageError if it cannot."""
        settings, ctx = self.settings, self.replicas.ctx
        about = f"{settings.model}, {impl}, {len(ctx)} devices, batch {settings.batch_size}"
        total = settings.epochs * self.steps_per_epoch
        done = len(self.position.history) * self.steps_per_epoch + self.position.steps
        return timeline.Recorder(profile, ctx, about, total, self.steps_per_epoch, done)

    def run(self, recorder: timeline.Recorder) -> list[records.Epoch]:
        """Train the remaining epochs. Raises Interrupted, with one line that says what was saved, on Ctrl-C."""
        position, settings = self.position, self.settings
        with recorder as self.recording, CtrlC(self.workers, checkpoint=self.kept.keeps) as self.ctrl_c:
            if self.workers.rank == 0:
                more = [f"as worker 0 of {self.workers.count}"] if self.workers.count > 1 else []
                print("running on:", self.replicas.ctx, *more, flush=True)
            try:
                while len(position.history) < settings.epochs:
                    self._epoch()
                    self.kept.epoch(self.replicas, position)
            except Interrupted:
                raise Interrupted(self.kept.interrupted(self.replicas, position, self.steps_per_epoch)) from None
        self.kept.end(position)
        return position.history

    def _epoch(self) -> None:
        """Train the rest of an epoch, evaluate, print. Raises Interrupted on Ctrl-C."""
        position, settings, workers = self.position, self.settings, self.workers
        number, size = len(position.history) + 1, settings.batch_size
        before = (number - 1) * self.steps_per_epoch
        assert settings.seed is not None  # `run` drew one
        order = shuffled(self.examples, settings.seed, number)[position.steps * size :]
        start = time.perf_counter() - position.seconds
        train_iter = batches(self.data.train_images, self.data.train_labels, size, order, workers.part)
        position.loss_sum = train_epoch(
            self._train_batch,
            self.ctrl_c.until(train_iter, lambda: before + position.steps),
            self.examples,
            f"epoch {number}",
            position.steps,
            size,
            position.loss_sum if workers.rank == 0 else 0.0,
            workers,
        )
        losses, stopping = zip(*workers.all_gather([position.loss_sum, workers.stopping]))
        position.loss_sum = sum(losses)
        position.seconds = time.perf_counter() - start
        self.replicas.sync_running_stats()
        _refuse_nan(self.replicas.parameters(), number)
        if self.ctrl_c.stopped or any(stopping):
            raise Interrupted
        test_acc = self._evaluate()
        position.end_epoch(self.examples, test_acc, self._learning_rate(before + self.steps_per_epoch - 1))
        if workers.rank == 0:
            seconds = position.history[-1].train_seconds
            print(f"epoch {number}, time: {seconds:.1f} sec, test acc: {test_acc:.2f}", flush=True)

    def _train_batch(self, X: NDArray | None, y: NDArray | None) -> list[NDArray]:
        position = self.position
        lr = self._learning_rate(len(position.history) * self.steps_per_epoch + position.steps)
        batch_size = min(self.settings.batch_size, self.examples - position.steps * self.settings.batch_size)
        with self.recording.step():
            losses = self.replicas.train_batch(X, y, lr, batch_size)
        position.steps += 1
        return losses

    def _learning_rate(self, step: int) -> float:
        return self.settings.learning_rate(step, self.steps_per_epoch)

    def _evaluate(self) -> float:
        """The accuracy on the test set, of which each worker takes a part."""
        data, workers = self.data, self.workers
        own = np.arange(len(data.test_labels))[workers.part(len(data.test_labels))]
        test_iter = batches(data.test_images, data.test_labels, self.settings.batch_size, own)
        correct: int | None = 0
        try:
            if len(own):
                accuracy = self.replicas.evaluate_accuracy(self.ctrl_c.between(test_iter))
                correct = round(accuracy * len(own))
        except Interrupted:
            correct = None
        of_workers = workers.all_gather(None if workers.stopping else correct)
        if None in of_workers:
            raise Interrupted
        return sum(of_workers) / len(data.test_labels)


def train_epoch(
    train_batch: Callable[[NDArray | None, NDArray | None], list[NDArray]],
    train_iter: Iterable[tuple[NDArray | None, NDArray | None]],
    examples: int,
    title: str,
    steps: int = 0,
    batch_size: int = 0,
    loss_sum: float = 0.0,
    workers: Workers = ALONE,
) -> float:
    """Train on each batch once. Returns the sum of this worker's losses, each
    taken from the step that trained on that example.

    examples: how many the whole epoch has. steps: how many steps of batch_size came before; loss_sum: the sum of their
    losses. Raises Error if a loss is not finite.
    """
    issued = (train_batch(X, y) for X, y in train_iter)
    with log.progress(total=examples, initial=steps * batch_size, unit=" examples", unit_scale=True, desc=title) as bar:
        for step, losses in enumerate(read_behind(issued), steps + 1):
            done = len(losses) if workers.count == 1 else min(batch_size, examples - (step - 1) * batch_size)
            bar.update(done)
            if not len(losses):  # this worker got no examples from a small last batch
                continue
            loss = losses.mean(dtype=np.float64)
            loss_sum += loss * len(losses)
            if not np.isfinite(loss):
                raise Error(f"the loss is not finite at {title}, step {step}: stopped; try a smaller lr")
            bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
    nd.waitall()
    return loss_sum


def _refuse_nan(parameters: dict[str, np.ndarray], epoch: int) -> None:
    """ReLU turns nan into 0, so the loss can look fine when the parameters are not."""
    broken = [name for name, values in parameters.items() if not np.isfinite(values).all()]
    if broken:
        raise Error(f"parameters are not finite in epoch {epoch} ({', '.join(broken)}): stopped; try a smaller lr")


def _check_batch(settings: Settings, devices_here: int, workers: Workers) -> None:
    """Raise UsageError if a batch cannot be split over the devices as the settings ask."""
    total = sum(workers.exchange_device_counts(devices_here))
    if settings.batch_size < total:
        raise UsageError(f"batch_size={settings.batch_size}: fewer examples than the {total} devices")
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


def measured_shares(
    make_replicas: Make,
    ctx: list[Context],
    settings: Settings,
    data: datasets.Dataset,
    rounds: int = 3,
    steps: int = 5,
) -> tuple[int, ...]:
    """The share of each device, in proportion to its measured speed; they sum to 100 (more with many devices).

    All devices compute the gradients of their shards at the same time, and each is timed. The next round uses shares in
    proportion to the speeds. The first step of a round warms up and is not counted.
    """
    replicas = make_replicas(replace(settings, shares=None), ALONE)
    n = max(len(ctx), -(-settings.batch_size // settings.grad_accum_steps))
    if n > len(data.train_labels):
        raise UsageError(f"limit={len(data.train_labels)}: too few examples to measure shares; omit shares=auto")
    X, y = next(batches(data.train_images, data.train_labels, n))
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
    log.say(f"--shares auto measured the devices and chose {devices.joined(shares)}")
    return tuple(int(share) for share in shares)
