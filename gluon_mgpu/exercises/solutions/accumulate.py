"""Exercise accumulate: compute the gradient of a large batch in parts.

A batch that does not fit in memory is processed in parts, one after another. Each part is split among the devices. The
parameters' gradients were attached with attach_grad("add"): backward adds to p.grad, and nothing resets it to zero.
Write a training step for the whole batch:

    p -= lr * (sum of the gradients of all examples in all parts) / (number of examples in all parts)

`forward_backward` runs the forward and the backward pass for one part. Parts may differ in size.
"""

import gluon_mgpu  # before mxnet, so that it works with current versions of NumPy
from mxnet import autograd

from gluon_mgpu.scratch import allreduce, sgd, split_and_load


def forward_backward(X, y, device_params, ctx):
    """Compute the gradients of one part of the batch, X (n, 2) and y (n,), and add them to those on the devices."""
    with autograd.record():
        shards = zip(split_and_load(X, ctx), split_and_load(y, ctx), device_params)
        losses = [((X * w).sum(axis=1) + b - y) ** 2 / 2 for X, y, (w, b) in shards]
    for shard_loss in losses:
        shard_loss.backward()


def train_batch(parts, device_params, ctx, lr):
    """Train one step. parts: a list of pairs X (n, 2), y (n,). device_params: one list per device, [w, b], of the
    shapes (2,) and (1,)."""
    for params in device_params:
        for p in params:
            p.grad[:] = 0
    for X, y in parts:
        forward_backward(X, y, device_params, ctx)
    for grads in zip(*([p.grad for p in params] for params in device_params)):
        allreduce(list(grads))
    for params in device_params:
        sgd(params, lr, sum(len(X) for X, _ in parts))
