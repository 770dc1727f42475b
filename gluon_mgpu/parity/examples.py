"""Checks the notebooks' printed values, the initial parameters, the equality of replicas, and the loop's batches.

Both implementations are checked through the functions and `Replicas` that training uses. Sources: the notebooks that
`scratch` and `highlevel` port and, for scattering, the PyTorch notebook.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from mxnet import Context, nd
from mxnet.ndarray import NDArray

from gluon_mgpu import scratch
from gluon_mgpu.parity.finding import Finding
from gluon_mgpu.training import datasets, loop, recipes
from gluon_mgpu.training.batches import batches
from gluon_mgpu.training.replicas import Replicas, implementation
from gluon_mgpu.training.settings import Settings

MODELS = {"scratch": ("lenet",), "highlevel": ("lenet", "lenet-max")}
EXAMPLES = "printed examples"
INITIAL = "initial parameters"
FEED = "what the loop feeds"
IMAGES = 16  # MNIST images on 4 devices, as in the notebook
KS_BOUND = 2.5  # a correct sample of n numbers has a distance above KS_BOUND / sqrt(n) with probability 7e-6
DISTRIBUTIONS: dict[str, tuple[str, Callable[[np.ndarray], np.ndarray]]] = {
    "lenet": ("normal(0, 0.01)", np.vectorize(NormalDist(0, 0.01).cdf)),
    "lenet-max": ("uniform(-0.07, 0.07)", lambda weights: np.clip((weights + 0.07) / 0.14, 0, 1)),
}


def check(ctx: list[Context], mnist: datasets.Dataset, data_dir: str | Path | None) -> Iterator[Finding]:
    """Yields all findings. ctx: 4 contexts. data_dir: the folder with the loop's data."""
    for impl in MODELS:
        yield from printed(impl, ctx, mnist)
    for impl in MODELS:
        yield from initial(impl, ctx)
    yield from fed(ctx[:2], data_dir)


def printed(impl: str, ctx: list[Context], mnist: datasets.Dataset) -> Iterator[Finding]:
    """Check, on 2 and on 4 contexts, the values that the notebooks print."""

    def finding(claim: str, holds: object, evidence: object) -> Finding:
        return Finding(EXAMPLES, f"{impl}: {claim}", bool(holds), str(evidence))

    module = implementation(impl)
    before, after = recipes.ALLREDUCE["before"], recipes.ALLREDUCE["after"]
    replicas: Replicas = module.Replicas(ctx[:2])
    for grads, values in zip(replicas.grads(), before):
        grads["b1"][:2] = nd.array(values[0])
    replicas.reduce()
    found = [[replicas.gradients(device)["b1"][:2].tolist()] for device in range(2)]
    yield finding(f"allreduce of {before} is {after}", found == after, found)

    for shown, numbers in ((recipes.SPLIT, 24), (recipes.SCATTER, 20)):
        data = np.arange(numbers, dtype=np.float32).reshape(shown["shape"])
        devices = ctx[: len(shown["rows"])]
        shards = module.split_and_load(nd.array(data), devices)
        values = [shard.asnumpy().tolist() for shard in shards]
        right = values == [data[rows].tolist() for rows in shown["rows"]]
        claim = f"rows {shown['rows']} of {numbers} numbers go to {len(devices)} devices"
        placed = [shard.context for shard in shards]
        yield finding(claim, right and placed == devices, f"{[len(rows) for rows in values]} rows on {placed}")

    replicas = module.Replicas(ctx, Settings(model=MODELS[impl][-1]))
    copied = [arrays(1)["b1"].tolist() for arrays in (replicas.parameters, replicas.gradients)]
    right, sizes = copied == [recipes.COPIED_BIAS] * 2, [len(values) for values in copied]
    yield finding("b1 and its gradient are 20 zeros on the second device", right, f"{sizes} numbers")

    X, y = next(batches(mnist.train_images[:IMAGES], mnist.train_labels[:IMAGES], IMAGES))
    Xs, ys = replicas.split(X), replicas.split(y)
    scores = [replicas.predict(shard).shape for shard in Xs]
    yield finding(f"each of {len(ctx)} devices computes 4 x 10 scores", scores == [(4, 10)] * len(ctx), scores)
    start = replicas.parameters()
    yield finding(f"the parameters on all {len(ctx)} devices are equal", *_all_equal(replicas))
    replicas.forward_backward(Xs, ys)
    W1 = {replicas.gradients(device)["W1"].tobytes() for device in range(len(ctx))}
    yield finding(
        "the gradients of the devices' shards differ", len(W1) == len(ctx), f"{len(W1)} different gradients of W1"
    )
    for _ in range(3):
        replicas.train_batch(X, y, 0.2)
    changed = sum(not np.array_equal(array, start[name]) for name, array in replicas.parameters().items())
    equal, evidence = _all_equal(replicas)
    right = equal and changed == len(start)
    yield finding("after 3 steps, all parameters have changed and are equal", right, f"{changed} changed; {evidence}")


def initial(impl: str, ctx: list[Context]) -> Iterator[Finding]:
    """Check that weights follow the notebook's distribution, by the Kolmogorov-Smirnov test, and that biases are 0."""
    for model in MODELS[impl]:
        parameters = implementation(impl).Replicas(ctx[:1], Settings(model=model)).parameters()
        distribution, cdf = DISTRIBUTIONS[model]
        distances = {name: _distance(array, cdf) for name, array in parameters.items() if name[0] == "W"}
        zero = not any(array.any() for name, array in parameters.items() if name[0] == "b")
        evidence = f"largest distance {max(distances.values()):.2f} / sqrt(n), limit {KS_BOUND}"
        holds = zero and max(distances.values()) <= KS_BOUND
        yield Finding(INITIAL, f"{impl}, {model}: weights {distribution}, biases 0", holds, evidence)


def _distance(array: np.ndarray, cdf: Callable[[np.ndarray], np.ndarray]) -> float:
    """The Kolmogorov-Smirnov distance between n numbers and a distribution, times sqrt(n)."""
    expected = cdf(np.sort(array.ravel()))
    steps = np.arange(array.size + 1) / array.size
    apart = np.maximum(steps[1:] - expected, expected - steps[:-1])
    return float(apart.max() * np.sqrt(array.size))


class Listener(scratch.Replicas):
    """Records the loop's batches, without training."""

    last: Listener

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        Listener.last = self
        self.batches: list[tuple[np.ndarray, np.ndarray]] = []
        self.rates: set[float] = set()
        self.evaluated = 0

    def train_batch(self, X: Any, y: Any, lr: float, batch_size: int = 0) -> list[NDArray]:
        self.batches.append((X.asnumpy(), y.asnumpy()))
        self.rates.add(lr)
        return [nd.zeros(y.shape[0])]

    def evaluate_accuracy(self, data_iter: Iterable[tuple[NDArray, NDArray]]) -> float:
        self.evaluated = sum(X.shape[0] for X, _ in data_iter)
        return 0.0


def fed(ctx: list[Context], data_dir: str | Path | None) -> Iterator[Finding]:
    """Check that the loop uses the recipe's settings, and that each epoch has each image once, with its label, in a new
    order."""
    recipe = recipes.RECIPES["scratch-lenet-fashion-mnist-2gpu"].options
    batch_size, lr, dataset = recipe["batch_size"], recipe["lr"], recipe["dataset"]
    data = datasets.load(dataset, data_dir)
    where = {"num_gpus": [c.device_id for c in ctx], "device": ctx[0].device_type, "data_dir": data_dir}
    with contextlib.redirect_stdout(io.StringIO()):
        loop.train(Listener, batch_size=batch_size, lr=lr, dataset=dataset, epochs=2, seed=1, **where)
    listener = Listener.last

    n, sizes = len(data.train_labels), [len(y) for _, y in listener.batches]
    per_epoch = [min(batch_size, n - start) for start in range(0, n, batch_size)]
    right = sizes == per_epoch * 2 and listener.rates == {lr}
    evidence = f"{len(sizes)} batches of {sorted({*sizes})}, learning rate {listener.rates}"
    yield Finding(FEED, "the recipe's batch size and learning rate", right, evidence)

    images, labels = (np.concatenate(arrays) for arrays in zip(*listener.batches))
    seen = _rows(np.rint(images * 255).astype(np.uint8), labels)
    file = _rows(data.train_images, data.train_labels)
    index = {row: i for i, row in enumerate(file)}  # for duplicate images, the index of the last copy
    orders = [[index.get(row, -1) for row in rows] for rows in (file, seen[:n], seen[n:])]
    once = all(sorted(order) == sorted(orders[0]) for order in orders)
    yield Finding(FEED, "each image once per epoch, with its label", once, f"{n} images, 2 epochs")

    largest = np.abs(np.triu(np.corrcoef(orders), 1)).max() if once else 1.0
    limit = 5 / np.sqrt(n)
    evidence = f"largest correlation between orders, including the file's: {largest:.4f}, limit {limit:.4f}"
    yield Finding(FEED, "a new order in each epoch", bool(largest <= limit), evidence)
    all_tested = listener.evaluated == len(data.test_labels)
    yield Finding(FEED, "the whole test set is evaluated", all_tested, f"{listener.evaluated} images")


def _rows(images: np.ndarray, labels: np.ndarray) -> list[tuple[bytes, int]]:
    return [(image.tobytes(), int(label)) for image, label in zip(images, labels)]


def _all_equal(replicas: Replicas) -> tuple[bool, str]:
    """Whether the parameters on all devices are bit-for-bit equal, and the evidence."""
    first, *others = [replicas.parameters(device) for device in range(len(replicas.ctx))]
    unequal = {name for other in others for name in first if not np.array_equal(first[name], other[name])}
    return not unequal, f"{', '.join(sorted(unequal))} differ" if unequal else f"all {len(first)} arrays are equal"
