"""LeNet on several devices with Gluon, which does what `scratch` writes out, function for function.

`initialize` with a list of contexts copies the parameters, `gluon.utils` splits the batch, and `Trainer.step` sums the
gradients and updates every replica. Source: the notebook "Training on multiple GPUs with gluon" (The Straight Dope).
"""

from gluon_mgpu import engine

engine.configure()

import mxnet as mx  # noqa: E402
from mxnet import autograd, gluon, nd  # noqa: E402

from gluon_mgpu import checkpoint, devices, loop  # noqa: E402
from gluon_mgpu.errors import UsageError  # noqa: E402

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


def initialize(net, ctx, hybridize=True):
    """Put a replica of the net on each device: weights normal(0, 0.01), biases zero, as in `scratch`.

    hybridize: run the net as one graph, its memory planned once, instead of operator by operator.
    """
    net.initialize(mx.init.Normal(0.01), ctx=ctx)
    if hybridize:
        net.hybridize(static_alloc=True, static_shape=True)
    for c in ctx:  # Gluon learns the shapes, and makes the parameters, at the first forward
        net(nd.zeros((1, 1, 28, 28), ctx=c))


def split_and_load(data, ctx):
    """Split a batch into shards, as even as can be, one on each device; no shard where there is no example."""
    return gluon.utils.split_and_load(data, ctx[: data.shape[0]], even_split=False)


def forward_backward(net, Xs, ys):
    """Gradients on each device that has a shard; returns the losses of each shard."""
    with autograd.record():  # the loss is computed separately on each device
        losses = [loss(net(X), y) for X, y in zip(Xs, ys)]
    for shard_loss in losses:  # backpropagation runs separately on each device
        shard_loss.backward()
    return losses


def zero_gradients(net, X):
    """Gradients of 0 on the device of X (n, 1, 28, 28), which has no example of its own: Trainer wants all computed."""
    with autograd.record():
        scores = net(X)
    scores.backward(nd.zeros_like(scores))


def train_batch(X, y, net, ctx, trainer):
    """One step on a global batch: X (n, 1, 28, 28), y (n,).

    Returns the losses of each shard, still being computed: nothing here waits for the engine.
    """
    losses = forward_backward(net, split_and_load(X, ctx), split_and_load(y, ctx))
    for c in ctx[len(losses) :]:  # a device without an example adds nothing to the sum
        zero_gradients(net, X[:1].as_in_context(c))
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
    return loop.mean(right)


class Replicas:
    """What `loop` drives: a net on every device, and its Trainer."""

    def __init__(self, ctx, lr, net=None, hybridize=True):
        engine.check(ctx)
        self.ctx, self.net = ctx, net or lenet()
        initialize(self.net, ctx, hybridize)
        # The store sums the gradients; each device then updates its own replica, as in `scratch`.
        self.trainer = gluon.Trainer(
            self.net.collect_params(), "sgd", {"learning_rate": lr}, kvstore="device", update_on_kvstore=False
        )

    def train_batch(self, X, y):
        return train_batch(X, y, self.net, self.ctx, self.trainer)

    def evaluate_accuracy(self, data_iter):
        return evaluate_accuracy(data_iter, self.net, self.ctx)

    def parameters(self):
        params = self.net.collect_params().values()
        return {name: p.data(self.ctx[0]).asnumpy() for name, p in zip(checkpoint.LENET, params)}


def train(num_gpus, batch_size, lr, *, device="auto", pooling="avg", hybridize=True, **settings):
    """The notebook's experiment with Gluon: prints time and accuracy an epoch.

    num_gpus: how many devices, or which ([0, 2]). batch_size: the global one. device: "auto", "gpu" or "cpu".
    pooling: see `lenet`. hybridize: see `initialize`. settings: epochs, dataset, data_dir, limit, seed, out, as
    `loop.run` describes them. Returns its list of `Epoch`.
    """
    ctx = devices.contexts(num_gpus, device)
    config = {"impl": "highlevel", "lr": lr, "pooling": pooling, "hybridize": hybridize}
    return loop.run(lambda: Replicas(ctx, lr, lenet(pooling), hybridize), ctx, batch_size, config=config, **settings)
