"""Lesson 1: LeNet on several devices with NDArray alone. Each part of data parallelism is one function.

The functions copy the parameters to each device, split a batch, compute and sum the gradients, and update the
parameters. `highlevel` uses Gluon instead. Source of the code and of the function names: the notebook "Multi-GPU
Computation with Data Parallelism" (Dive into Deep Learning, 2019).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mxnet import Context, autograd, nd
from mxnet.ndarray import NDArray

from gluon_mgpu.runtime.devices import shard_sizes
from gluon_mgpu.training import batches, loop, replicas
from gluon_mgpu.training.records import Epoch

Params = list[NDArray]  # the network's parameters on one device
Net = Callable[[NDArray, Params], NDArray]


def init_params(scale: float = 0.01) -> Params:
    """Create LeNet's eight parameters on the host, with weights from normal(0, scale) and zero biases. Dense weights
    have the shape (outputs, inputs), as in Gluon; in the notebook, the shape is (inputs, outputs)."""
    params = []
    for shape in [(20, 1, 3, 3), (50, 20, 5, 5), (128, 800), (10, 128)]:
        params += [nd.random.normal(scale=scale, shape=shape), nd.zeros(shape[0])]
    return params


def lenet(X: NDArray, params: Params) -> NDArray:
    """LeNet with average pooling. X: images (n, 1, 28, 28), values in [0, 1]. Returns scores (n, 10)."""
    W1, b1, W2, b2, W3, b3, W4, b4 = params
    h1_conv = nd.Convolution(data=X, weight=W1, bias=b1, kernel=(3, 3), num_filter=20)  # (n, 20, 26, 26)
    h1_activation = nd.Activation(h1_conv, act_type="relu")  # faster than nd.relu: docs/engine.md
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
    """Copy the parameters to a device, and attach a gradient to each copy."""
    new_params = [p.copyto(ctx) for p in params]
    for p in new_params:
        p.attach_grad()
    return new_params


def allreduce(data: Sequence[NDArray]) -> None:
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
    shards, start = [], 0
    for size, c in zip(shard_sizes(data.shape[0], len(ctx)), ctx[: data.shape[0]]):
        shards.append(data[start : start + size].as_in_context(c))
        start += size
    return shards


def forward_backward(
    device_params: Sequence[Params], Xs: list[NDArray], ys: list[NDArray], *, net: Net | None = None
) -> list[NDArray]:
    """Compute the gradients of each shard on its device. Returns the losses of each shard, one vector per device.

    net: the network, a function of images and parameters; default: `lenet`.
    """
    net = net or lenet
    with autograd.record():  # the loss is calculated separately on each device
        losses = [loss(net(X, params), y) for X, y, params in zip(Xs, ys, device_params)]
    for shard_loss in losses:  # backpropagation runs separately on each device
        shard_loss.backward()
    return losses


def sgd(params: Params, lr: float, batch_size: int) -> None:
    """Update the parameters on one device: p -= lr * gradient / batch_size. The gradients are sums over the batch."""
    for p in params:
        nd.sgd_update(p, p.grad, out=p, lr=lr, rescale_grad=1 / batch_size)


def train_batch(
    X: NDArray, y: NDArray, device_params: Sequence[Params], ctx: list[Context], lr: float, *, net: Net | None = None
) -> list[NDArray]:
    """Run one training step on images X (n, 1, 28, 28) and labels y (n,), with one replica on each device in ctx.

    Returns the losses of each shard. This function only queues the step, and does not wait for the devices.
    """
    assert X.shape[0] >= len(ctx), "a batch needs at least one example per device"
    Xs, ys = split_and_load(X, ctx), split_and_load(y, ctx)
    losses = forward_backward(device_params, Xs, ys, net=net)
    for grads in zip(*([p.grad for p in params] for params in device_params)):
        allreduce(grads)
    for params in device_params:  # the same update on each device keeps the replicas equal
        sgd(params, lr, X.shape[0])
    return losses


def evaluate_accuracy(
    data_iter: Iterable[tuple[NDArray, NDArray]], net: Callable[[NDArray], NDArray], ctx: list[Context]
) -> float:
    """Compute the fraction of examples whose label has the highest score. Each device scores its shard of each batch.

    net: a function that computes scores on the device of its input.
    """

    def correct() -> Iterable[list[NDArray]]:
        for X, y in data_iter:
            shards = zip(split_and_load(X, ctx), split_and_load(y, ctx))
            yield [net(X_shard).argmax(axis=1) == y_shard for X_shard, y_shard in shards]

    return batches.mean(correct())


class Replicas(replicas.Replicas):
    """Connects the training loop to the functions above, and holds a replica of the parameters on each device.

    net, params: a network other than LeNet, and its initial parameters on the host.
    """

    networks = ("lenet",)
    own_options = ("net", "params")

    def __init__(self, *args: Any, net: Net | None = None, params: Params | None = None) -> None:
        super().__init__(*args)
        self.net, params = net, params or init_params()
        self.device_params = [get_params(params, c) for c in self.ctx]
        names = replicas.LENET if net is None else [f"p{i}" for i in range(len(params))]
        self.arrays = [dict(zip(names, params)) for params in self.device_params]
        like = self.device_params if self.settings.momentum else [[] for _ in self.ctx]
        self.momentum = [[nd.zeros_like(p) for p in params] for params in like]
        if self.settings.grad_accum_steps > 1:
            for params in self.device_params:
                for p in params:
                    p.attach_grad("add")

    def lesson_step(self, X: NDArray, y: NDArray, lr: float) -> list[NDArray]:
        return train_batch(X, y, self.device_params, self.ctx, lr, net=self.net)

    @property
    def extras(self) -> bool:
        return bool(super().extras or self.settings.momentum or self.settings.weight_decay)

    def split_and_load(self, data: NDArray) -> list[NDArray]:
        return split_and_load(data, self.ctx)

    def forward_backward(self, Xs: list[NDArray], ys: list[NDArray]) -> list[NDArray]:
        return forward_backward(self.device_params, Xs, ys, net=self.net)

    def reduce(self) -> None:
        for grads in zip(*([p.grad for p in params] for params in self.device_params)):
            allreduce(grads)

    def update(self, lr: float, batch_size: int) -> None:
        for params, velocities in zip(self.device_params, self.momentum):
            if velocities or self.settings.weight_decay:
                replicas.sgd_momentum(params, velocities, lr, batch_size, self.settings)
            else:
                sgd(params, lr, batch_size)

    def predict(self, X: NDArray) -> NDArray:
        return (self.net or lenet)(X, self.device_params[self.ctx.index(X.context)])

    def evaluate_accuracy(self, data_iter: Iterable[tuple[NDArray, NDArray]]) -> float:
        return evaluate_accuracy(data_iter, self.predict, self.ctx)

    def velocities(self, device: int) -> dict[str, NDArray]:
        return dict(zip(self.arrays[device], self.momentum[device]))


def train(num_gpus: int | Sequence[int], batch_size: int, lr: float, **options: Any) -> list[Epoch]:
    """Run the notebook's experiment, `train(num_gpus=2, batch_size=256, lr=0.2)`. Prints time and accuracy per epoch.

    num_gpus: number of devices, or their indices ([0, 2]). batch_size: examples per step, across all devices. options:
    see `loop.train`. To train your own network, pass it as net, a function of images and parameters, and pass its
    initial parameters as params.
    """
    return loop.train(Replicas, num_gpus, batch_size, lr, **options)
