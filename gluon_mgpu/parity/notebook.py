"""The notebook's training step as it stands, operator for operator, on stock MXNet: what `bench` measures against.

Nothing of the engine's settings is used; NumPy's dropped names are, since MXNet does not import without them. Source:
as `scratch`.
"""

from __future__ import annotations

from collections.abc import Iterable

from gluon_mgpu.runtime import numpy_names

numpy_names.lend()

from mxnet import Context, autograd, gluon, nd  # noqa: E402
from mxnet.ndarray import NDArray  # noqa: E402

loss = gluon.loss.SoftmaxCrossEntropyLoss()


def init_params() -> list[NDArray]:
    params = []
    for shape, outputs in (((20, 1, 3, 3), 20), ((50, 20, 5, 5), 50), ((800, 128), 128), ((128, 10), 10)):
        params += [nd.random.normal(scale=0.01, shape=shape), nd.zeros(outputs)]
    return params


def lenet(X: NDArray, params: list[NDArray]) -> NDArray:
    h1 = nd.relu(nd.Convolution(X, params[0], params[1], kernel=(3, 3), num_filter=20))
    h1 = nd.Pooling(h1, pool_type="avg", kernel=(2, 2), stride=(2, 2))
    h2 = nd.relu(nd.Convolution(h1, params[2], params[3], kernel=(5, 5), num_filter=50))
    h2 = nd.flatten(nd.Pooling(h2, pool_type="avg", kernel=(2, 2), stride=(2, 2)))
    h3 = nd.relu(nd.dot(h2, params[4]) + params[5])
    return nd.dot(h3, params[6]) + params[7]


def get_params(params: list[NDArray], ctx: Context) -> list[NDArray]:
    replica = [p.copyto(ctx) for p in params]
    for p in replica:
        p.attach_grad()
    return replica


def allreduce(data: list[NDArray]) -> None:
    for i in range(1, len(data)):
        data[0][:] += data[i].copyto(data[0].context)
    for i in range(1, len(data)):
        data[0].copyto(data[i])


def split_and_load(data: NDArray, ctx: list[Context]) -> list[NDArray]:
    m = data.shape[0] // len(ctx)
    assert m * len(ctx) == data.shape[0]
    return [data[i * m : (i + 1) * m].as_in_context(c) for i, c in enumerate(ctx)]


def train_batch(X: NDArray, y: NDArray, device_params: list[list[NDArray]], ctx: list[Context], lr: float) -> None:
    Xs, ys = split_and_load(X, ctx), split_and_load(y, ctx)
    with autograd.record():
        losses = [loss(lenet(a, params), b) for a, b, params in zip(Xs, ys, device_params)]
    for shard_loss in losses:
        shard_loss.backward()
    for i in range(len(device_params[0])):
        allreduce([params[i].grad for params in device_params])
    for params in device_params:
        for p in params:
            p[:] = p - lr * p.grad / X.shape[0]


def train_epoch(
    train_iter: Iterable[tuple[NDArray, NDArray]], device_params: list[list[NDArray]], ctx: list[Context], lr: float
) -> None:
    """As the notebook does, waits for every step."""
    for X, y in train_iter:
        train_batch(X, y, device_params, ctx, lr)
        nd.waitall()
