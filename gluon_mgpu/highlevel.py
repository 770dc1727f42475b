"""LeNet on several devices with Gluon, which does what `scratch` writes out, function for function.

`initialize` with a list of contexts copies the parameters, `gluon.utils` splits the batch, and `Trainer.step` sums the
gradients and updates every replica. Source: the notebook "Training on multiple GPUs with gluon" (The Straight Dope).
"""

from gluon_mgpu import engine

engine.configure()

import mxnet as mx  # noqa: E402
import numpy as np  # noqa: E402
from mxnet import autograd, gluon, nd  # noqa: E402

from gluon_mgpu import devices, loop  # noqa: E402
from gluon_mgpu.errors import UsageError  # noqa: E402

PARAMETERS = ("W1", "b1", "W2", "b2", "W3", "b3", "W4", "b4")
POOLING = {"avg": gluon.nn.AvgPool2D, "max": gluon.nn.MaxPool2D}

loss = gluon.loss.SoftmaxCrossEntropyLoss()


def lenet(pooling="avg"):
    """LeNet for images (n, 1, 28, 28), not yet initialized. pooling: "avg" as in `scratch`, or "max"."""
    if pooling not in POOLING:
        raise UsageError(f"pooling {pooling!r}: choose one of {', '.join(POOLING)}")
    net = gluon.nn.HybridSequential(prefix="cnn_")
    with net.name_scope():
        net.add(
            gluon.nn.Conv2D(channels=20, kernel_size=3, activation="relu"),
            POOLING[pooling](pool_size=(2, 2), strides=(2, 2)),
            gluon.nn.Conv2D(channels=50, kernel_size=5, activation="relu"),
            POOLING[pooling](pool_size=(2, 2), strides=(2, 2)),
            gluon.nn.Flatten(),
            gluon.nn.Dense(128, activation="relu"),
            gluon.nn.Dense(10),
        )
    return net


def initialize(net, ctx, init=None, hybridize=True):
    """Put a replica of the net on each device. init: an mxnet initializer, or None for normal(0, 0.01) as in `scratch`.

    hybridize: run the net as one graph, its memory planned once, instead of operator by operator.
    """
    net.initialize(init or mx.init.Normal(0.01), ctx=ctx)
    if hybridize:
        net.hybridize(static_alloc=True, static_shape=True)
    for c in ctx:  # Gluon learns the shapes, and makes the parameters, at the first forward
        net(nd.zeros((1, 1, 28, 28), ctx=c))


def split_and_load(data, ctx):
    """Split a batch into shards, as even as can be, one on each device; no shard where there is no example."""
    return gluon.utils.split_and_load(data, ctx[: data.shape[0]], even_split=False)


def forward_backward(net, Xs, ys, ctx):
    """Gradients on every device; returns the losses of each shard. A device without an example gets gradients of 0."""
    used = len(Xs)
    Xs, ys = ([*shards, *(shards[0].as_in_context(c) for c in ctx[used:])] for shards in (Xs, ys))
    with autograd.record():
        losses = [loss(net(X), y) for X, y in zip(Xs, ys)]
    for shard_loss in losses[:used]:
        shard_loss.backward()
    for shard_loss in losses[used:]:
        shard_loss.backward(nd.zeros_like(shard_loss))
    return losses[:used]


def train_batch(X, y, net, ctx, trainer):
    """One step on a global batch: X (n, 1, 28, 28), y (n,). Returns the losses of each shard, still being computed."""
    losses = forward_backward(net, split_and_load(X, ctx), split_and_load(y, ctx), ctx)
    trainer.step(X.shape[0])  # allreduce, then the same update on each device
    return losses


def evaluate_accuracy(data_iter, net, ctx):
    """The share of examples whose highest score is their label's. Every device scores its shard of each batch."""
    right = (
        [
            net(X_shard).argmax(axis=1) == y_shard
            for X_shard, y_shard in zip(split_and_load(X, ctx), split_and_load(y, ctx))
        ]
        for X, y in data_iter
    )
    return float(np.concatenate(list(loop.read_behind(right))).mean(dtype=np.float64))


class Replicas:
    """What `loop` drives: a net on every device, and its Trainer."""

    def __init__(self, ctx, lr, net=None, hybridize=True, init=None):
        engine.check(ctx)
        self.ctx, self.net = ctx, net or lenet()
        initialize(self.net, ctx, init, hybridize)
        self.trainer = gluon.Trainer(self.net.collect_params(), "sgd", {"learning_rate": lr}, kvstore="device")

    def train_batch(self, X, y):
        return train_batch(X, y, self.net, self.ctx, self.trainer)

    def evaluate_accuracy(self, data_iter):
        return evaluate_accuracy(data_iter, self.net, self.ctx)

    def parameters(self):
        params = self.net.collect_params().values()
        return {name: p.data(self.ctx[0]).asnumpy() for name, p in zip(PARAMETERS, params)}


def train(num_gpus, batch_size, lr, hybridize=True, **settings):
    """The notebook's experiment with Gluon: prints time and accuracy an epoch.

    num_gpus: how many devices, or which ([0, 2]). batch_size: the global one. settings: `loop.run`'s, and device.
    """
    ctx = devices.contexts(num_gpus, settings.pop("device", "auto"))
    return loop.run(lambda: Replicas(ctx, lr, hybridize=hybridize), ctx, batch_size, **settings)
