"""The notebooks' inspection cells on real data: what each device holds at each stage of a training step.

Each function prints the output of one cell. Sources: the notebooks of `scratch` and `highlevel`, and the lecture, which
requests parameters on a context without a replica.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence
from pathlib import Path

import mxnet as mx
import numpy as np
from mxnet import nd
from mxnet.ndarray import NDArray

from gluon_mgpu.implementations import GluonReplicas, replicas
from gluon_mgpu.runtime import devices
from gluon_mgpu.training import batches, datasets
from gluon_mgpu.training.replicas import Replicas
from gluon_mgpu.training.settings import Settings

SCALE = 10  # factor for the initial weights; otherwise, one step would not change the printed digits
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
    net = replicas(impl, ctx, Settings(impl, tune=False))
    net.load_state_dict({name: array * SCALE for name, array in net.state_dict().items()})
    print(f"{impl} on {ctx}, with {data.name}")
    with np.printoptions(precision=3, suppress=True, linewidth=WIDTH):
        copied_parameters(net)
        allreduce(net)
        split_batch(net, X, y)
        scores(net, X)
        first_convolution(net, X, y)
        missing_context(net, X)


def copied_parameters(net: Replicas) -> None:
    how = "get_params(params, ctx) copies each parameter with copyto and attaches a gradient to the copy."
    if isinstance(net, GluonReplicas):
        how = "initialize(net, ctx) draws each parameter once and puts a copy, with a gradient, on every device."
    b1 = net.arrays[0]["b1"]
    show(f"1. {how} This is b1, the first convolution's 20 biases, and its gradient:", b1, b1.grad)


def allreduce(net: Replicas) -> None:
    how = "allreduce(data) adds all arrays on the first device and copies the sum back to the other devices."
    if isinstance(net, GluonReplicas):
        how = 'Trainer.step uses a KVStore of type "device": pushpull(key, data) leaves the sum on each device.'
    data = [nd.ones((1, 2), ctx=c) * (i + 1) for i, c in enumerate(net.ctx)]
    show(f"2. Allreduce sums arrays, one per device, and gives every device the sum. {how} Before:", *data)
    if isinstance(net, GluonReplicas):
        store = mx.kv.create("device")
        store.init("data", data[0])
        store.pushpull("data", data)
    else:
        net.lesson.allreduce(data)
    show("After:", *data)


def split_batch(net: Replicas, X: NDArray, y: NDArray) -> None:
    batch = nd.arange(24).reshape((6, 4))
    show("3. split_and_load(data, ctx) splits a batch into shards of nearly equal size, one per device. Batch:", batch)
    show("Shards:", *net.split(batch))
    show(f"Shards of a batch of {len(y)} images with labels:")
    for X_shard, y_shard in zip(net.split(X), net.split(y)):
        print(f"{X_shard.shape} and {y_shard.shape} on {X_shard.context}")


def scores(net: Replicas, X: NDArray) -> None:
    found = [net.predict(X_shard) for X_shard in net.split(X)]
    show("4. Each device computes the scores of its shard with its own replica: one row per image, 10 classes:", *found)


def first_convolution(net: Replicas, X: NDArray, y: NDArray) -> None:
    arrays = [list(of_device.values()) for of_device in net.arrays]
    channels = [W1[0] for W1, *_ in arrays]
    show("5. Channel 0 of the first convolution, on every context:", *channels)
    compare("channel 0", channels)
    net.forward_backward(net.split(X), net.split(y))
    grads = [W1.grad[0] for W1, *_ in arrays]
    show("The gradient of channel 0, which each device computes from its own shard:", *grads)
    compare("its gradient", grads)
    net.train_batch(X, y, LR)
    step = f"train_batch with learning rate {LR} sums the gradients, and every device updates its replica."
    show(f"{step} Channel 0 is now:", arrays[0][0][0])
    compare("all 8 gradients", [[array.grad for array in of_device] for of_device in arrays])
    compare("all 8 parameters", arrays)


def missing_context(net: Replicas, X: NDArray) -> None:
    other = next(c for c in map(mx.cpu, itertools.count()) if c not in net.ctx)
    if isinstance(net, GluonReplicas):
        call = "weight.data(context) of the first convolution, with a context without a replica"
        rule = "Gluon rejects any context that the network was not initialized on."
    else:
        call = "lenet, with the first device's parameters and with images on a context without a replica"
        rule = "MXNet only checks that an operator's inputs are all on CPUs or all on GPUs, and scratch adds no check."
    show(f"6. {rule} This is the result of {call}, {other}:")
    nd.waitall()  # operators may use all OpenMP threads, so contexts must not compute at the same time (docs/engine.md)
    try:
        if isinstance(net, GluonReplicas):
            found = net.net.collect_params()["cnn_conv0_weight"].data(other)
        else:
            found = net.lesson.lenet(X.as_in_context(other), net.model[0])
        found.wait_to_read()
        answer = f"No error: the result is on {found.context}, because all CPU contexts share the host's memory."
    except mx.MXNetError as error:
        answer = str(error).splitlines()[-1]
    except RuntimeError as error:
        answer = f"RuntimeError: {str(error).splitlines()[0]}"
    print(textwrap.fill(answer, WIDTH))


def show(text: str, *arrays: NDArray) -> None:
    """Print a paragraph of text, then the arrays."""
    print(f"\n{textwrap.fill(text, WIDTH)}")
    for array in arrays:
        print(str(array).strip())


def compare(what: str, of_devices: Sequence[NDArray | list[NDArray]]) -> None:
    """Print whether all devices have the same values. of_devices: one array, or list of arrays, per device."""
    if len(of_devices) == 1:
        print(f"{what}: only one context, so there is nothing to compare")
        return
    first, *others = of_devices
    same = all(np.array_equal(a.asnumpy(), b.asnumpy()) for other in others for a, b in zip(first, other))
    print(f"{what}: the same on all {len(of_devices)} contexts: {same}")
