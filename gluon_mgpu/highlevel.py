"""LeNet, and ResNet-18, on several devices with Gluon, which does what `scratch` writes out, function for function.

`initialize` with a list of contexts copies the parameters, `gluon.utils` splits the batch, and `Trainer.step` sums the
gradients and updates every replica. Source: the notebook "Training on multiple GPUs with gluon" (The Straight Dope).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from gluon_mgpu.runtime import engine

engine.configure()

import mxnet as mx  # noqa: E402
from mxnet import Context, autograd, gluon, nd  # noqa: E402
from mxnet.gluon import nn  # noqa: E402
from mxnet.ndarray import NDArray  # noqa: E402

from gluon_mgpu.distributed.stores import TrainersStore  # noqa: E402
from gluon_mgpu.distributed.workers import Workers, join  # noqa: E402
from gluon_mgpu.runtime import devices  # noqa: E402
from gluon_mgpu.runtime.errors import UsageError  # noqa: E402
from gluon_mgpu.training import checkpoint, loop, shared_memory  # noqa: E402
from gluon_mgpu.training import tuning as blocks  # noqa: E402
from gluon_mgpu.training.records import Epoch  # noqa: E402
from gluon_mgpu.training.settings import MODELS as settings_models  # noqa: E402
from gluon_mgpu.training.settings import SGD, Settings, Shares, shard_sizes  # noqa: E402

POOLING = {"avg": nn.AvgPool2D, "max": nn.MaxPool2D}

loss = gluon.loss.SoftmaxCrossEntropyLoss()
# One call in place of five saves Python 0.2 ms a step on 2 devices, of a core that the contexts need.
loss.hybridize(static_alloc=True, static_shape=True)


def lenet(pooling: str = "avg") -> nn.HybridSequential:
    """LeNet for images (n, 1, 28, 28), not yet initialized. pooling: "avg" as in `scratch`, or "max"."""
    if pooling not in POOLING:
        raise UsageError(f"pooling {pooling!r}: choose one of {', '.join(POOLING)}")
    first, second = 20, 50  # channels, to which blocks adds some and takes them away again
    net = blocks.InPieces(prefix="cnn_")
    with net.name_scope():
        net.add(
            blocks.Conv2D(channels=first, in_channels=1, kernel_size=3, activation="relu"),
            POOLING[pooling](pool_size=(2, 2), strides=(2, 2)),
            blocks.Conv2D(channels=second, in_channels=first, kernel_size=5, activation="relu"),
            POOLING[pooling](pool_size=(2, 2), strides=(2, 2)),
            blocks.First(second),
            nn.Flatten(),
            nn.Dense(128, activation="relu"),
            nn.Dense(10),
        )
    return net


class Residual(nn.HybridBlock):
    """Two 3x3 convolutions, and their input added to what they give: (n, c, h, w) to (n, channels, h/stride, w/stride).

    Where the shape changes, a 1x1 convolution brings the input to it. Source: He et al., arXiv:1512.03385.
    """

    def __init__(self, channels: int, stride: int = 1, change_shape: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2D(channels, kernel_size=3, strides=stride, padding=1)
        self.bn1 = nn.BatchNorm()
        self.conv2 = nn.Conv2D(channels, kernel_size=3, padding=1)
        self.bn2 = nn.BatchNorm()
        self.conv3 = nn.Conv2D(channels, kernel_size=1, strides=stride) if change_shape else None

    def hybrid_forward(self, F: ModuleType, X: NDArray) -> NDArray:
        Y = F.Activation(self.bn1(self.conv1(X)), act_type="relu")
        Y = self.bn2(self.conv2(Y))
        return F.Activation(Y + (self.conv3(X) if self.conv3 else X), act_type="relu")


def resnet18() -> nn.HybridSequential:
    """ResNet-18 for images (n, 1, 28, 28), not yet initialized: a 3x3 stem, no pooling after it (Dive into Deep
    Learning's variant for small images)."""
    net = nn.HybridSequential(prefix="resnet_")
    with net.name_scope():
        net.add(nn.Conv2D(64, kernel_size=3, padding=1), nn.BatchNorm(), nn.Activation("relu"))  # (n, 64, 28, 28)
        for channels in (64, 128, 256, 512):  # the last stage gives (n, 512, 4, 4)
            smaller = channels > 64
            net.add(Residual(channels, 1 + smaller, smaller), Residual(channels))
        net.add(nn.GlobalAvgPool2D(), nn.Flatten(), nn.Dense(10))
    return net


NORMAL = mx.init.Normal(0.01)  # scratch's
IMAGE = 1, 28, 28


class Model(NamedTuple):
    """A network of `Settings.model`. build: gives a new net, not yet initialized. init: of its weights. names: of its
    arrays in checkpoints, where they are not Gluon's."""

    build: Callable[[], gluon.HybridBlock]
    init: mx.init.Initializer
    names: tuple[str, ...] = ()


MODELS = {
    "lenet": Model(lenet, NORMAL, checkpoint.LENET),
    "lenet-max": Model(lambda: lenet("max"), mx.init.Uniform(0.07), checkpoint.LENET),  # as in its notebook
    "resnet18": Model(resnet18, NORMAL),
}


def add_model(name: str, build: Callable[[], gluon.HybridBlock], init: mx.init.Initializer = NORMAL) -> None:
    """Give `train`, and all that reads its runs in this process, a network of one's own as `model=name`.

    build: gives a new net for images (n, 1, 28, 28) in [0, 1] and 10 classes, whose layers are registered in the order
    in which they compute, as a HybridSequential's are, and share no parameter. init: of its weights.
    """
    MODELS[name] = Model(build, init)
    if name not in settings_models:
        settings_models.append(name)


def initialize(
    net: gluon.Block,
    ctx: list[Context],
    hybridize: bool = True,
    init: mx.init.Initializer = NORMAL,
    shape: tuple[int, ...] = IMAGE,
) -> None:
    """Put a replica of the net on each device: weights drawn once, normal(0, 0.01) as in `scratch`, biases zero.

    hybridize: run the net as one graph, its memory planned once, instead of operator by operator. shape: of an example.
    """
    net.initialize(init, ctx=ctx)
    if hybridize:
        net.hybridize(static_alloc=True, static_shape=True)
    for c in ctx:  # Gluon learns the shapes, and makes the parameters, at the first forward
        net(nd.zeros((1, *shape), ctx=c))


def split_and_load(data: NDArray, ctx: list[Context], shares: Shares = None) -> list[NDArray]:
    """Split a batch into shards, one on each device, as even as can be or by shares (80, 20); none without examples."""
    if shares is None:
        return gluon.utils.split_and_load(data, ctx[: data.shape[0]], even_split=False)
    sizes = shard_sizes(data.shape[0], len(ctx), shares)  # Gluon splits evenly only
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [data[end - size : end].as_in_context(c) for size, end, c in zip(sizes, ends, ctx) if size]


def forward_backward(net: gluon.Block, Xs: list[NDArray], ys: list[NDArray]) -> list[NDArray]:
    """Gradients on each device that has a shard; returns the losses of each shard."""
    with autograd.record():  # the loss is computed separately on each device
        losses = [loss(net(X), y) for X, y in zip(Xs, ys)]
    for shard_loss in losses:  # backpropagation runs separately on each device
        shard_loss.backward()
    return losses


def zero_gradients(net: gluon.Block, ctx: Context, shape: tuple[int, ...] = IMAGE) -> None:
    """Gradients of 0 on a device that has no example of its own: Trainer wants all computed. shape: of an example."""
    with autograd.record():
        scores = net(nd.zeros((1, *shape), ctx=ctx))
    scores.backward(nd.zeros_like(scores))


def train_batch(
    X: NDArray | None,
    y: NDArray | None,
    net: gluon.Block,
    ctx: list[Context],
    trainer: gluon.Trainer,
    settings: Settings = SGD,
    batch_size: int = 0,
) -> list[NDArray]:
    """One step on a global batch: X (n, 1, 28, 28), y (n,).

    settings: what a step does beyond the notebook's; to accumulate, gradients must be of the kind "add". batch_size: of
    the global batch where X and y are only this process's part of it, None where it has no part; the trainer's store
    then sums over all processes. Returns the losses of each shard, still being computed: nothing here waits for the
    engine.
    """
    own = 0 if X is None else X.shape[0]
    n = batch_size or own
    if settings.accumulate > 1:  # gradients add up
        net.collect_params().zero_grad()
    losses = []
    for X_piece, y_piece in loop.pieces(X, y, settings.accumulate) if own else ():
        Xs, ys = (split_and_load(piece, ctx, settings.shares) for piece in (X_piece, y_piece))
        losses += forward_backward(net, Xs, ys)
    used = {shard_loss.context for shard_loss in losses}
    for c in ctx:
        if c not in used:  # a device without an example adds nothing to the sum
            zero_gradients(net, c, IMAGE if X is None else X.shape[1:])
    if not settings.clip_norm:
        trainer.step(n)  # allreduce, then the same update on each device
    else:
        trainer.allreduce_grads()
        for c in ctx:  # the norm is of the mean over the batch; the gradients are sums
            grads = [p.grad(c) for p in net.collect_params().values() if p.grad_req != "null"]
            gluon.utils.clip_global_norm(grads, settings.clip_norm * n, check_isfinite=False)
        trainer.update(n)
    return losses


def predict(X: NDArray, net: gluon.Block, ctx: list[Context], shares: Shares = None) -> list[NDArray]:
    """Scores (n, 10) of a batch, in one shard a device, still being computed."""
    return [net(X_shard) for X_shard in split_and_load(X, ctx, shares)]


def evaluate_accuracy(
    data_iter: Iterable[loop.Batch], net: gluon.Block, ctx: list[Context], shares: Shares = None
) -> float:
    """The share of examples whose highest score is their label's. Every device scores its shard of each batch."""
    right = (
        [
            scores.argmax(axis=1) == y_shard
            for scores, y_shard in zip(predict(X, net, ctx, shares), split_and_load(y, ctx, shares))
        ]
        for X, y in data_iter
    )
    return loop.mean(right)


class Replicas:
    """What `loop` drives: a net on every device, and its Trainer."""

    def __init__(
        self, ctx: list[Context], settings: Settings = SGD, hybridize: bool = True, workers: Workers | None = None
    ) -> None:
        engine.check(ctx)
        model = MODELS[settings.model]
        self.ctx, self.settings, self.workers, self.net = ctx, settings, workers, model.build()
        self.batch_size = 0  # of the last step, over all workers
        initialize(self.net, ctx, hybridize, model.init)
        named = self.net._collect_params_with_prefix()
        self.named = dict(zip(model.names or named, named.values()))
        self.trained = {name: p for name, p in self.named.items() if p.grad_req != "null"}
        # Batch normalization's; other arrays without a gradient stay as they are.
        counted = "running_mean", "running_var"
        self.statistics: Sequence[gluon.Parameter] = [p for n, p in self.named.items() if n.endswith(counted)]
        if self.statistics and workers and str(workers.compress).startswith("2bit"):
            raise UsageError(
                f"--compress {workers.compress} --model {settings.model}: its running statistics would be sent in 2 "
                "bits too; leave --compress away"
            )
        if settings.accumulate > 1:
            for p in self.trained.values():
                p.grad_req = "add"
        # The store sums the gradients; each device then updates its own replica, as in `scratch`.
        rule = {"learning_rate": settings.peak_lr, "momentum": settings.momentum, "wd": settings.weight_decay}
        store = shared_memory.Store() if shared_memory.serves(ctx) else "device"
        if workers:
            store = TrainersStore(ctx, workers)
        self.trainer = gluon.Trainer(list(self.trained.values()), "sgd", rule, kvstore=store, update_on_kvstore=False)

    def train_batch(self, X: NDArray | None, y: NDArray | None, lr: float, batch_size: int = 0) -> list[NDArray]:
        self.trainer.set_learning_rate(lr)
        own = 0 if X is None else X.shape[0]
        if batch_size != self.batch_size:  # for all workers alike, since it is the global one
            self.settle()
            self.batch_size, self.part = batch_size, own / batch_size
        losses = train_batch(X, y, self.net, self.ctx, self.trainer, self.settings, batch_size)
        if self.statistics and len(self.ctx) > 1 and own:
            self._average_statistics(losses, own)
        return losses

    def settle(self) -> None:
        """All workers call it: makes their running statistics one, weighted by their parts of a batch.

        Not in each step: a step adds to the statistics alone, so that averages may be taken later. And a hybridized net
        writes them unseen by the engine, so that a sum over workers, which is not computed in a context's own thread,
        has to wait for all steps, and all steps for it.
        """
        if not (self.workers and self.statistics and self.batch_size):
            return
        nd.waitall()
        average = nd.concat(*[p.data(self.ctx[0]) for p in self.statistics], dim=0).as_in_context(mx.cpu()) * self.part
        self.workers.allreduce(average, "statistics")
        self._set_statistics(average)
        nd.waitall()

    def forward_backward(self, X: NDArray, y: NDArray, shares: Shares) -> list[NDArray]:
        """Gradients on each device alone; returns an array of each that is ready when the device is done."""
        Xs, ys = (split_and_load(data, self.ctx, shares) for data in (X, y))
        forward_backward(self.net, Xs, ys)
        return next(iter(self.trained.values())).list_grad()

    def _average_statistics(self, losses: list[NDArray], n: int) -> None:
        """Batch normalization counts its running mean and variance on each device by itself. Their mean over the
        devices, weighted by examples, keeps the replicas equal, so that any device evaluates as any other."""
        weights = [sum(x.shape[0] for x in losses if x.context == c) / n for c in self.ctx]
        # A hybridized net's backward writes them unseen by the engine: what reads them takes in the last gradient too.
        last_gradients = next(iter(self.trained.values())).list_grad()
        weighted = [
            nd.concat(*[p.data(c) for p in self.statistics], last.reshape(-1)[:1], dim=0) * w
            for c, w, last in zip(self.ctx, weights, last_gradients)
        ]
        self._set_statistics(nd.add_n(*[x.as_in_context(self.ctx[0]) for x in weighted]))

    def _set_statistics(self, average: NDArray) -> None:
        for c in self.ctx:
            here, start = average.as_in_context(c), 0
            for p in self.statistics:
                here[start : start + p.shape[0]].copyto(p.data(c))
                start += p.shape[0]

    def predict(self, X: NDArray) -> list[NDArray]:
        return predict(X, self.net, self.ctx, self.settings.shares)

    def evaluate_accuracy(self, data_iter: Iterable[loop.Batch]) -> float:
        return evaluate_accuracy(data_iter, self.net, self.ctx, self.settings.shares)

    def parameters(self, device: int = 0) -> dict[str, np.ndarray]:
        """{name: NumPy array}: what the net computes with, on that device of ctx."""
        nd.waitall()  # a forward under way may put weights into oneDNN's order while they are read (docs/engine.md)
        return {name: p.data(self.ctx[device]).asnumpy() for name, p in self.named.items()}

    def gradients(self, device: int = 0) -> dict[str, np.ndarray]:
        """{name: NumPy array}: the gradients on that device of ctx."""
        return {name: p.grad(self.ctx[device]).asnumpy() for name, p in self.trained.items()}

    def velocities(self) -> dict[str, np.ndarray]:
        """{name: NumPy array}: what momentum remembers; empty without momentum."""
        if not self.settings.momentum:
            return {}
        states = self.trainer._updaters[0].states  # Trainer.save_states would pickle them
        return {
            name: states[i].asnumpy() if i in states else nd.zeros(p.shape).asnumpy()
            for i, (name, p) in enumerate(self.trained.items())
        }

    def load(self, parameters: dict[str, np.ndarray], velocities: dict[str, np.ndarray]) -> None:
        """Go on from arrays that `parameters` and `velocities` gave, of the same names and shapes."""
        for name, p in self.named.items():
            p.set_data(nd.array(parameters[name]))
        for c, updater in zip(self.ctx, self.trainer._updaters):
            for i, name in enumerate(self.trained if velocities else ()):
                updater.states[i] = nd.array(velocities[name], ctx=c)
                updater.states_synced[i] = True


def train(
    num_gpus: int | Sequence[int],
    batch_size: int,
    lr: float,
    *,
    device: str = "auto",
    kvstore: str = "local",
    compress: str | None = None,
    hybridize: bool = True,
    data_dir: str | Path | None = None,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    tensorboard: bool = False,
    profile: str | Path | None = None,
    **settings: Any,
) -> list[Epoch]:
    """The notebook's experiment with Gluon: prints time and accuracy an epoch.

    num_gpus: how many devices, or which ([0, 2]). batch_size: the global one. device: "auto", "gpu" or "cpu".
    kvstore, compress: see `distributed.workers.join`. hybridize: see `initialize`. data_dir, out, resume, tensorboard,
    profile: see `loop.run`. settings: the fields of `Settings`: model, epochs, momentum and so on. Returns a list of
    `records.Epoch`.
    """
    checked = Settings(batch_size, lr, **settings)
    ctx = devices.contexts(num_gpus, device)
    with join(kvstore, compress, checked.model) as workers:
        return loop.run(
            lambda settings: Replicas(ctx, settings, hybridize, workers if workers.count > 1 else None),
            ctx,
            checked,
            config={"impl": "highlevel", "kvstore": kvstore, "compress": compress, "hybridize": hybridize},
            data_dir=data_dir,
            out=out,
            resume=resume,
            tensorboard=tensorboard,
            profile=profile,
            workers=workers,
        )
