"""Lessons 7 and 8: the training steps of DDP, ZeRO-1, ZeRO-2 and ZeRO-3 (FSDP in PyTorch).

With DDP, as in `scratch`, every device holds all weights, gradients and optimizer state. With ZeRO, device i of k keeps
only chunk i of what it does not need all the time. Every layer's arrays are joined to one vector, a bucket, which is
sent as a whole or in chunks. Sources: arXiv:2006.15704 (DDP), arXiv:1910.02054 (ZeRO), arXiv:2304.11277 (FSDP).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

from mxnet import Context, autograd, nd
from mxnet.ndarray import NDArray

from gluon_mgpu.partition import LAYERS
from gluon_mgpu.scratch import SHAPES, loss, split_and_load

Shapes = Sequence[tuple[int, ...]]  # of a layer's arrays
Net = list[tuple[Callable, Shapes]]  # the layers: functions of an input and of the layer's arrays
Buckets = list[list[NDArray]]  # for each layer, one bucket per device, or one chunk of it per device
Tape = tuple[list[NDArray], NDArray]  # a recorded layer on one device: its input and arrays, and its output

LENET: Net = [(layer, (shape, shape[:1])) for layer, shape in zip(LAYERS, SHAPES)]  # with the shapes of the biases


# 1. Buckets, and their chunks.


def bucket(arrays: Sequence[NDArray]) -> NDArray:
    """Join arrays of any shape to one vector (n,)."""
    return nd.concat(*[array.reshape(-1) for array in arrays], dim=0)


def unbucket(vector: NDArray, shapes: Shapes) -> list[NDArray]:
    """Returns the arrays in a bucket (n,). They are views, so they change with it."""
    ends = list(accumulate(map(math.prod, shapes)))
    return [vector[end - math.prod(shape) : end].reshape(shape) for end, shape in zip(ends, shapes)]


def chunk(vector: NDArray, i: int, k: int) -> NDArray:
    """Returns chunk i of k of a vector (n,): a view (n/k,), rounded up or down."""
    return vector[vector.size * i // k : vector.size * (i + 1) // k]


def place(net: Net, arrays: Sequence[NDArray], ctx: list[Context], sharded: bool) -> Buckets:
    """Copy arrays, such as parameters, to the devices, joined to one bucket per layer.

    sharded: copy only chunk i of each bucket to device i.
    """
    k, start = len(ctx), 0
    buckets = []
    for _, shapes in net:
        whole = bucket(arrays[start : start + len(shapes)])
        start += len(shapes)
        assert whole.size >= k, "each layer needs at least one weight per device"
        parts = [chunk(whole, i, k) for i in range(k)] if sharded else [whole] * k
        buckets.append([part.copyto(c) for part, c in zip(parts, ctx)])
    return buckets


# 2. Collective operations. In a ring, every device sends only to the next one.


def reduce_scatter(data: list[NDArray]) -> list[NDArray]:
    """Sum vectors (n,), one per device, around a ring.

    In round r, device i receives chunk i - 2 - r (modulo k) and adds it to its own; in the last round, r = k - 2, this
    is chunk i. Returns chunk i of the sum on device i. It is a view of data[i], which is overwritten.
    """
    k = len(data)
    for r in range(k - 1):  # in each round, every device sends one chunk to the next device
        received = [chunk(data[i - 1], (i - 2 - r) % k, k).copyto(data[i].context) for i in range(k)]
        for i in range(k):
            chunk(data[i], (i - 2 - r) % k, k)[:] += received[i]
    return [chunk(data[i], i, k) for i in range(k)]


def all_gather(chunks: list[NDArray], out: list[NDArray]) -> list[NDArray]:
    """Copy the chunks of all devices to every device, around a ring.

    In round r, device i receives chunk i - 1 - r (modulo k).

    out: one vector (n,) per device, which receives them. chunks[i] may be a view of out[i]. Returns `out`.
    """
    k = len(chunks)
    for i in range(k):
        chunk(out[i], i, k)[:] = chunks[i]
    for r in range(k - 1):
        received = [chunk(out[i - 1], (i - 1 - r) % k, k).copyto(out[i].context) for i in range(k)]
        for i in range(k):
            chunk(out[i], (i - 1 - r) % k, k)[:] = received[i]
    return out


def ring_allreduce(data: list[NDArray]) -> list[NDArray]:
    """Sum vectors (n,), one per device, in place."""
    return all_gather(reduce_scatter(data), out=data)


def reduce_to_chunks(data: list[NDArray]) -> list[NDArray]:
    """Sum vectors (n,), one per device. Returns chunk i of the sum on device i: a copy, so that `data` can be freed."""
    return [c.copy() for c in reduce_scatter(data)]


def unshard(chunks: list[NDArray], shapes: Shapes) -> list[list[NDArray]]:
    """Gather a layer's bucket on every device. Returns the layer's arrays on each device."""
    empty = [nd.empty(sum(map(math.prod, shapes)), c.context) for c in chunks]
    return [unbucket(b, shapes) for b in all_gather(chunks, out=empty)]


def collect(net: Net, buckets: Buckets, sharded: bool) -> list[NDArray]:
    """Returns the arrays that `place` was given, as they are now, on the first device."""
    arrays = []
    for (_, shapes), parts in zip(net, buckets):
        arrays += unshard(parts, shapes)[0] if sharded else unbucket(parts[0], shapes)
    return arrays


# 3. The backward pass, layer by layer. Each layer has a recorded graph of its own, a tape.


def record(layer: Callable, Xs: list[NDArray], device_arrays: Sequence[list[NDArray]]) -> list[Tape]:
    """Compute a layer on each device, and record it. device_arrays: the layer's arrays on each device."""
    tapes = []
    for X, arrays in zip(Xs, device_arrays):
        variables = [X.detach(), *arrays]  # without the graph of the layer before
        # autograd.grad in `backward` returns these gradients; the second list is only a placeholder.
        autograd.mark_variables(variables, [v.detach() for v in variables])
        with autograd.record():
            tapes.append((variables, layer(*variables)))
    return tapes


def backward(tapes: list[Tape], output_grads: Sequence[NDArray | None]) -> tuple[list[NDArray], list[NDArray]]:
    """Compute a layer's gradients on each device.

    output_grads: the gradients of its outputs; None for a loss. Returns the gradients of its inputs, and one bucket per
    device with the gradients of its arrays.
    """
    input_grads, buckets = [], []
    for (variables, output), output_grad in zip(tapes, output_grads):
        input_grad, *array_grads = autograd.grad([output], variables, [output_grad])
        input_grads.append(input_grad)
        buckets.append(bucket(array_grads))
    return input_grads, buckets


def loss_backward(scores: list[NDArray], ys: list[NDArray]) -> tuple[list[NDArray], list[NDArray]]:
    """Returns the losses (n,) of each shard, and their gradients (n, 10) with respect to its scores."""
    tapes = record(loss, scores, [[y] for y in ys])
    score_grads, _ = backward(tapes, [None] * len(tapes))
    return [losses for _, losses in tapes], score_grads


def forward_backward(
    net: Net, weights: Buckets, Xs: list[NDArray], ys: list[NDArray], reduce: Callable
) -> tuple[list[NDArray], Buckets]:
    """Compute the gradients of each shard, and sum each layer's over the devices as soon as they are known.

    reduce: sums one bucket per device, such as `ring_allreduce`. Returns each shard's losses (n,), and what `reduce`
    returns for each layer, in layer order.
    """
    tapes = []
    for (layer, shapes), buckets in zip(net, weights):
        tapes.append(record(layer, Xs, [unbucket(b, shapes) for b in buckets]))
        Xs = [output for _, output in tapes[-1]]
    losses, grads = loss_backward(Xs, ys)
    reduced = []
    while tapes:
        grads, buckets = backward(tapes.pop(), grads)
        reduced.append(reduce(buckets))
    return losses, reduced[::-1]


# 4. Optimizers. Their moments are what they keep for each weight, such as a velocity.


def sgd(p: NDArray, grad: NDArray, velocity: NDArray, batch_size: int, lr: float, momentum: float = 0.9) -> None:
    """SGD with momentum, for a bucket or a chunk (n,): all elements are updated independently of each other."""
    nd.sgd_mom_update(p, grad, velocity, out=p, lr=lr, momentum=momentum, rescale_grad=1 / batch_size)


def adam(p: NDArray, grad: NDArray, mean: NDArray, variance: NDArray, batch_size: int, lr: float) -> None:
    """Adam, for a bucket or a chunk (n,).

    lr: in step t, the learning rate times sqrt(1 - 0.999**t) / (1 - 0.9**t).
    """
    nd.adam_update(p, grad, mean, variance, out=p, lr=lr, rescale_grad=1 / batch_size)


def update(optimizer: Callable, weights: Buckets, grads: Buckets, moments: list[Buckets], batch_size: int) -> None:
    """Update the weights of each layer on each device.

    optimizer: such as partial(sgd, lr=0.1). grads: summed over the batch. moments: one for `sgd`, two for `adam`.
    """
    for layer in zip(weights, grads, *moments):
        for arrays in zip(*layer):
            optimizer(*arrays, batch_size)


def update_chunks(
    optimizer: Callable, weights: Buckets, grads: Buckets, moments: list[Buckets], batch_size: int
) -> None:
    """Update chunk i of the weights on device i, and send it to the other devices.

    grads, moments: on device i, only chunk i.
    """
    owned = [[chunk(b, i, len(buckets)) for i, b in enumerate(buckets)] for buckets in weights]
    update(optimizer, owned, grads, moments, batch_size)
    for chunks, buckets in zip(owned, weights):
        all_gather(chunks, out=buckets)


# 5. The steps. From each to the next, a device keeps less.


def shards(X: NDArray, y: NDArray, ctx: list[Context]) -> tuple[list[NDArray], list[NDArray]]:
    """Split a batch into one shard of images and labels per device."""
    assert X.shape[0] >= len(ctx), "a batch needs at least one example per device"
    return split_and_load(X, ctx), split_and_load(y, ctx)


def ddp(
    X: NDArray, y: NDArray, net: Net, weights: Buckets, moments: list[Buckets], ctx: list[Context], optimizer: Callable
) -> list[NDArray]:
    """Run a step on images X (n, 1, 28, 28) and labels y (n,), with data parallelism.

    weights, moments: as placed by `place`. optimizer: see `update`. Returns each shard's losses (n,).
    """
    losses, grads = forward_backward(net, weights, *shards(X, y, ctx), ring_allreduce)
    update(optimizer, weights, grads, moments, X.shape[0])
    return losses


def zero1(
    X: NDArray, y: NDArray, net: Net, weights: Buckets, moments: list[Buckets], ctx: list[Context], optimizer: Callable
) -> list[NDArray]:
    """ZeRO-1: device i keeps chunk i of the moments, updates chunk i of the weights, and sends it to the others."""
    losses, grads = forward_backward(net, weights, *shards(X, y, ctx), reduce_scatter)
    update_chunks(optimizer, weights, grads, moments, X.shape[0])
    return losses


def zero2(
    X: NDArray, y: NDArray, net: Net, weights: Buckets, moments: list[Buckets], ctx: list[Context], optimizer: Callable
) -> list[NDArray]:
    """ZeRO-2: device i keeps only chunk i of the gradients too. Only `reduce_to_chunks` differs from ZeRO-1."""
    losses, grads = forward_backward(net, weights, *shards(X, y, ctx), reduce_to_chunks)
    update_chunks(optimizer, weights, grads, moments, X.shape[0])
    return losses


def zero3(
    X: NDArray, y: NDArray, net: Net, weights: Buckets, moments: list[Buckets], ctx: list[Context], optimizer: Callable
) -> list[NDArray]:
    """ZeRO-3, or FSDP: device i keeps only chunk i of the weights too, and one whole layer at a time."""
    Xs, ys = shards(X, y, ctx)
    inputs = []
    for (layer, shapes), chunks in zip(net, weights):
        inputs.append(Xs)
        with autograd.train_mode():  # not recorded: a graph would keep the layer's weights
            Xs = [layer(X, *arrays) for X, arrays in zip(Xs, unshard(chunks, shapes))]
        nd.waitall()  # otherwise, Python would gather all layers before the devices have computed the first
    losses, grads = loss_backward(Xs, ys)
    reduced = []
    for (layer, shapes), chunks in reversed(list(zip(net, weights))):
        tapes = record(layer, inputs.pop(), unshard(chunks, shapes))  # gathers and computes the layer a second time
        grads, buckets = backward(tapes, grads)
        reduced.append(reduce_to_chunks(buckets))
        nd.waitall()
    update(optimizer, weights, reduced[::-1], moments, X.shape[0])
    return losses
