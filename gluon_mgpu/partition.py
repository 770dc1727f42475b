"""LeNet split over devices in the three ways there are, from NDArray alone: by layers, by channels, by examples.

Every device records and differentiates its own part. What passes from one to another is a copy outside the record: the
graph ends there, so the gradient is carried back by hand, `output.backward(gradient)`, and each exchange can be seen.
Source: the notebook "Multi-GPU training" (Dive into Deep Learning, in PyTorch), on the ways of distributed training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gluon_mgpu.runtime import engine

engine.configure()

from mxnet import Context, autograd, nd  # noqa: E402
from mxnet.ndarray import NDArray  # noqa: E402

from gluon_mgpu import scratch  # noqa: E402
from gluon_mgpu.runtime.errors import UsageError  # noqa: E402
from gluon_mgpu.scratch import Params  # noqa: E402
from gluon_mgpu.training import loop  # noqa: E402


def convolution(X: NDArray, W: NDArray, b: NDArray) -> NDArray:
    """Convolution, ReLU and average pooling of 2x2: (n, c, h, w) to (n, outputs, ...)."""
    h = nd.Convolution(data=X, weight=W, bias=b, kernel=W.shape[2:], num_filter=W.shape[0])
    return nd.Pooling(nd.Activation(h, act_type="relu"), pool_type="avg", kernel=(2, 2), stride=(2, 2))


def hidden(X: NDArray, W: NDArray, b: NDArray) -> NDArray:
    """Dense layer with ReLU: (n, ...), flattened, to (n, outputs)."""
    return nd.Activation(scores(X, W, b), act_type="relu")


def scores(X: NDArray, W: NDArray, b: NDArray) -> NDArray:
    """Dense layer: (n, ...), flattened, to (n, outputs)."""
    return nd.FullyConnected(X, W, b, num_hidden=W.shape[0])


Layer = Callable[[NDArray, NDArray, NDArray], NDArray]
# The layers of scratch.lenet, two parameters each. They take the number of outputs from W, so that some of the rows of
# W and b give just these channels. Images (n, 1, 28, 28) become:
LAYERS: tuple[Layer, ...] = (
    convolution,  # (n, 20, 13, 13)
    convolution,  # (n, 50, 4, 4)
    hidden,  # (n, 128)
    scores,  # (n, 10)
)


# 1. Network partitioning: the layers on different devices.


def stages(devices: int) -> list[slice]:
    """The layers of each device, as slices of LAYERS: one layer each, and the last device has all that are left.

    On 2 devices the first convolution is alone, the most even cut: the second has nine tenths of the arithmetic, and
    what takes time beside it is the first one's ReLU and pooling, of 13520 numbers an example. A cut after the second
    would send a quarter of the bytes, and leave the other device next to nothing to do.
    """
    layers = len(LAYERS)
    if devices > layers:
        raise UsageError(f"network partitioning on {devices} devices: LeNet has {layers} layers; give {layers} at most")
    return [slice(i, i + 1) for i in range(devices - 1)] + [slice(devices - 1, layers)]


def partition_network(params: Params, ctx: list[Context], micro_batches: int = 1) -> list[Params]:
    """A list a device: the parameters of its layers. micro_batches: as `train_batch_network` is to be called."""
    grad_req = "add" if micro_batches > 1 else "write"
    return [
        scratch.get_params(params[2 * stage.start : 2 * stage.stop], c, grad_req)
        for stage, c in zip(stages(len(ctx)), ctx)
    ]


def forward(h: NDArray, layers: Sequence[Layer], params: Params) -> NDArray:
    for layer, W, b in zip(layers, params[::2], params[1::2]):
        h = layer(h, W, b)
    return h


def forward_backward_network(device_params: list[Params], X: NDArray, y: NDArray, ctx: list[Context]) -> NDArray:
    """Gradients of each device's layers; returns the losses (n,), on the last device."""
    *stages_before, last = stages(len(ctx))
    inputs, outputs = [X.as_in_context(ctx[0])], []
    for stage, params, following in zip(stages_before, device_params, ctx[1:]):
        with autograd.record():
            outputs.append(forward(inputs[-1], LAYERS[stage], params))
        inputs.append(outputs[-1].copyto(following))  # on 2 devices (n, 20, 13, 13)
        inputs[-1].attach_grad()
    y = y.as_in_context(ctx[-1])
    with autograd.record():
        losses = scratch.loss(forward(inputs[-1], LAYERS[last], device_params[-1]), y)
    losses.backward()
    for output, received in zip(reversed(outputs), reversed(inputs)):
        output.backward(received.grad.copyto(output.context))  # of the shape of output
    return losses


def train_batch_network(
    X: NDArray, y: NDArray, device_params: list[Params], ctx: list[Context], lr: float, micro_batches: int = 1
) -> list[NDArray]:
    """One step of network partitioning: X (n, 1, 28, 28), y (n,).

    Only one device works at a time, unless the batch is cut into micro-batches, whose gradients add up: then the first
    device takes the second of them while the next device has the first. Nothing here arranges that: the engine starts
    on every device what has its inputs. Returns the losses of each micro-batch, still being computed.
    """
    if micro_batches > 1:
        scratch.zero_gradients(device_params)
    losses = [forward_backward_network(device_params, *piece, ctx) for piece in loop.pieces(X, y, micro_batches)]
    for params in device_params:
        scratch.sgd(params, lr, X.shape[0])
    return losses


# 2. Layer-wise partitioning: the channels of every layer on different devices.


def partition_layers(params: Params, ctx: list[Context]) -> list[Params]:
    """A list a device: its share of the outputs, which are the first axis, of each of the eight parameters."""
    if len(ctx) > 10:
        raise UsageError(f"layer-wise partitioning on {len(ctx)} devices: LeNet has 10 outputs; give 10 at most")
    shards = zip(*[scratch.split_and_load(p, ctx) for p in params])
    return [scratch.get_params(list(rows), c) for rows, c in zip(shards, ctx)]


def gather(parts: list[NDArray], device: Context) -> NDArray:
    """The channels (n, some, ...) that each device computed, together on one device: (n, all, ...), with a gradient."""
    whole = nd.concat(*[part.as_in_context(device) for part in parts], dim=1)
    whole.attach_grad()
    return whole


def reduce_scatter(gradients: list[NDArray], parts: list[NDArray]) -> list[NDArray]:
    """For each of parts (n, some, ...) the gradient of its channels, on its device.

    gradients: of the whole (n, all, ...), from each device that used it. They are summed, since all of them did.
    """
    reduced, start = [], 0
    for part in parts:
        end = start + part.shape[1]
        own = [nd.slice_axis(g, axis=1, begin=start, end=end).as_in_context(part.context) for g in gradients]
        reduced.append(nd.add_n(*own))
        start = end
    return reduced


def forward_backward_layers(device_params: list[Params], X: NDArray, y: NDArray, ctx: list[Context]) -> NDArray:
    """Gradients of each device's channels; returns the losses (n,), on the first device."""
    inputs, exchanges = [X.as_in_context(c) for c in ctx], []
    for i, layer in enumerate(LAYERS):
        with autograd.record():  # a channel is computed from all channels of the layer before
            parts = [layer(x, *params[2 * i : 2 * i + 2]) for x, params in zip(inputs, device_params)]
        users = ctx if i + 1 < len(LAYERS) else ctx[:1]  # one device computes the loss
        inputs = [gather(parts, c) for c in users]
        exchanges.append((parts, inputs))
    y = y.as_in_context(ctx[0])
    with autograd.record():
        losses = scratch.loss(inputs[0], y)
    losses.backward()
    for parts, wholes in reversed(exchanges):
        for part, gradient in zip(parts, reduce_scatter([whole.grad for whole in wholes], parts)):
            part.backward(gradient)
    return losses


def train_batch_layers(
    X: NDArray, y: NDArray, device_params: list[Params], ctx: list[Context], lr: float
) -> list[NDArray]:
    """One step of layer-wise partitioning: X (n, 1, 28, 28), y (n,). Returns the losses in a list, as the others do."""
    losses = forward_backward_layers(device_params, X, y, ctx)
    for params in device_params:
        scratch.sgd(params, lr, X.shape[0])
    return [losses]


# 3. Data parallelism: all of the network on every device, and a part of the batch.


def replicate(params: Params, ctx: list[Context]) -> list[Params]:
    """A list a device: a replica of the eight parameters."""
    return [scratch.get_params(params, c) for c in ctx]


# How each way spreads the parameters over devices, and its step.
WAYS: dict[str, tuple[Callable[..., list[Params]], Callable[..., list[NDArray]]]] = {
    "network partitioning": (partition_network, train_batch_network),
    "layer-wise partitioning": (partition_layers, train_batch_layers),
    "data parallelism": (replicate, scratch.train_batch),
}
