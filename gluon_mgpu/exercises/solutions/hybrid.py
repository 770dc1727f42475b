"""Exercise hybrid: train one step on a mesh of devices.

The model is s_hat = relu((X * s) W.T) v + b. In a mesh, each row of devices gets one shard of the batch, and splits the
model: each device of a row holds some rows of W and the same elements of v, so it computes some of the hidden values.
s and b are whole on every device. Each column of devices holds the same parameters.

`forward_backward`, which is given, computes the gradients for the shard of a row, and sums the outputs over the row.
The gradients of W and v are then those of the row's shard, and so is the gradient of b, on every device. But the
gradient of s is only a part of it, what a device's own hidden values add.

Write one training step. It changes the parameters on every device as if one device had trained on the whole batch:

    p -= lr * (sum of the gradients of all examples) / (number of examples)

Do not wait for the devices. Use the functions imported from gluon_mgpu.scratch, or write your own.
"""

import gluon_mgpu  # before mxnet, so that it works with current versions of NumPy
from mxnet import autograd, nd

from gluon_mgpu.scratch import allreduce, sgd, split_and_load


def forward_backward(row, X, y):
    """Compute the gradients of a row's parameters, for the losses (s_hat - y) ** 2 / 2 of its shard, X (n, d), y (n,).

    row: [s, W, v, b] of each device, of the shapes (d,), (h, d), (h,) and (1,); h differs from device to device.
    """
    parts = []
    for s, W, v, _ in row:
        X_copy = X.as_in_context(s.context)
        with autograd.record():
            parts.append(nd.dot(nd.relu(nd.dot(X_copy * s, W, transpose_b=True)), v))
    outputs = [part.copy() for part in parts]
    allreduce(outputs)
    for part, output, (_, _, _, b) in zip(parts, outputs, row):
        error = output + b - y.as_in_context(b.context)
        part.backward(error)
        b.grad[:] = error.sum()


def train_batch(X, y, mesh_params, lr):
    """Train one step on a batch X (n, d), y (n,). mesh_params[i][j]: [s, W, v, b] of the device in row i, column j."""
    firsts = [row[0][0].context for row in mesh_params]
    for row, X_shard, y_shard in zip(mesh_params, split_and_load(X, firsts), split_and_load(y, firsts)):
        forward_backward(row, X_shard, y_shard)
        allreduce([s.grad for s, *_ in row])
    for column in zip(*mesh_params):
        for grads in zip(*([p.grad for p in params] for params in column)):
            allreduce(list(grads))
    for row in mesh_params:
        for params in row:
            sgd(params, lr, len(X))
