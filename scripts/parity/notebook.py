"""The notebook's own code, cell by cell: the reference for `drift` and for the benchmarks.

This module does not configure the engine; its callers do. Source: "Multi-GPU Computation with Data Parallelism" (Dive
into Deep Learning, 2019), and `sgd` from the book's helper package.
"""

from __future__ import annotations

from mxnet import Context, autograd, nd
from mxnet.gluon import loss as gloss
from mxnet.ndarray import NDArray

loss = gloss.SoftmaxCrossEntropyLoss()


def init_params(scale: float = 0.01) -> list[NDArray]:
    params = []
    for shape, outputs in (((20, 1, 3, 3), 20), ((50, 20, 5, 5), 50), ((800, 128), 128), ((128, 10), 10)):
        params += [nd.random.normal(scale=scale, shape=shape), nd.zeros(shape=outputs)]
    return params


def lenet(X: NDArray, params: list[NDArray]) -> NDArray:
    h1_conv = nd.Convolution(data=X, weight=params[0], bias=params[1], kernel=(3, 3), num_filter=20)
    h1_activation = nd.relu(h1_conv)
    h1 = nd.Pooling(data=h1_activation, pool_type="avg", kernel=(2, 2), stride=(2, 2))
    h2_conv = nd.Convolution(data=h1, weight=params[2], bias=params[3], kernel=(5, 5), num_filter=50)
    h2_activation = nd.relu(h2_conv)
    h2 = nd.Pooling(data=h2_activation, pool_type="avg", kernel=(2, 2), stride=(2, 2))
    h2 = nd.flatten(h2)
    h3_linear = nd.dot(h2, params[4]) + params[5]
    h3 = nd.relu(h3_linear)
    y_hat = nd.dot(h3, params[6]) + params[7]
    return y_hat


def get_params(params: list[NDArray], ctx: Context) -> list[NDArray]:
    new_params = [p.copyto(ctx) for p in params]
    for p in new_params:
        p.attach_grad()
    return new_params


def allreduce(data: list[NDArray]) -> None:
    for i in range(1, len(data)):
        data[0][:] += data[i].copyto(data[0].context)
    for i in range(1, len(data)):
        data[0].copyto(data[i])


def split_and_load(data: NDArray, ctx: list[Context]) -> list[NDArray]:
    n, k = data.shape[0], len(ctx)
    m = n // k
    assert m * k == n, "the batch must divide evenly"
    return [data[i * m : (i + 1) * m].as_in_context(ctx[i]) for i in range(k)]


def sgd(params: list[NDArray], lr: float, batch_size: int) -> None:
    for param in params:
        param[:] = param - lr * param.grad / batch_size


def train_batch(X: NDArray, y: NDArray, gpu_params: list[list[NDArray]], ctx: list[Context], lr: float) -> None:
    gpu_Xs, gpu_ys = split_and_load(X, ctx), split_and_load(y, ctx)
    with autograd.record():
        ls = [loss(lenet(gpu_X, gpu_W), gpu_y) for gpu_X, gpu_y, gpu_W in zip(gpu_Xs, gpu_ys, gpu_params)]
    for l in ls:  # noqa: E741
        l.backward()
    for i in range(len(gpu_params[0])):
        allreduce([gpu_params[c][i].grad for c in range(len(ctx))])
    for param in gpu_params:
        sgd(param, lr, X.shape[0])
