"""The notebooks' inspection cells on real data: what each device holds at each stage of a training step.

Each function prints the output of one cell. `Scratch` and `Gluon` implement what differs between the lessons. Sources:
the notebooks of `scratch` and `highlevel`, and the lecture, which requests parameters on a context without a replica.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence
from pathlib import Path

import mxnet as mx
import numpy as np
from mxnet import Context, gluon, nd
from mxnet.ndarray import NDArray

from gluon_mgpu import highlevel, scratch
from gluon_mgpu.runtime import devices
from gluon_mgpu.training import batches, datasets

SCALE = 0.1  # scale of the initial weights; with the notebook's 0.01, one step would not change the printed digits
LR = 0.2
EXAMPLES = 4  # per device
WIDTH = 96  # characters per printed line


def walk(
    impl: str,
    num_gpus: int | str | Sequence[int],
    *,
    dataset: str = "fashion-mnist",
    data_dir: str | Path | None = None,
    device: str = "auto",
    seed: int = 0,
) -> None:
    """Print the output of all cells. impl: "scratch" or "highlevel". seed: for the parameters and synthetic data.

    num_gpus, device: see `devices.contexts`; GPUs that the machine does not have are omitted. dataset, data_dir: see
    `datasets.load`. Raises the same exceptions as these two functions.
    """
    ctx = devices.contexts(num_gpus, device, fewer=True)
    data = datasets.load(dataset, data_dir, EXAMPLES * len(ctx), seed)
    X, y = next(batches.batches(data.train_images, data.train_labels, EXAMPLES * len(ctx)))
    mx.random.seed(seed)
    net: Scratch | Gluon = Scratch(ctx) if impl == "scratch" else Gluon(ctx)
    print(f"{impl} on {ctx}, with {data.name}")
    with np.printoptions(precision=3, suppress=True, linewidth=WIDTH):
        copied_parameters(net)
        allreduce(net)
        split_batch(net, X, y)
        scores(net, X)
        first_convolution(net, X, y)
        missing_context(net, X)


class Scratch:
    """LeNet from `scratch`: `replicas` holds one list of eight arrays per device."""

    lesson = scratch
    copying = "get_params(params, ctx) copies each parameter with copyto and attaches a gradient to the copy."
    summing = "allreduce(data) adds all arrays on the first device and copies the sum back to the other devices."
    missing = (
        "An NDArray is on exactly one context. MXNet only checks that an operator's inputs are all on CPUs or all on "
        "GPUs, and scratch adds no check. Here, lenet is called with the first device's parameters and with images on "
        "a context without a replica"
    )

    def __init__(self, ctx: list[Context]) -> None:
        self.ctx, self.rule = ctx, LR
        params = scratch.init_params(SCALE)
        self.replicas = [scratch.get_params(params, c) for c in ctx]

    def parameters(self) -> list[list[NDArray]]:
        """The eight arrays on each device."""
        return self.replicas

    def scores(self, Xs: list[NDArray]) -> list[NDArray]:
        return [scratch.lenet(X, params) for X, params in zip(Xs, self.replicas)]

    def allreduce(self, data: list[NDArray]) -> None:
        scratch.allreduce(data)

    def ask(self, context: Context, X: NDArray) -> str:
        """Compute the scores of images on a context without a replica. Returns MXNet's response."""
        try:
            found = scratch.lenet(X.as_in_context(context), self.replicas[0])
            found.wait_to_read()
        except mx.MXNetError as error:
            return str(error).splitlines()[-1]
        return f"No error: the scores are on {found.context}, because all CPU contexts share the host's memory."


class Gluon:
    """LeNet from `highlevel`: `replicas` is one network, which holds the arrays of all devices."""

    lesson = highlevel
    copying = "initialize(net, ctx) draws each parameter once and puts a copy, with a gradient, on every device."
    summing = 'Trainer.step uses a KVStore of type "device": pushpull(key, data) leaves the sum on each device.'
    missing = (
        "The parameters are on the contexts that the network was initialized on, and Gluon rejects any other context. "
        "Here, weight.data(context) of the first convolution is called with a context without a replica"
    )

    def __init__(self, ctx: list[Context]) -> None:
        self.ctx, self.replicas = ctx, highlevel.lenet()
        highlevel.initialize(self.replicas, ctx, init=mx.init.Normal(SCALE))
        self.params = self.replicas.collect_params()
        self.rule = gluon.Trainer(self.params, "sgd", {"learning_rate": LR}, update_on_kvstore=False)

    def parameters(self) -> list[list[NDArray]]:
        """The eight arrays on each device."""
        return [[p.data(c) for p in self.params.values()] for c in self.ctx]

    def scores(self, Xs: list[NDArray]) -> list[NDArray]:
        return [self.replicas(X) for X in Xs]

    def allreduce(self, data: list[NDArray]) -> None:
        store = mx.kv.create("device")
        store.init("data", data[0])
        store.pushpull("data", data)

    def ask(self, context: Context, X: NDArray) -> str:
        """Request the weights on a context without a replica. Returns Gluon's response."""
        try:
            return f"No error: {self.params['cnn_conv0_weight'].data(context)}"
        except RuntimeError as error:
            return f"RuntimeError: {str(error).splitlines()[0]}"


def copied_parameters(net: Scratch | Gluon) -> None:
    b1 = net.parameters()[0][1]
    show(f"1. {net.copying} This is b1, the first convolution's 20 biases, and its gradient:", b1, b1.grad)


def allreduce(net: Scratch | Gluon) -> None:
    data = [nd.ones((1, 2), ctx=c) * (i + 1) for i, c in enumerate(net.ctx)]
    show(f"2. Allreduce sums arrays, one per device, and gives every device the sum. {net.summing} Before:", *data)
    net.allreduce(data)
    show("After:", *data)


def split_batch(net: Scratch | Gluon, X: NDArray, y: NDArray) -> None:
    batch = nd.arange(24).reshape((6, 4))
    show("3. split_and_load(data, ctx) splits a batch into shards of nearly equal size, one per device. Batch:", batch)
    show("Shards:", *net.lesson.split_and_load(batch, net.ctx))
    show(f"Shards of a batch of {len(y)} images with labels:")
    for X_shard, y_shard in zip(net.lesson.split_and_load(X, net.ctx), net.lesson.split_and_load(y, net.ctx)):
        print(f"{X_shard.shape} and {y_shard.shape} on {X_shard.context}")


def scores(net: Scratch | Gluon, X: NDArray) -> None:
    found = net.scores(net.lesson.split_and_load(X, net.ctx))
    show("4. Each device computes the scores of its shard with its own replica: one row per image, 10 classes:", *found)


def first_convolution(net: Scratch | Gluon, X: NDArray, y: NDArray) -> None:
    arrays = net.parameters()
    channels = [W1[0] for W1, *_ in arrays]
    show("5. Channel 0 of the first convolution, on every context:", *channels)
    compare("channel 0", channels)
    net.lesson.forward_backward(net.replicas, *(net.lesson.split_and_load(data, net.ctx) for data in (X, y)))
    grads = [W1.grad[0] for W1, *_ in arrays]
    show("The gradient of channel 0, which each device computes from its own shard:", *grads)
    compare("its gradient", grads)
    net.lesson.train_batch(X, y, net.replicas, net.ctx, net.rule)
    step = f"train_batch with learning rate {LR} sums the gradients, and every device updates its replica."
    show(f"{step} Channel 0 is now:", arrays[0][0][0])
    compare("all 8 gradients", [[array.grad for array in of_device] for of_device in arrays])
    compare("all 8 parameters", arrays)


def missing_context(net: Scratch | Gluon, X: NDArray) -> None:
    other = next(c for c in map(mx.cpu, itertools.count()) if c not in net.ctx)
    show(f"6. {net.missing}, {other}:")
    nd.waitall()  # operators may use all OpenMP threads, so contexts must not compute at the same time (docs/engine.md)
    print(textwrap.fill(net.ask(other, X), WIDTH))


def show(text: str, *arrays: NDArray) -> None:
    """Print a paragraph of text, then the arrays."""
    print(f"\n{textwrap.fill(text, WIDTH)}")
    for array in arrays:
        print(str(array).strip())


def compare(what: str, replicas: Sequence[NDArray | list[NDArray]]) -> None:
    """Print whether all devices have the same values. replicas: one array, or list of arrays, per device."""
    if len(replicas) == 1:
        print(f"{what}: only one context, so there is nothing to compare")
        return
    first, *others = replicas
    same = all(np.array_equal(a.asnumpy(), b.asnumpy()) for other in others for a, b in zip(first, other))
    print(f"{what}: the same on all {len(replicas)} contexts: {same}")
