"""Lesson 2: LeNet on several devices with Gluon. Each function has a counterpart in `scratch`.

`lenet` builds the network here, and the network itself computes the scores. `initialize` with a list of contexts copies
the parameters, `gluon.utils` splits the batch, and `Trainer.step` sums the gradients and updates every replica.
Source: the notebook "Training on multiple GPUs with gluon" (The Straight Dope), whose `run` is called `train` here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import time

import mxnet as mx
from mxnet import Context, autograd, gluon, nd
from mxnet.gluon import nn
from mxnet.ndarray import NDArray

from gluon_mgpu.compat import devices
from gluon_mgpu.data import datasets

NORMAL = mx.init.Normal(0.01)  # as in scratch.init_params
loss = gluon.loss.SoftmaxCrossEntropyLoss()


def lenet() -> nn.HybridSequential:
    """Build LeNet, uninitialized: net(X) computes scores (n, 10) from images X (n, 1, 28, 28)."""
    net = nn.HybridSequential(prefix="cnn_")
    with net.name_scope():
        net.add(nn.Conv2D(channels=20, kernel_size=3, activation="relu"))  # (n, 20, 26, 26)
        net.add(nn.AvgPool2D(pool_size=(2, 2), strides=(2, 2)))  # (n, 20, 13, 13)
        net.add(nn.Conv2D(channels=50, kernel_size=5, activation="relu"))  # (n, 50, 9, 9)
        net.add(nn.AvgPool2D(pool_size=(2, 2), strides=(2, 2)))  # (n, 50, 4, 4)
        net.add(nn.Flatten())  # (n, 800)
        net.add(nn.Dense(128, activation="relu"))
        net.add(nn.Dense(10))
    return net


def initialize(net: gluon.Block, ctx: list[Context], init: mx.init.Initializer = NORMAL) -> None:
    """Put a replica of the network on each device. The weights are drawn once, with init, so all replicas are equal."""
    net.initialize(init, ctx=ctx)


def split_and_load(data: NDArray, ctx: list[Context]) -> list[NDArray]:
    """Split a batch into shards, one per device. With fewer examples than devices, the last devices get no shard."""
    return gluon.utils.split_and_load(data, ctx[: data.shape[0]], even_split=False)


def forward_backward(net: gluon.Block, data: list[NDArray], label: list[NDArray]) -> list[NDArray]:
    """Compute the gradients of each shard on its device. Returns the losses of each shard, one vector per device."""
    with autograd.record():  # the loss is calculated separately on each device
        losses = [loss(net(X), y) for X, y in zip(data, label)]
    for shard_loss in losses:  # backpropagation runs separately on each device
        shard_loss.backward()
    return losses


def train_batch(X: NDArray, y: NDArray, net: gluon.Block, ctx: list[Context], trainer: gluon.Trainer) -> list[NDArray]:
    """Run one training step on images X (n, 1, 28, 28) and labels y (n,), with one replica on each device in ctx.

    Returns the losses of each shard. This function only queues the step, and does not wait for the devices.
    """
    assert X.shape[0] >= len(ctx), "a batch needs at least one example per device"
    data, label = split_and_load(X, ctx), split_and_load(y, ctx)
    losses = forward_backward(net, data, label)
    trainer.step(X.shape[0])  # sums the gradients, and updates all replicas equally
    return losses


def evaluate_accuracy(
    data_iter: Iterable[tuple[NDArray, NDArray]], net: Callable[[NDArray], NDArray], ctx: list[Context]
) -> float:
    """Compute the fraction of examples whose label has the highest score. Each device scores its shard of each batch.

    net: a function that computes scores on the device of its input.
    """
    accuracy = mx.metric.Accuracy()
    for X, y in data_iter:
        accuracy.update(split_and_load(y, ctx), [net(X_shard) for X_shard in split_and_load(X, ctx)])
    return accuracy.get()[1]


def train(num_gpus: int, batch_size: int, lr: float, epochs: int = 4, seed: int | None = None) -> gluon.Block:
    """Run the notebook's experiment, which the notebook calls `run`. Returns the network, with all its replicas."""
    train_iter, test_iter = datasets.load_fashion_mnist(batch_size, seed)
    ctx = devices.contexts(num_gpus)
    print("running on:", ctx)
    if seed is not None:
        mx.random.seed(seed)
    net = lenet()
    initialize(net, ctx)
    # With update_on_kvstore, one device would compute the updates of all replicas.
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": lr}, update_on_kvstore=False)
    for epoch in range(1, epochs + 1):
        start = time()
        for X, y in train_iter:
            train_batch(X, y, net, ctx, trainer)
        nd.waitall()
        seconds = time() - start
        test_acc = evaluate_accuracy(test_iter, net, ctx)
        print(f"epoch {epoch}, time: {seconds:.1f} sec, test acc: {test_acc:.2f}")
    return net
