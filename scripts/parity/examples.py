"""Checks the values that the notebooks print, and that all replicas have the same parameters.

For each implementation, the checks call the functions and the model that training uses. Sources: the notebooks
that `scratch` and `highlevel` port, for scattering the PyTorch notebook, and for ResNet-18 the lecture "L14_6 Multi-GPU
Training in Python".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from mxnet import Context, nd

from gluon_mgpu import highlevel, networks
from gluon_mgpu.data.batches import batches
from gluon_mgpu.data.datasets import Dataset
from gluon_mgpu.training.config import Config
from gluon_mgpu.training.models import create_model
from parity import Finding

MODELS = {"scratch": "lenet", "highlevel": "lenet-max"}  # the notebooks' networks
EXAMPLES = "printed examples"
IMAGES = 16  # MNIST images on 4 devices, as in the notebook

# Values that the notebooks printed, one list per device
ALLREDUCE = {"before": [[[1, 1]], [[2, 2]]], "after": [[[3, 3]], [[3, 3]]]}
SPLIT: dict[str, Any] = {"shape": (6, 4), "rows": [[0, 1, 2], [3, 4, 5]]}  # arange(24) split over 2 devices
SCATTER: dict[str, Any] = {"shape": (4, 5), "rows": [[0], [1], [2], [3]]}  # arange(20) split over 4 devices
COPIED_BIAS = [0] * 20  # b1 and its gradient, after b1 is copied to a device


def check(ctx: list[Context], mnist: Dataset) -> Iterator[Finding]:
    """Yields all findings. ctx: 4 contexts."""
    for impl in MODELS:
        yield from printed(impl, ctx, mnist)
    yield from placed(ctx[:2])


def printed(impl: str, ctx: list[Context], mnist: Dataset) -> Iterator[Finding]:
    """Check the values that the notebooks print. Some examples use 2 contexts, and the others use 4."""

    def finding(claim: str, holds: object, evidence: object) -> Finding:
        return Finding(EXAMPLES, f"{impl}: {claim}", bool(holds), str(evidence))

    before, after = ALLREDUCE["before"], ALLREDUCE["after"]
    model: Any = create_model(impl, ctx[:2])
    for device, values in enumerate(before):
        model.grads(device)["b1"][:2] = nd.array(values[0])
    model.allreduce()
    sums = [[model.grads(device)["b1"][:2].asnumpy().tolist()] for device in range(2)]
    yield finding(f"allreduce of {before} is {after}", sums == after, sums)

    for shown, numbers in ((SPLIT, 24), (SCATTER, 20)):
        data = np.arange(numbers, dtype=np.float32).reshape(shown["shape"])
        devices = ctx[: len(shown["rows"])]
        shards = model.lesson.split_and_load(nd.array(data), devices)
        values = [shard.asnumpy().tolist() for shard in shards]
        right = values == [data[rows].tolist() for rows in shown["rows"]]
        claim = f"rows {shown['rows']} of an array of {numbers} numbers go to {len(devices)} devices"
        placed = [shard.context for shard in shards]
        yield finding(claim, right and placed == devices, f"{[len(rows) for rows in values]} rows on {placed}")

    model = create_model(impl, ctx, Config(model=MODELS[impl]))
    copied = [arrays["b1"].asnumpy().tolist() for arrays in (model.arrays(1), model.grads(1))]
    right, sizes = copied == [COPIED_BIAS] * 2, [len(values) for values in copied]
    yield finding("b1 and its gradient are 20 zeros on the second device", right, f"{sizes} numbers")

    X, y = next(batches(mnist.train_images[:IMAGES], mnist.train_labels[:IMAGES], IMAGES))
    Xs, ys = model.split_and_load(X), model.split_and_load(y)
    scores = [model.predict(shard).shape for shard in Xs]
    yield finding(f"each of {len(ctx)} devices computes 4 x 10 scores", scores == [(4, 10)] * len(ctx), scores)
    parameters = {p.asnumpy().tobytes() for device in range(len(ctx)) for p in [model.arrays(device)["W1"]]}
    model.forward_backward(Xs, ys)
    gradients = {model.grads(device)["W1"].asnumpy().tobytes() for device in range(len(ctx))}
    claim = f"{len(ctx)} devices have the same W1, and each shard has a different gradient"
    right, counts = (
        (len(parameters), len(gradients)) == (1, len(ctx)),
        f"{len(parameters)} W1, {len(gradients)} gradients",
    )
    yield finding(claim, right, counts)


def placed(ctx: list[Context]) -> Iterator[Finding]:
    """Check that ResNet-18's parameters exist only on the contexts that they were initialized on."""
    net = networks.resnet18()
    highlevel.initialize(net, ctx)
    for c in ctx:
        net(nd.zeros((1, 1, 28, 28), ctx=c))  # creates the parameters
    params = list(net.collect_params().values())
    right = all([array.context for array in p.list_data()] == ctx for p in params)
    yield Finding(EXAMPLES, f"ResNet-18's parameters are on each of {ctx}", right, f"{len(params)} arrays")
    other = Context(ctx[0].device_type, len(ctx))
    claim = f"reading ResNet-18's parameters from {other} raises RuntimeError"
    try:
        params[0].data(other)
        yield Finding(EXAMPLES, claim, False, "no error")
    except RuntimeError as error:
        yield Finding(EXAMPLES, claim, True, str(error).splitlines()[0])
