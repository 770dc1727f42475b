"""Lesson 10: LeNet on a mesh of devices: tensor parallelism along its rows, data parallelism along its columns.

Each row of the mesh is a tensor group: it computes one shard of the batch, and splits LeNet's two dense layers, as a
block with one sum (docs/partition.md). Each column is a data group: its devices hold the same parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

from mxnet import Context, autograd
from mxnet.ndarray import NDArray

from gluon_mgpu import scratch
from gluon_mgpu.partition import block, convolution
from gluon_mgpu.scratch import Params, allreduce, split_and_load

Mesh = Sequence[Sequence[Context]]


def place(params: Params, mesh: Mesh) -> list[list[Params]]:
    """Copy LeNet's eight parameters to a mesh. Returns one list of eight parameters per device, in rows as in the mesh.

    Device j of each row gets part j of the rows of W3 and b3, and of the columns of W4, and all of the other five.
    """
    assert len(mesh[0]) <= 128, "the hidden layer has 128 values, for at most as many devices in a row"
    *whole, W3, b3, W4, b4 = params
    parts = zip(*[split_and_load(p, [p.context] * len(mesh[0])) for p in (W3, b3, W4.T)])
    columns = [[*whole, W3_part, b3_part, W4_part.T, b4] for W3_part, b3_part, W4_part in parts]
    return [[scratch.get_params(column, c) for column, c in zip(columns, row)] for row in mesh]


def convolutions(X: NDArray, params: Params) -> NDArray:
    """The first two layers, which are not split: (n, 1, 28, 28) -> (n, 50, 4, 4)."""
    W1, b1, W2, b2, *_ = params
    return convolution(convolution(X, W1, b1), W2, b2)


def variables(arrays: list[NDArray]) -> list[NDArray]:
    """Copies of arrays, with gradients. The recorded graph ends there."""
    copies = [array.copy() for array in arrays]
    for copy in copies:
        copy.attach_grad()
    return copies


def forward_backward(device_params: list[Params], Xs: list[NDArray], ys: list[NDArray]) -> NDArray:
    """Compute the gradients of the parameters of a row, a tensor group.

    device_params: the eight parameters on each device. Xs and ys: the same shard (n, 1, 28, 28) and (n,), on each of
    these devices. Returns the losses (n,), on the first device.
    """
    with autograd.record():
        features = [convolutions(X, params) for X, params in zip(Xs, device_params)]
    inputs = variables(features)
    with autograd.record():
        parts = [block(h, *params[4:7]) for h, params in zip(inputs, device_params)]  # W3, b3 and W4
    sums = variables(parts)
    allreduce(sums)  # forward: 10 numbers per example
    with autograd.record():
        outputs = [total + params[-1] for total, params in zip(sums, device_params)]  # adds b4, once
        losses = [scratch.loss(output, y) for output, y in zip(outputs, ys)]
    for device_losses in losses:
        device_losses.backward()
    for part, total in zip(parts, sums):
        part.backward(total.grad)
    grads = [h.grad for h in inputs]
    allreduce(grads)  # backward: 800 numbers per example
    for h, grad in zip(features, grads):
        h.backward(grad)
    return losses[0]


def train_batch(X: NDArray, y: NDArray, mesh_params: list[list[Params]], mesh: Mesh, lr: float) -> list[NDArray]:
    """Run one training step on images X (n, 1, 28, 28) and labels y (n,). Returns the losses of each row's shard."""
    assert X.shape[0] >= len(mesh), "a batch needs at least one example per row"
    firsts = [row[0] for row in mesh]
    Xs, ys = split_and_load(X, firsts), split_and_load(y, firsts)
    losses = []
    for X_shard, y_shard, device_params, ctx in zip(Xs, ys, mesh_params, mesh):
        X_copies = [X_shard.as_in_context(c) for c in ctx]
        y_copies = [y_shard.as_in_context(c) for c in ctx]
        losses.append(forward_backward(device_params, X_copies, y_copies))
    for column in zip(*mesh_params):  # a data group: the same parameters, and gradients of different shards
        for i in range(len(column[0])):
            allreduce([params[i].grad for params in column])
    for row in mesh_params:
        for params in row:
            scratch.sgd(params, lr, X.shape[0])
    return losses
