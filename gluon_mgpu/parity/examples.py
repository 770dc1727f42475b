"""The exact part: the values that the notebooks print on the way, and what must be equal where, compared as values.

Both implementations are asked the same, by the functions and `Replicas` that training itself uses, on CPU contexts or
GPUs. Sources: the notebooks of `scratch` and `highlevel`, and the PyTorch one, which scatters.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from mxnet import Context, nd
from mxnet.ndarray import NDArray

from gluon_mgpu import highlevel, scratch
from gluon_mgpu.parity.finding import Finding
from gluon_mgpu.training import datasets, loop, recipes
from gluon_mgpu.training.settings import Settings

IMPLS = {"scratch": scratch, "highlevel": highlevel}
MODELS = {"scratch": ("lenet",), "highlevel": ("lenet", "lenet-max")}
EXAMPLES = "printed examples"
INITIAL = "initial parameters"
FEED = "what the loop feeds"
IMAGES = 16  # of MNIST, on 4 devices, as in the notebook
KS_BOUND = 2.5  # over sqrt(n): Kolmogorov's distance of n true draws is beyond it 7 times in a million
DISTRIBUTIONS: dict[str, tuple[str, Callable[[np.ndarray], np.ndarray]]] = {
    "lenet": ("normal(0, 0.01)", np.vectorize(NormalDist(0, 0.01).cdf)),
    "lenet-max": ("uniform(-0.07, 0.07)", lambda weights: np.clip((weights + 0.07) / 0.14, 0, 1)),
}


def check(ctx: list[Context], mnist: datasets.Dataset, data_dir: str | Path | None) -> Iterator[Finding]:
    """All findings. ctx: 4 contexts. mnist: its Dataset. data_dir: where the loop finds its own."""
    for impl in IMPLS:
        yield from printed(impl, ctx, mnist)
        yield from initial(impl, ctx)
    yield from fed(ctx[:2], data_dir)


def printed(impl: str, ctx: list[Context], mnist: datasets.Dataset) -> Iterator[Finding]:
    """What the notebooks show on 2 and on 4 contexts. impl: "scratch" or "highlevel"."""
    module = IMPLS[impl]

    def finding(claim: str, holds: object, figure: str) -> Finding:
        return Finding(EXAMPLES, f"{impl}: {claim}", bool(holds), figure)

    before, after = (recipes.ALLREDUCE[when] for when in ("before", "after"))
    summed = _allreduced(impl, ctx[:2], before)
    yield finding(
        f"allreduce of {before} is {after}", _equal(summed, after), str([array.asnumpy().tolist() for array in summed])
    )

    for printed_of, numbers in ((recipes.SPLIT, 24), (recipes.SCATTER, 20)):
        data = np.arange(numbers, dtype=np.float32).reshape(printed_of["shape"])
        there = ctx[: len(printed_of["rows"])]
        shards = module.split_and_load(nd.array(data), there)
        right = _equal(shards, [data[rows] for rows in printed_of["rows"]])
        placed = [shard.context for shard in shards] == there
        claim = f"rows {printed_of['rows']} of {numbers} numbers go to {len(there)} devices"
        yield finding(claim, right and placed, f"{[len(shard) for shard in shards]} rows on {there}")

    replicas = module.Replicas(ctx[:2], Settings(model=MODELS[impl][-1]))
    copied = [arrays(1)["b1"] for arrays in (replicas.parameters, replicas.gradients)]
    right = all(array.tolist() == recipes.COPIED_BIAS for array in copied)
    yield finding(
        "b1 and its gradient are 20 zeros on the second device", right, f"{[len(array) for array in copied]} numbers"
    )

    replicas = module.Replicas(ctx, Settings(model=MODELS[impl][-1]))
    X, y = next(loop.batches(mnist.train_images[:IMAGES], mnist.train_labels[:IMAGES], IMAGES))
    scores = [shard.shape for shard in replicas.predict(X)]
    n = IMAGES // len(ctx)
    yield finding(f"{n} x 10 scores on each of {len(ctx)} devices", scores == [(n, 10)] * len(ctx), str(scores))
    start = replicas.parameters()
    yield finding(f"the parameters on all {len(ctx)} devices are equal", *_all_equal(replicas))

    Xs, ys = (module.split_and_load(data, ctx) for data in (X, y))
    module.forward_backward(getattr(replicas, "net", None) or replicas.device_params, Xs, ys)
    W1 = [replicas.gradients(device)["W1"] for device in range(len(ctx))]
    differ = [not np.array_equal(a, b) for i, a in enumerate(W1) for b in W1[:i]]
    yield finding(
        "the gradients of their shards are not", all(differ), f"{sum(differ)} of {len(differ)} pairs of W1's differ"
    )
    for _ in range(3):
        replicas.train_batch(X, y, 0.2)
    moved = [name for name, array in replicas.parameters().items() if not np.array_equal(array, start[name])]
    same, figure = _all_equal(replicas)
    right = same and len(moved) == len(start)
    yield finding("after 3 steps all have moved and are equal again", right, f"{len(moved)} of {len(start)}; {figure}")


def initial(impl: str, ctx: list[Context]) -> Iterator[Finding]:
    """The weights come from the notebook's distribution, by Kolmogorov and Smirnov, and biases are 0."""
    for model in MODELS[impl]:
        parameters = IMPLS[impl].Replicas(ctx[:1], Settings(model=model)).parameters()
        distribution, cdf = DISTRIBUTIONS[model]
        distances = {name: _distance(array, cdf) for name, array in parameters.items() if name[0] == "W"}
        zero = not any(array.any() for name, array in parameters.items() if name[0] == "b")
        furthest = max(distances, key=lambda name: distances[name])
        figure = (
            f"{furthest} is furthest, {distances[furthest]:.2f} / sqrt(weights), at most {KS_BOUND}; "
            f"biases {'' if zero else 'not '}0"
        )
        yield Finding(
            INITIAL, f"{impl}, {model}: {distribution}, biases 0", zero and max(distances.values()) <= KS_BOUND, figure
        )


def _distance(array: np.ndarray, cdf: Callable[[np.ndarray], np.ndarray]) -> float:
    """Kolmogorov's distance of an array's numbers from a distribution, times the root of how many there are."""
    expected = cdf(np.sort(array.ravel()))
    steps = np.arange(array.size + 1) / array.size
    apart = np.maximum(steps[1:] - expected, expected - steps[:-1])
    return float(apart.max() * np.sqrt(array.size))


class Listener:
    """In place of replicas: takes what the loop feeds, and answers that every loss is 0."""

    def __init__(self) -> None:
        self.batches: list[tuple[np.ndarray, np.ndarray]] = []
        self.rates: list[float] = []

    def train_batch(self, X: NDArray, y: NDArray, lr: float) -> list[NDArray]:
        self.batches.append((X.asnumpy(), y.asnumpy()))
        self.rates.append(lr)
        return [nd.zeros(X.shape[0])]

    def evaluate_accuracy(self, data_iter: Iterable[loop.Batch]) -> float:
        self.evaluated = sum(X.shape[0] for X, _ in data_iter)
        return 0.0

    def parameters(self) -> dict[str, np.ndarray]:
        return {}


def fed(ctx: list[Context], data_dir: str | Path | None, epochs: int = 2) -> Iterator[Finding]:
    """What the loop gives a training step: every image once an epoch, with its label, in a new order, in the recipe's
    batches and with its learning rate."""
    options = recipes.RECIPES["scratch-lenet-fashion-mnist-2gpu"].options
    settings = Settings(options["batch_size"], options["lr"], dataset=options["dataset"], epochs=epochs, seed=1)
    data = datasets.load(settings.dataset, data_dir)
    listener: Any = Listener()  # what one process that keeps nothing asks of replicas, and no more
    with contextlib.redirect_stdout(io.StringIO()):
        loop.run(lambda _: listener, ctx, settings, config={"impl": "parity"}, data_dir=data_dir)
    n, sizes = len(data.train_labels), [len(y) for _, y in listener.batches]
    lr_right = set(listener.rates) == {settings.lr}
    expected = ([settings.batch_size] * (n // settings.batch_size) + [n % settings.batch_size]) * epochs
    figure = f"{len(sizes)} batches of {sorted({*sizes}, reverse=True)} at learning rate {sorted({*listener.rates})}"
    yield Finding(FEED, "the recipe's batch size and learning rate", lr_right and sizes == expected, figure)

    def rows(images: np.ndarray, labels: np.ndarray) -> list[tuple[bytes, int]]:
        pixels = np.rint(images.reshape(len(labels), -1) * (255 if images.dtype == np.float32 else 1))
        return [(row.tobytes(), int(label)) for row, label in zip(pixels.astype(np.uint8), labels)]

    file = rows(data.train_images, data.train_labels)
    place = {row: i for i, row in enumerate(file)}  # of images that are there twice, the last
    seen = [row for X, y in listener.batches for row in rows(X, y)]
    orders = [[place.get(row, -1) for row in seen[e * n : (e + 1) * n]] for e in range(epochs)]
    once = all(sorted(order) == sorted(place[row] for row in file) for order in orders)
    yield Finding(FEED, "every image once an epoch, with its label", once, f"{n} images, {epochs} epochs")
    pairs = [(range(n), orders[0]), (range(n), orders[1]), tuple(orders)]
    correlations = [abs(float(np.corrcoef(a, b)[0, 1])) if len(a) == len(b) else 1.0 for a, b in pairs]
    figure = "correlation with the file's order {:.4f} and {:.4f}, with each other {:.4f}".format(*correlations)
    bound = 5 / np.sqrt(n)
    yield Finding(FEED, "a new order every epoch", bool(max(correlations) <= bound), f"{figure}, at most {bound:.4f}")
    everyone = listener.evaluated == len(data.test_labels)
    yield Finding(FEED, "the whole test set is evaluated", everyone, f"{listener.evaluated} images")


def _allreduced(impl: str, ctx: list[Context], values: Sequence[Any]) -> list[NDArray]:
    """The sum of arrays, one a device, as training sums gradients."""
    if impl == "scratch":
        data = [nd.array(value, ctx=c) for value, c in zip(values, ctx)]
        scratch.allreduce(data)
        return data
    replicas = highlevel.Replicas(ctx)
    bias = replicas.named["b1"]
    for value, c in zip(values, ctx):
        bias.grad(c)[:2] = nd.array(value, ctx=c).reshape(2)
    replicas.trainer.allreduce_grads()
    return [bias.grad(c)[:2].reshape((1, 2)) for c in ctx]


def _equal(arrays: list[NDArray], expected: Sequence[Any]) -> bool:
    found = [array.asnumpy() for array in arrays]
    return len(found) == len(expected) and all(np.array_equal(a, b) for a, b in zip(found, expected))


def _all_equal(replicas: loop.Replicas) -> tuple[bool, str]:
    """(whether every device has the same parameters bit for bit, in words)"""
    first, *others = [replicas.parameters(device) for device in range(len(replicas.ctx))]
    differ = {name for other in others for name in first if not np.array_equal(first[name], other[name])}
    return not differ, f"{', '.join(sorted(differ))} differ" if differ else f"{len(first)} arrays, bit for bit"
