"""Lesson 9: LeNet split across devices in three ways: by layers, by channels and by examples.

Each device records and differentiates its own part of the computation. Copies between devices are made outside
`autograd.record`, so the recorded graph ends there, and the code passes the gradient back with
`output.backward(gradient)`. The code therefore shows every exchange between devices. Source: the notebook "Multi-GPU
training" (Dive into Deep Learning, in PyTorch).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mxnet import Context, autograd, nd
from mxnet.ndarray import NDArray

from gluon_mgpu import scratch
from gluon_mgpu.scratch import Params
from gluon_mgpu.support.errors import UsageError


def convolution(X: NDArray, W: NDArray, b: NDArray) -> NDArray:
    """Apply a convolution, ReLU and 2x2 average pooling to X (n, c, h, w). Returns (n, outputs, ...)."""
    h = nd.Convolution(data=X, weight=W, bias=b, kernel=W.shape[2:], num_filter=W.shape[0])
    return nd.Pooling(nd.Activation(h, act_type="relu"), pool_type="avg", kernel=(2, 2), stride=(2, 2))


def hidden(X: NDArray, W: NDArray, b: NDArray) -> NDArray:
    """Flatten X (n, ...), and apply a dense layer and ReLU. Returns (n, outputs)."""
    return nd.Activation(scores(X, W, b), act_type="relu")


def scores(X: NDArray, W: NDArray, b: NDArray) -> NDArray:
    """Flatten X (n, ...), and apply a dense layer. Returns (n, outputs)."""
    return nd.FullyConnected(X, W, b, num_hidden=W.shape[0])


Layer = Callable[[NDArray, NDArray, NDArray], NDArray]
# The layers of scratch.lenet. Each layer has two parameters, W and b, with one row per output, so a device that holds
# only some rows computes only the outputs of these rows. Each comment shows the shape of a layer's output.
LAYERS: tuple[Layer, ...] = (
    convolution,  # (n, 20, 13, 13)
    convolution,  # (n, 50, 4, 4)
    hidden,  # (n, 128)
    scores,  # (n, 10)
)


# 1. Network partitioning: different layers on different devices.


def stages(devices: int) -> list[slice]:
    """The layers of each device, as slices of LAYERS: one layer per device, and all remaining layers on the last one.

    With 2 devices, more than 90% of the arithmetic is on the second one, but the first layer's ReLU and pooling also
    take time: each reads 13,520 values per example. A cut after the second convolution would copy a quarter as many
    bytes, but leave the last device almost idle.
    """
    layers = len(LAYERS)
    if devices > layers:
        raise UsageError("devices", devices, f"LeNet has {layers} layers; use at most {layers} devices")
    return [slice(i, i + 1) for i in range(devices - 1)] + [slice(devices - 1, layers)]


def partition_network(params: Params, ctx: list[Context]) -> list[Params]:
    """Copy the parameters of each device's layers to that device. Returns one list per device."""
    return [
        scratch.get_params(params[2 * layers.start : 2 * layers.stop], c) for layers, c in zip(stages(len(ctx)), ctx)
    ]


def forward(h: NDArray, layers: Sequence[Layer], params: Params) -> NDArray:
    """Apply layers one after another, each with its two parameters."""
    for layer, W, b in zip(layers, params[::2], params[1::2]):
        h = layer(h, W, b)
    return h


def forward_backward_network(device_params: list[Params], X: NDArray, y: NDArray, ctx: list[Context]) -> NDArray:
    """Compute the gradients of the parameters on each device. Returns the losses (n,), on the last device."""
    *earlier, last = stages(len(ctx))
    h, exchanges = X.as_in_context(ctx[0]), []
    for layers, params, next_device in zip(earlier, device_params, ctx[1:]):
        with autograd.record():
            output = forward(h, LAYERS[layers], params)
        h = output.copyto(next_device)  # after the first layer: (n, 20, 13, 13)
        h.attach_grad()
        exchanges.append((output, h))
    y = y.as_in_context(ctx[-1])
    with autograd.record():
        losses = scratch.loss(forward(h, LAYERS[last], device_params[-1]), y)
    losses.backward()
    for output, copy in reversed(exchanges):
        output.backward(copy.grad.copyto(output.context))  # the gradient has the output's shape
    return losses


def train_batch_network(
    X: NDArray, y: NDArray, device_params: list[Params], ctx: list[Context], lr: float, micro_batches: int = 1
) -> list[NDArray]:
    """Run one training step with network partitioning on images X (n, 1, 28, 28) and labels y (n,).

    With one micro-batch, only one device works at a time. With more, the first device computes the second micro-batch
    while the second device computes the first. No code here schedules this: each device starts as soon as its inputs
    arrive. Returns the losses of each micro-batch.
    """
    for params in device_params:
        for p in params:
            p.attach_grad("add")  # new zero gradients; each micro-batch adds to them
    Xs, ys = (scratch.split_and_load(array, [array.context] * micro_batches) for array in (X, y))
    losses = [forward_backward_network(device_params, X_part, y_part, ctx) for X_part, y_part in zip(Xs, ys)]
    for params in device_params:
        scratch.sgd(params, lr, X.shape[0])
    return losses


# 2. Layer-wise partitioning: different channels of every layer on different devices.


def partition_layers(params: Params, ctx: list[Context]) -> list[Params]:
    """Split the rows (first axis) of the eight parameters across the devices. Each row belongs to one output."""
    if len(ctx) > 10:
        raise UsageError("devices", len(ctx), "LeNet has 10 outputs; use at most 10 devices")
    shards = zip(*[scratch.split_and_load(p, ctx) for p in params])
    return [scratch.get_params(list(rows), c) for rows, c in zip(shards, ctx)]


def gather(parts: list[NDArray], device: Context) -> NDArray:
    """Concatenate all devices' channels (n, some, ...) on one device. Returns (n, all, ...), with a gradient."""
    whole = nd.concat(*[part.as_in_context(device) for part in parts], dim=1)
    whole.attach_grad()
    return whole


def gather_backward(gradients: list[NDArray], parts: list[NDArray]) -> list[NDArray]:
    """Compute the gradient of each array in `parts` (n, some, ...), on the device of that array: a reduce-scatter.

    gradients: one array (n, all, ...) per device that used all channels. This function sums them.
    """
    reduced, start = [], 0
    for part in parts:
        end = start + part.shape[1]
        pieces = [nd.slice_axis(g, axis=1, begin=start, end=end).as_in_context(part.context) for g in gradients]
        reduced.append(nd.add_n(*pieces))
        start = end
    return reduced


def forward_backward_layers(device_params: list[Params], X: NDArray, y: NDArray, ctx: list[Context]) -> NDArray:
    """Compute the gradients of the parameters on each device. Returns the losses (n,), on the first device."""
    inputs, exchanges = [X.as_in_context(c) for c in ctx], []
    for i, layer in enumerate(LAYERS):
        with autograd.record():  # each channel depends on all channels of the previous layer
            parts = [layer(x, *params[2 * i : 2 * i + 2]) for x, params in zip(inputs, device_params)]
        receivers = ctx if i + 1 < len(LAYERS) else ctx[:1]  # only the first device computes the loss
        inputs = [gather(parts, c) for c in receivers]
        exchanges.append((parts, inputs))
    y = y.as_in_context(ctx[0])
    with autograd.record():
        losses = scratch.loss(inputs[0], y)
    losses.backward()
    for parts, wholes in reversed(exchanges):
        gradients = gather_backward([whole.grad for whole in wholes], parts)
        for part, gradient in zip(parts, gradients):
            part.backward(gradient)
    return losses


def train_batch_layers(
    X: NDArray, y: NDArray, device_params: list[Params], ctx: list[Context], lr: float
) -> list[NDArray]:
    """Run one training step with layer-wise partitioning on images X (n, 1, 28, 28) and labels y (n,).

    Returns a list with one array, the losses (n,).
    """
    losses = forward_backward_layers(device_params, X, y, ctx)
    for params in device_params:
        scratch.sgd(params, lr, X.shape[0])
    return [losses]


def block(X: NDArray, W1: NDArray, b1: NDArray, W2: NDArray) -> NDArray:
    """One device's part of two dense layers with ReLU between them: its rows of W1 and b1, and its columns of W2.

    Returns a part (n, outputs) of a sum over all devices. The sum plus the second layer's bias is the layers' output.
    """
    return nd.FullyConnected(hidden(X, W1, b1), W2, no_bias=True, num_hidden=W2.shape[0])


# 3. Data parallelism: every device has the whole network and a part of the batch.


def replicate(params: Params, ctx: list[Context]) -> list[Params]:
    """Copy the eight parameters to each device. Returns one replica per device."""
    return [scratch.get_params(params, c) for c in ctx]


# {name: (the function that places the parameters on the devices, the function that trains one step)}
WAYS: dict[str, tuple[Callable[..., list[Params]], Callable[..., list[NDArray]]]] = {
    "network partitioning": (partition_network, train_batch_network),
    "layer-wise partitioning": (partition_layers, train_batch_layers),
    "data parallelism": (replicate, scratch.train_batch),
}
