"""LeNet on several devices from NDArray alone: every step of data parallelism is a function here.

Copy the parameters to each device, split a batch, forward and backward on each, sum the gradients, update, evaluate.
`highlevel` is the same step with Gluon, function for function. Source: the notebook "Multi-GPU Computation with Data
Parallelism" (Dive into Deep Learning, 2019).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, zip_longest
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from gluon_mgpu.runtime import engine

engine.configure()

from mxnet import Context, autograd, nd  # noqa: E402
from mxnet.ndarray import NDArray  # noqa: E402

from gluon_mgpu.distributed.workers import Workers, join  # noqa: E402
from gluon_mgpu.runtime import devices  # noqa: E402
from gluon_mgpu.runtime.errors import UsageError  # noqa: E402
from gluon_mgpu.training import checkpoint, loop, shared_memory  # noqa: E402
from gluon_mgpu.training.records import Epoch  # noqa: E402
from gluon_mgpu.training.settings import SGD, Settings, Shares, shard_sizes  # noqa: E402

Params = list[NDArray]  # of the network, on one device


def init_params(scale: float = 0.01) -> Params:
    """LeNet's eight parameters on the host: weights normal(0, scale), biases zero. Dense weights are (outputs, inputs),
    as Gluon keeps them, where the notebook has (inputs, outputs)."""
    shapes = [(20, 1, 3, 3), (50, 20, 5, 5), (128, 800), (10, 128)]
    params = []
    for shape in shapes:
        params += [nd.random.normal(scale=scale, shape=shape), nd.zeros(shape[0])]
    return params


def lenet(X: NDArray, params: Params) -> NDArray:
    """LeNet with average pooling: images (n, 1, 28, 28) in [0, 1] to scores (n, 10)."""
    W1, b1, W2, b2, W3, b3, W4, b4 = params
    # nd.Activation is oneDNN's ReLU, and faster than nd.relu: docs/engine.md.
    h1_conv = nd.Convolution(data=X, weight=W1, bias=b1, kernel=(3, 3), num_filter=20)  # (n, 20, 26, 26)
    h1_activation = nd.Activation(h1_conv, act_type="relu")
    h1 = nd.Pooling(data=h1_activation, pool_type="avg", kernel=(2, 2), stride=(2, 2))  # (n, 20, 13, 13)
    h2_conv = nd.Convolution(data=h1, weight=W2, bias=b2, kernel=(5, 5), num_filter=50)  # (n, 50, 9, 9)
    h2_activation = nd.Activation(h2_conv, act_type="relu")
    h2 = nd.Pooling(data=h2_activation, pool_type="avg", kernel=(2, 2), stride=(2, 2))  # (n, 50, 4, 4)
    h3_linear = nd.FullyConnected(nd.flatten(h2), W3, b3, num_hidden=128)  # (n, 800) -> (n, 128)
    h3 = nd.Activation(h3_linear, act_type="relu")
    return nd.FullyConnected(h3, W4, b4, num_hidden=10)  # (n, 10)


def loss(y_hat: NDArray, y: NDArray) -> NDArray:
    """Softmax cross-entropy of each example: scores (n, 10) and labels (n,) to losses (n,)."""
    return -nd.pick(nd.log_softmax(y_hat), y)


def get_params(params: Params, ctx: Context, grad_req: str = "write") -> Params:
    """A replica of the parameters on one device, each with a gradient to be filled by backward.

    grad_req: "write", or "add" for gradients that backward adds to.
    """
    new_params = [p.copyto(ctx) for p in params]
    for p in new_params:
        p.attach_grad(grad_req)
    return new_params


class Replica(list[NDArray]):
    """What `get_params` gives, in one array: `flat` holds the parameters and `flat.grad` their gradients, of both of
    which the list's arrays are parts. So one allreduce and one update do for all parameters.

    `lenet` may take it only in train mode: in the other one oneDNN lays weights out anew where they are, and MXNet then
    stops with an error, or ends, where they are parts of an array.
    """

    def __init__(self, params: Params, ctx: Context, grad_req: str = "write") -> None:
        self.shapes = [p.shape for p in params]
        self.flat = nd.concat(*[p.reshape(-1) for p in params], dim=0).copyto(ctx)
        self.flat.attach_grad()
        super().__init__(self.parts(self.flat))
        autograd.mark_variables(self, self.parts(self.flat.grad), grad_req)

    def parts(self, flat: NDArray) -> list[NDArray]:
        """An array like `flat` as arrays of the parameters' shapes, in the same memory."""
        ends = list(accumulate(map(prod, self.shapes)))
        return [flat[end - prod(shape) : end].reshape(shape) for end, shape in zip(ends, self.shapes)]


def arrays(params: Params) -> list[NDArray]:
    """What allreduce and update have to go through: every parameter, or of a `Replica` the one array that holds all."""
    return [params.flat] if isinstance(params, Replica) else params


def allreduce(data: list[NDArray], workers: Workers | None = None, key: int = 0) -> None:
    """Sum arrays of one shape, one a device, in place: afterwards every device holds the sum.

    workers: add the sums of the other processes too. key: which array of a step this is.
    """
    for i in range(1, len(data)):
        data[0] += data[i].copyto(data[0].context)
    if workers:
        workers.allreduce(data[0], key)
    for i in range(1, len(data)):
        data[0].copyto(data[i])


def split_and_load(data: NDArray, ctx: list[Context], shares: Shares = None) -> list[NDArray]:
    """Split a batch along its first axis into shards, one on each device, as even as can be or by shares (80, 20).

    A batch of fewer examples than devices makes one shard an example: the last devices get none.
    """
    shards, start = [], 0
    for size, c in zip(shard_sizes(data.shape[0], len(ctx), shares), ctx[: data.shape[0]]):
        shards.append(data[start : start + size].as_in_context(c))
        start += size
    return shards


def forward_backward(device_params: Sequence[Params], Xs: list[NDArray], ys: list[NDArray]) -> list[NDArray]:
    """Gradients on each device that has a shard; returns the losses of each shard."""
    with autograd.record():  # the loss is computed separately on each device
        losses = [loss(lenet(X, params), y) for X, y, params in zip(Xs, ys, device_params)]
    for shard_loss in losses:  # backpropagation runs separately on each device
        shard_loss.backward()
    return losses


def zero_gradients(device_params: Sequence[Params]) -> None:
    for params in device_params:
        for p in arrays(params):
            p.grad[:] = 0


def clip_gradients(params: Params, max_norm: float) -> None:
    """Scale the gradients of one device down so that the norm over all of them is at most max_norm."""
    norm = nd.sqrt(nd.add_n(*[nd.sum(nd.square(p.grad)) for p in params]))
    scale = nd.minimum(max_norm / (norm + 1e-8), 1)
    for p in params:
        p.grad[:] = nd.broadcast_mul(p.grad, scale.reshape((1,) * p.ndim))


def sgd(
    params: Params,
    lr: float,
    batch_size: int,
    velocities: list[NDArray] | None = None,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
) -> None:
    """One step of gradient descent on one device: p -= lr * (gradient / batch_size + weight_decay * p).

    Gradients are sums over the batch. With momentum, v = momentum * v - lr * (...) and p += v, a velocity a parameter.
    """
    rule = {"lr": lr, "rescale_grad": 1 / batch_size, "wd": weight_decay}
    if not momentum:
        for p in params:
            nd.sgd_update(p, p.grad, out=p, **rule)
    else:
        assert velocities, "momentum needs a velocity for each parameter"
        for p, v in zip(params, velocities):
            nd.sgd_mom_update(p, p.grad, v, out=p, momentum=momentum, **rule)


def train_batch(
    X: NDArray | None,
    y: NDArray | None,
    device_params: Sequence[Params],
    ctx: list[Context],
    lr: float,
    settings: Settings = SGD,
    device_velocities: Sequence[list[NDArray]] = (),
    workers: Workers | None = None,
    batch_size: int = 0,
) -> list[NDArray]:
    """One step on a global batch: X (n, 1, 28, 28), y (n,), device_params a replica a device.

    settings: what a step does beyond the notebook's; to accumulate, gradients must be of the kind "add". workers: X and
    y are this process's part of a batch of batch_size, None where it has no part. Returns the losses of each shard,
    still being computed: nothing here waits for the engine.
    """
    own = 0 if X is None else X.shape[0]
    n = batch_size if workers else own
    if settings.accumulate > 1 or own < len(ctx):  # gradients add up, or a device has no example to fill them from
        zero_gradients(device_params)
    losses = []
    for X_piece, y_piece in loop.pieces(X, y, settings.accumulate) if own else ():
        Xs, ys = (split_and_load(piece, ctx, settings.shares) for piece in (X_piece, y_piece))
        losses += forward_backward(device_params, Xs, ys)
    device_arrays = [arrays(params) for params in device_params]
    in_place = shared_memory.serves(ctx) and isinstance(device_params[0], Replica)
    sum_up = shared_memory.allreduce if in_place else allreduce
    for key, grads in enumerate(zip(*([p.grad for p in params] for params in device_arrays))):
        sum_up(list(grads), workers, key)
    for params, velocities in zip_longest(device_arrays, device_velocities):
        if settings.clip_norm:  # of the mean over the batch; the gradients are sums
            clip_gradients(params, settings.clip_norm * n)
        # the same update on each device keeps the replicas equal
        sgd(params, lr, n, velocities, settings.momentum, settings.weight_decay)
    return losses


def predict(X: NDArray, device_params: Sequence[Params], ctx: list[Context], shares: Shares = None) -> list[NDArray]:
    """Scores (n, 10) of a batch, in one shard a device, still being computed. In train mode for the sake of `Replica`;
    LeNet computes the same in both."""
    with autograd.train_mode():
        return [lenet(X_shard, params) for X_shard, params in zip(split_and_load(X, ctx, shares), device_params)]


def evaluate_accuracy(
    data_iter: Iterable[loop.Batch], device_params: Sequence[Params], ctx: list[Context], shares: Shares = None
) -> float:
    """The share of examples whose highest score is their label's. Every device scores its shard of each batch."""
    right = (
        [
            scores.argmax(axis=1) == y_shard
            for scores, y_shard in zip(predict(X, device_params, ctx, shares), split_and_load(y, ctx, shares))
        ]
        for X, y in data_iter
    )
    return loop.mean(right)


class Replicas:
    """What `loop` drives: LeNet's parameters, drawn once and copied to every device."""

    statistics: Sequence[Any] = ()  # LeNet has none

    def __init__(
        self,
        ctx: list[Context],
        settings: Settings = SGD,
        params: Params | None = None,
        workers: Workers | None = None,
    ) -> None:
        engine.check(ctx)
        self.ctx, self.settings, self.workers = ctx, settings, workers
        params = params or init_params()
        self.device_params = [Replica(params, c, "add" if settings.accumulate > 1 else "write") for c in ctx]
        self.device_velocities: list[list[NDArray]] = []
        if settings.momentum:
            self.device_velocities = [[nd.zeros_like(replica.flat)] for replica in self.device_params]

    def train_batch(self, X: NDArray | None, y: NDArray | None, lr: float, batch_size: int = 0) -> list[NDArray]:
        where = self.device_params, self.ctx
        return train_batch(X, y, *where, lr, self.settings, self.device_velocities, self.workers, batch_size)

    def settle(self) -> None:
        """All workers call it before parameters are read. LeNet has none that are not the same on all."""

    def forward_backward(self, X: NDArray, y: NDArray, shares: Shares) -> list[NDArray]:
        """Gradients on each device alone; returns an array of each that is ready when the device is done."""
        Xs, ys = (split_and_load(data, self.ctx, shares) for data in (X, y))
        forward_backward(self.device_params, Xs, ys)
        return [params[0].grad for params in self.device_params]

    def predict(self, X: NDArray) -> list[NDArray]:
        return predict(X, self.device_params, self.ctx, self.settings.shares)

    def evaluate_accuracy(self, data_iter: Iterable[loop.Batch]) -> float:
        return evaluate_accuracy(data_iter, self.device_params, self.ctx, self.settings.shares)

    def parameters(self, device: int = 0) -> dict[str, np.ndarray]:
        """{name: NumPy array}: what the net computes with, on that device of ctx."""
        nd.waitall()  # a forward under way may put weights into oneDNN's order while they are read (docs/engine.md)
        return self._named(self.device_params[device])

    def gradients(self, device: int = 0) -> dict[str, np.ndarray]:
        """{name: NumPy array}: the gradients on that device of ctx."""
        return self._named([p.grad for p in self.device_params[device]])

    def velocities(self) -> dict[str, np.ndarray]:
        """{name: NumPy array}: what momentum remembers; empty without momentum."""
        if not self.device_velocities:
            return {}
        return self._named(self.device_params[0].parts(*self.device_velocities[0]))

    def _named(self, params: Params) -> dict[str, np.ndarray]:
        return {name: p.asnumpy() for name, p in zip(checkpoint.LENET, params)}

    def load(self, parameters: dict[str, np.ndarray], velocities: dict[str, np.ndarray]) -> None:
        """Go on from arrays that `parameters` and `velocities` gave, of the same names and shapes."""
        for replica in self.device_params:
            for name, p in zip(checkpoint.LENET, replica):
                p[:] = parameters[name]
        for replica, flat in zip(self.device_params, self.device_velocities if velocities else ()):
            for name, v in zip(checkpoint.LENET, replica.parts(*flat)):
                v[:] = velocities[name]


def train(
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
    **settings: Any,
) -> list[Epoch]:
    """The notebook's experiment, `train(num_gpus=2, batch_size=256, lr=0.2)`: prints time and accuracy an epoch.

    num_gpus: how many devices, or which ([0, 2]). batch_size: the global one. device: "auto", "gpu" or "cpu".
    kvstore, compress: see `distributed.workers.join`. data_dir, out, resume, tensorboard, profile: see `loop.run`.
    settings: the fields of `Settings`: epochs, dataset, momentum and so on. Returns a list of `records.Epoch`.
    """
    checked = Settings(batch_size, lr, **settings)
    if checked.model != "lenet":
        raise UsageError(f"model {checked.model}: scratch has lenet only; --impl highlevel has the others")
    ctx = devices.contexts(num_gpus, device)
    with join(kvstore, compress, checked.model) as workers:
        return loop.run(
            lambda settings: Replicas(ctx, settings, workers=workers if workers.count > 1 else None),
            ctx,
            checked,
            config={"impl": "scratch", "kvstore": kvstore, "compress": compress},
            data_dir=data_dir,
            out=out,
            resume=resume,
            tensorboard=tensorboard,
            profile=profile,
            workers=workers,
        )
