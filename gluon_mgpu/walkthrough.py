"""The notebooks' inspection cells on real data: what lies on which device at each moment of a training step.

A cell is a function, and prints what it shows. `Scratch` and `Gluon` hold what the two implementations say differently.
Sources: the notebooks of `scratch` and `highlevel`, and the lecture on them, which asks Gluon for a context it has not.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence
from pathlib import Path

from gluon_mgpu.runtime import engine

engine.configure()

import mxnet as mx  # noqa: E402
import numpy as np  # noqa: E402
from mxnet import Context, gluon, nd  # noqa: E402
from mxnet.ndarray import NDArray  # noqa: E402

from gluon_mgpu import highlevel, scratch  # noqa: E402
from gluon_mgpu.runtime import devices  # noqa: E402
from gluon_mgpu.training import datasets, loop  # noqa: E402

SCALE = 0.1  # of the weights, where the notebook has 0.01: so one step shows in the digits that are printed
LR = 0.2
EXAMPLES = 4  # a device
WIDTH = 96  # of the lines, in characters


def walk(
    impl: str,
    num_gpus: int | str | Sequence[int],
    *,
    dataset: str = "fashion-mnist",
    data_dir: str | Path | None = None,
    device: str = "auto",
    seed: int = 0,
) -> None:
    """Print the tour. impl: "scratch" or "highlevel"; num_gpus, device: as in `devices.contexts`, where GPUs that are
    not there are left out; dataset, data_dir: as in `datasets.load`; seed: of the parameters, and of the synthetic set.
    Raises what these two raise.
    """
    ctx = devices.contexts(num_gpus, device, fewer=True)
    data = datasets.load(dataset, data_dir, EXAMPLES * len(ctx), seed)
    X, y = next(loop.batches(data.train_images, data.train_labels, EXAMPLES * len(ctx)))
    mx.random.seed(seed)
    kinds: dict[str, type[Scratch] | type[Gluon]] = {"scratch": Scratch, "highlevel": Gluon}
    net = kinds[impl](ctx)
    print(f"{impl} on {ctx}, with {data.name}")
    with np.printoptions(precision=3, suppress=True, linewidth=WIDTH):
        copied_parameters(net)
        allreduce(net)
        split_batch(net, X, y)
        scores(net, X)
        first_convolution(net)
        gradients_of_each_shard(net, X, y)
        one_step(net, X, y)
        another_context(net, X)


class Scratch:
    """LeNet by `scratch`: a list of eight arrays on each device."""

    impl = scratch
    copying = "get_params(params, ctx) copies each parameter with copyto and attaches a gradient to the copy."
    summing = "allreduce(data) adds all up on the first device and copies the sum back to the others."
    elsewhere = (
        "An NDArray lives on exactly one context. Of an operator's inputs MXNet compares only the kind of context, CPU "
        "or GPU, not its number, and scratch adds no check of its own. lenet with the first device's parameters, and "
        "images on a context without a replica."
    )

    def __init__(self, ctx: list[Context]) -> None:
        self.ctx = ctx
        params = scratch.init_params(SCALE)
        self.replicas = [scratch.get_params(params, c) for c in ctx]

    def parameters(self) -> list[list[NDArray]]:
        """The eight arrays on each device."""
        return self.replicas

    def gradients(self) -> list[list[NDArray]]:
        """The eight gradients on each device."""
        return [[p.grad for p in params] for params in self.replicas]

    def allreduce(self, data: list[NDArray]) -> None:
        scratch.allreduce(data)

    def train_batch(self, X: NDArray, y: NDArray) -> None:
        scratch.train_batch(X, y, self.replicas, self.ctx, LR)

    def ask(self, context: Context, X: NDArray) -> str:
        """What MXNet says to computing with images on a context where no replica is."""
        try:
            found = scratch.lenet(X.as_in_context(context), self.replicas[0])
            found.wait_to_read()
        except mx.MXNetError as error:
            return str(error).splitlines()[-1]
        return f"No error: it computed scores on {found.context}, since all CPU contexts share the host's memory."


class Gluon:
    """LeNet by `highlevel`: one net, which has its replicas inside."""

    impl = highlevel
    copying = "initialize(net, ctx) draws each parameter once and puts a copy, with its gradient, on every device."
    summing = 'Trainer.step does this with a KVStore of the kind "device": pushpull(key, data) leaves the sum on each.'
    elsewhere = (
        "The parameters live on the contexts that the net was initialized on, and Gluon refuses any other: "
        "weight.data(context) of the first convolution."
    )

    def __init__(self, ctx: list[Context]) -> None:
        self.ctx = ctx
        self.replicas = highlevel.lenet()
        highlevel.initialize(self.replicas, ctx, init=mx.init.Normal(SCALE))
        rule = {"learning_rate": LR}
        params = self.replicas.collect_params()
        self.trainer = gluon.Trainer(params, "sgd", rule, kvstore="device", update_on_kvstore=False)

    def parameters(self) -> list[list[NDArray]]:
        """The eight arrays on each device."""
        return [[p.data(c) for p in self.replicas.collect_params().values()] for c in self.ctx]

    def gradients(self) -> list[list[NDArray]]:
        """The eight gradients on each device."""
        return [[p.grad(c) for p in self.replicas.collect_params().values()] for c in self.ctx]

    def allreduce(self, data: list[NDArray]) -> None:
        store = mx.kv.create("device")
        store.init("data", data[0])
        store.pushpull("data", data)

    def train_batch(self, X: NDArray, y: NDArray) -> None:
        highlevel.train_batch(X, y, self.replicas, self.ctx, self.trainer)

    def ask(self, context: Context, X: NDArray) -> str:
        """What Gluon says to a request for the weights on a context where no replica is."""
        weight = self.replicas.collect_params()["cnn_conv0_weight"]
        try:
            return f"No error: {weight.data(context)}"
        except RuntimeError as error:
            return f"RuntimeError: {str(error).splitlines()[0]}"


def copied_parameters(net: Scratch | Gluon) -> None:
    explain(f"1. {net.copying} Here b1, the first convolution's 20 biases, and its gradient, on {net.ctx[0]}:")
    show(net.parameters()[0][1], net.gradients()[0][1])


def allreduce(net: Scratch | Gluon) -> None:
    explain(f"2. Arrays, one a device, are summed, and every device gets the sum. {net.summing} Before:")
    data = [nd.ones((1, 2), ctx=c) * (i + 1) for i, c in enumerate(net.ctx)]
    show(*data)
    net.allreduce(data)
    explain("After:")
    show(*data)


def split_batch(net: Scratch | Gluon, X: NDArray, y: NDArray) -> None:
    explain(
        "3. split_and_load(data, ctx) cuts a batch into shards, as even as can be, and puts one on each device. From:"
    )
    batch = nd.arange(24).reshape((6, 4))
    show(batch)
    explain("To:")
    show(*net.impl.split_and_load(batch, net.ctx))
    explain(f"And a batch of {len(y)} images with their labels:")
    for X_shard, y_shard in zip(net.impl.split_and_load(X, net.ctx), net.impl.split_and_load(y, net.ctx)):
        print(f"{X_shard.shape} and {y_shard.shape} on {X_shard.context}")


def scores(net: Scratch | Gluon, X: NDArray) -> None:
    explain("4. Each device computes the scores of its own shard, 10 classes an image, with its own replica:")
    show(*net.impl.predict(X, net.replicas, net.ctx))


def first_convolution(net: Scratch | Gluon) -> None:
    explain("5. Channel 0 of the first convolution, on every context:")
    channels = [W1[0] for W1, *_ in net.parameters()]
    show(*channels)
    compare("channel 0", channels)


def gradients_of_each_shard(net: Scratch | Gluon, X: NDArray, y: NDArray) -> None:
    explain("Its gradient after forward and backward, which each device computes from its own shard's images:")
    Xs, ys = (net.impl.split_and_load(data, net.ctx) for data in (X, y))
    net.impl.forward_backward(net.replicas, Xs, ys)
    gradients = [W1_grad[0] for W1_grad, *_ in net.gradients()]
    show(*gradients)
    compare("its gradient", gradients)


def one_step(net: Scratch | Gluon, X: NDArray, y: NDArray) -> None:
    explain(
        f"One step of train_batch, with learning rate {LR}: the gradients are summed, every device updates its own "
        "replica, and channel 0 is now:"
    )
    net.train_batch(X, y)
    show(net.parameters()[0][0][0])
    compare("all 8 gradients", net.gradients())
    compare("all 8 parameters", net.parameters())


def another_context(net: Scratch | Gluon, X: NDArray) -> None:
    other = next(c for c in map(mx.cpu, itertools.count()) if c not in net.ctx)
    explain(f"6. {net.elsewhere} On {other}:")
    nd.waitall()  # a single context has all OpenMP threads: no second one may compute beside it (docs/engine.md)
    print(textwrap.fill(net.ask(other, X), WIDTH))


def explain(text: str) -> None:
    print(f"\n{textwrap.fill(text, WIDTH)}")


def show(*arrays: NDArray) -> None:
    for array in arrays:
        print(str(array).strip())


def compare(what: str, replicas: Sequence[NDArray | list[NDArray]]) -> None:
    """Say whether the arrays of every device, a list or one array each, hold the same numbers."""
    if len(replicas) == 1:
        print(f"{what}: on one context, so there is nothing to compare")
        return
    first, *others = replicas
    same = all(np.array_equal(a.asnumpy(), b.asnumpy()) for other in others for a, b in zip(first, other))
    print(f"{what}: the same on all {len(replicas)} contexts: {same}")
