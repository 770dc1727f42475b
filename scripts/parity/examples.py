"""Checks the values that the notebooks print, and that all replicas have the same parameters.

For each implementation, the checks call the functions and the model that training uses. Sources: the notebooks
that `scratch` and `highlevel` port and, for scattering, the PyTorch notebook.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from mxnet import Context, nd

from gluon_mgpu.data.batches import batches
from gluon_mgpu.data.datasets import Dataset
from gluon_mgpu.training.config import Config
from gluon_mgpu.training.model import read_arrays
from gluon_mgpu.training.models import Model, create_model
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
    start = read_arrays(model)
    yield finding(f"the parameters are the same on all {len(ctx)} devices", *_all_equal(model))
    model.forward_backward(Xs, ys)
    W1 = {model.grads(device)["W1"].asnumpy().tobytes() for device in range(len(ctx))}
    yield finding(
        "each device's shard has a different gradient", len(W1) == len(ctx), f"{len(W1)} different gradients of W1"
    )
    for _ in range(3):
        model.step(X, y, 0.2)
    changed = sum(not np.array_equal(array, start[name]) for name, array in read_arrays(model).items())
    equal, evidence = _all_equal(model)
    right = equal and changed == len(start)
    claim = "after 3 steps, every parameter has changed and is the same on every device"
    yield finding(claim, right, f"{changed} changed; {evidence}")


def _all_equal(model: Model) -> tuple[bool, str]:
    """Returns whether the parameters are identical, bit for bit, on all devices, and the evidence."""
    first, *others = [read_arrays(model, device) for device in range(len(model.ctx))]
    unequal = {name for other in others for name in first if not np.array_equal(first[name], other[name])}
    same = f"all {len(first)} arrays are the same on every device"
    return not unequal, f"the devices differ in {', '.join(sorted(unequal))}" if unequal else same
