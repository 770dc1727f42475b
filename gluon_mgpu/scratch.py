"""Lesson 1: LeNet on several devices with NDArray alone. Each part of data parallelism is one function.

`train` runs the notebook's experiment. `gluon-mgpu train` has its own loop (training/loop.py), with checkpoints, and
takes its steps with the same functions. `highlevel` is the same lesson with Gluon.
Source: the notebook "Multi-GPU Computation with Data Parallelism" (Dive into Deep Learning, 2019).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from time import time

import mxnet as mx
from mxnet import Context, autograd, nd
from mxnet.ndarray import NDArray

from gluon_mgpu.compat import devices
from gluon_mgpu.data import datasets

Params = list[NDArray]  # the network's parameters on one device
SHAPES = [(20, 1, 3, 3), (50, 20, 5, 5), (128, 800), (10, 128)]  # of the layers' weights


def init_params(scale: float = 0.01) -> Params:
    """Create LeNet's eight parameters on the host, with weights from normal(0, scale) and zero biases. Dense weights
    have the shape (outputs, inputs), as in Gluon; in the notebook, the shape is (inputs, outputs)."""
    params = []
    for shape in SHAPES:
        params += [nd.random.normal(scale=scale, shape=shape), nd.zeros(shape[0])]
    return params


def lenet(X: NDArray, params: Params) -> NDArray:
    """LeNet with average pooling. X: images (n, 1, 28, 28), values in [0, 1]. Returns scores (n, 10)."""
    W1, b1, W2, b2, W3, b3, W4, b4 = params
    h1_conv = nd.Convolution(data=X, weight=W1, bias=b1, kernel=(3, 3), num_filter=20)  # (n, 20, 26, 26)
    h1_activation = nd.Activation(h1_conv, act_type="relu")  # nd.relu would not use oneDNN
    h1 = nd.Pooling(data=h1_activation, pool_type="avg", kernel=(2, 2), stride=(2, 2))  # (n, 20, 13, 13)
    h2_conv = nd.Convolution(data=h1, weight=W2, bias=b2, kernel=(5, 5), num_filter=50)  # (n, 50, 9, 9)
    h2_activation = nd.Activation(h2_conv, act_type="relu")
    h2 = nd.Pooling(data=h2_activation, pool_type="avg", kernel=(2, 2), stride=(2, 2))  # (n, 50, 4, 4)
    h2 = nd.flatten(h2)  # (n, 50, 4, 4) -> (n, 800)
    h3_linear = nd.FullyConnected(h2, W3, b3, num_hidden=128)  # faster than nd.dot, and safe on several contexts
    h3 = nd.Activation(h3_linear, act_type="relu")
    return nd.FullyConnected(h3, W4, b4, num_hidden=10)


def loss(y_hat: NDArray, y: NDArray) -> NDArray:
    """Compute the softmax cross-entropy (n,) of each example from scores (n, 10) and labels (n,)."""
    return -nd.pick(nd.log_softmax(y_hat), y)


def get_params(params: Params, ctx: Context) -> Params:
    """Copy the parameters to one device, and attach a gradient to each copy. As in the notebook, `ctx` is one
    device here, and a list of devices everywhere else."""
    new_params = [p.copyto(ctx) for p in params]
    for p in new_params:
        p.attach_grad()
    return new_params


def allreduce(data: list[NDArray]) -> None:
    """Sum arrays of the same shape, one per device, in place. Afterward, every device has the sum."""
    for i in range(1, len(data)):
        data[0][:] += data[i].copyto(data[0].context)
    for i in range(1, len(data)):
        data[0].copyto(data[i])


def split_and_load(data: NDArray, ctx: list[Context]) -> list[NDArray]:
    """Split a batch along its first axis and copy one shard to each device.

    If the split is uneven, the first shards get one extra example each. With fewer examples than devices, the last
    devices get no shard.
    """
    size, extra = divmod(data.shape[0], len(ctx))
    shards, start = [], 0
    for i, c in enumerate(ctx[: data.shape[0]]):
        end = start + size + (i < extra)
        shards.append(data[start:end].as_in_context(c))
        start = end
    return shards


def forward_backward(device_params: Sequence[Params], Xs: list[NDArray], ys: list[NDArray]) -> list[NDArray]:
    """Compute the gradients of each shard on its device. Returns the losses of each shard, one vector per device."""
    with autograd.record():  # the loss is calculated separately on each device
        losses = [loss(lenet(X, params), y) for X, y, params in zip(Xs, ys, device_params)]
    for shard_loss in losses:  # backpropagation runs separately on each device
        shard_loss.backward()
    return losses


def sgd(params: Params, lr: float, batch_size: int) -> None:
    """Update the parameters on one device: p -= lr * gradient / batch_size. The gradients are sums over the batch."""
    for p in params:
        nd.sgd_update(p, p.grad, out=p, lr=lr, rescale_grad=1 / batch_size)


def train_batch(
    X: NDArray, y: NDArray, device_params: Sequence[Params], ctx: list[Context], lr: float
) -> list[NDArray]:
    """Run one training step on images X (n, 1, 28, 28) and labels y (n,), with one replica on each device in ctx.

    Returns the losses of each shard. This function only queues the step, and does not wait for the devices.
    """
    assert X.shape[0] >= len(ctx), "a batch needs at least one example per device"
    Xs, ys = split_and_load(X, ctx), split_and_load(y, ctx)
    losses = forward_backward(device_params, Xs, ys)
    for i in range(len(device_params[0])):
        allreduce([params[i].grad for params in device_params])
    for params in device_params:  # the same update on each device keeps the replicas equal
        sgd(params, lr, X.shape[0])
    return losses


def evaluate_accuracy(
    data_iter: Iterable[tuple[NDArray, NDArray]], net: Callable[[NDArray], NDArray], ctx: list[Context]
) -> float:
    """Compute the fraction of examples whose label has the highest score. Each device scores its shard of each batch.

    net: a function that computes scores on the device of its input.
    """
    correct = examples = 0
    for X, y in data_iter:
        shards = zip(split_and_load(X, ctx), split_and_load(y, ctx))
        hits = [(net(X_shard).argmax(axis=1) == y_shard).sum() for X_shard, y_shard in shards]
        correct += sum(int(n.asscalar()) for n in hits)  # waits for this batch
        examples += X.shape[0]
    return correct / examples


def train(num_gpus: int, batch_size: int, lr: float, epochs: int = 4, seed: int | None = None) -> list[Params]:
    """Run the notebook's experiment, `train(num_gpus=2, batch_size=256, lr=0.2)`. Returns each device's parameters."""
    train_iter, test_iter = datasets.load_fashion_mnist(batch_size, seed)
    ctx = devices.contexts(num_gpus)
    print("running on:", ctx)
    if seed is not None:
        mx.random.seed(seed)
    params = init_params()
    device_params = [get_params(params, c) for c in ctx]
    for epoch in range(1, epochs + 1):
        start = time()
        for X, y in train_iter:
            train_batch(X, y, device_params, ctx, lr)
        nd.waitall()
        seconds = time() - start
        test_acc = evaluate_accuracy(test_iter, lambda X: lenet(X, device_params[ctx.index(X.context)]), ctx)
        print(f"epoch {epoch}, time: {seconds:.1f} sec, test acc: {test_acc:.2f}")
    return device_params
