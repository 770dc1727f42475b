"""How far scratch, highlevel and the notebook's own code drift apart over 200 steps, against rounding alone.

All three start from the same parameters and take the same batches on 2 contexts. What float32 rounding alone does is
measured on the notebook's code: the same batches with their examples in another order, so that the same sums are added
up in another order. Rounding grows: a ReLU that falls to the other side of 0 moves a gradient, and the next steps move
more. So each step is also taken by itself, every time from the notebook's parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import mxnet as mx
import numpy as np
from mxnet import Context, nd
from mxnet.ndarray import NDArray

from gluon_mgpu import highlevel, scratch
from gluon_mgpu.parity import notebook
from gluon_mgpu.parity.finding import Finding
from gluon_mgpu.training import checkpoint, loop, recipes
from gluon_mgpu.training import tuning as blocks
from gluon_mgpu.training.datasets import Dataset

STEPS = 200
ORDERS = 3  # of the examples within each batch, beside the first
SEED = 1
OPTIONS = recipes.RECIPES["scratch-lenet-fashion-mnist-2gpu"].options
CHECK = "drift"
FACTOR = 20  # of what rounding alone does at most; docs/parity.md has how far it differs between orders
STEP_FACTOR = 10
# Of a single step with `blocks`, which round within an example too, so that a ReLU may fall to the other side.
BLOCKS_FACTOR = 100
AS_WRITTEN = "highlevel as written"  # without `blocks`


class Drift(NamedTuple):
    """Distances, relative: |a - b| / |b| over all parameters, or over a step's whole change of them."""

    apart: dict[tuple[str, str], np.ndarray]  # {pair: (steps,)}, each running on from its own parameters
    orders: np.ndarray  # (ORDERS, steps) the notebook's code from itself, by rounding alone
    moved: float  # how far the notebook's parameters are in the end from where they began
    step_apart: dict[tuple[str, str], np.ndarray]  # {pair: (steps,)}, each step from the same parameters
    step_orders: np.ndarray  # (steps,)


class Notebook:
    """The notebook's own code, with the methods of `Replicas` that are needed here."""

    def __init__(self, ctx: list[Context]) -> None:
        self.ctx = ctx

    def load(self, parameters: dict[str, np.ndarray], velocities: dict[str, np.ndarray]) -> None:
        params = [nd.array(_turned(parameters[name])) for name in checkpoint.LENET]
        self.device_params = [notebook.get_params(params, c) for c in self.ctx]

    def train_batch(self, X: NDArray, y: NDArray, lr: float) -> None:
        notebook.train_batch(X, y, self.device_params, self.ctx, lr)

    def parameters(self, device: int = 0) -> dict[str, np.ndarray]:
        return {name: _turned(p.asnumpy()) for name, p in zip(checkpoint.LENET, self.device_params[device])}


class Reference(NamedTuple):
    """What the notebook's code makes of the batches, on which nothing of ours but the batches has a part."""

    start: dict[str, np.ndarray]  # the parameters before the first step
    path: list[np.ndarray]  # the parameters, flat, after each step, with those of the start first
    orders: np.ndarray  # (ORDERS, steps)
    step_orders: np.ndarray  # (steps,)


def reference(
    ctx: list[Context], data: Dataset, steps: int, progress: Callable[[], object] = lambda: None
) -> Reference:
    """A Reference. ctx: 2 contexts. data: the recipe's Dataset. progress: called after each of (2 + ORDERS) * steps."""
    mx.random.seed(SEED)
    start = dict(zip(checkpoint.LENET, (p.asnumpy() for p in notebook.init_params())))
    start = {name: _turned(array) for name, array in start.items()}
    path = list(_path(Notebook(ctx), start, _batches(data, steps), progress))
    orders = [
        _distances(list(_path(Notebook(ctx), start, _batches(data, steps, order), progress)), path)
        for order in range(1, ORDERS + 1)
    ]
    step_orders = _steps(Notebook(ctx), start, path, _batches(data, steps, 1), progress)
    return Reference(start, path, np.array(orders), step_orders)


def measure(
    ctx: list[Context], data: Dataset, against: Reference, progress: Callable[[], object] = lambda: None
) -> Drift:
    """A Drift of our implementations from a Reference. progress is called after each of 5 * steps steps."""
    steps = len(against.path) - 1
    paths, by_step = {"the notebook's code": against.path}, {}
    for name, module in (("scratch", scratch), ("highlevel", highlevel)):
        paths[name] = list(_path(module.Replicas(ctx), against.start, _batches(data, steps), progress))
        by_step[name, "the notebook's code"] = _steps(
            module.Replicas(ctx), against.start, against.path, _batches(data, steps), progress
        )
    with blocks.as_written():
        by_step[AS_WRITTEN, "the notebook's code"] = _steps(
            highlevel.Replicas(ctx), against.start, against.path, _batches(data, steps), progress
        )
    pairs = [("scratch", "highlevel"), ("scratch", "the notebook's code"), ("highlevel", "the notebook's code")]
    apart = {pair: _distances(*(paths[name] for name in pair)) for pair in pairs}
    moved = np.linalg.norm(against.path[-1] - against.path[0]) / np.linalg.norm(against.path[0])
    return Drift(apart, against.orders, float(moved), by_step, against.step_orders)


def check(drift: Drift) -> Iterator[Finding]:
    """A Finding for each pair that is compared."""
    steps, limit = drift.orders.shape[1], FACTOR * drift.orders.max()
    for (a, b), distances in drift.apart.items():
        figure = (
            f"{distances.max():.1e} at most; rounding alone {drift.orders.max():.1e}, limit {limit:.1e}; all moved by "
            f"{drift.moved:.1e}"
        )
        yield Finding(CHECK, f"{a} and {b} over {steps} steps", bool(distances.max() <= limit), figure)
    rounding = drift.step_orders.max()
    limit = STEP_FACTOR * rounding
    for (a, b), distances in drift.step_apart.items():
        most = BLOCKS_FACTOR * rounding if a == "highlevel" and blocks.USED else limit
        figure = (
            f"{np.median(distances):.1e} in the median, {distances.max():.1e} at most; rounding alone {rounding:.1e}, "
            f"limits {limit:.1e} and {most:.1e}"
        )
        holds = bool(np.median(distances) <= limit and distances.max() <= most)
        yield Finding(CHECK, f"{a} and {b}, each step by itself", holds, figure)


def as_json(drift: Drift) -> dict:
    """What parity.json keeps of it."""

    def named(apart: dict[tuple[str, str], np.ndarray]) -> dict[str, list[float]]:
        return {" and ".join(pair): distances.tolist() for pair, distances in apart.items()}

    return {
        "moved": drift.moved,
        "steps": drift.orders.shape[1],
        "rounding": drift.orders.tolist(),
        "apart": named(drift.apart),
        "limit": float(FACTOR * drift.orders.max()),
        "step_rounding": drift.step_orders.tolist(),
        "step_apart": named(drift.step_apart),
        "step_limit": float(STEP_FACTOR * drift.step_orders.max()),
    }


def _batches(data: Dataset, steps: int, order: int = 0) -> Iterator[loop.Batch]:
    """So many batches of the recipe. order: 0, or in which other order the examples of each batch come."""
    size = OPTIONS["batch_size"]
    if steps * size > len(data.train_labels):
        raise ValueError(f"{steps} batches of {size} from {len(data.train_labels)} images")
    chosen = np.random.default_rng(SEED).permutation(len(data.train_labels))[: steps * size]
    if order:
        rng = np.random.default_rng([SEED, order])
        chosen = np.concatenate([rng.permutation(chosen[i : i + size]) for i in range(0, len(chosen), size)])
    return loop.batches(data.train_images, data.train_labels, size, chosen)


def _path(
    replicas: Notebook | loop.Replicas,
    start: dict[str, np.ndarray],
    batches: Iterable[loop.Batch],
    progress: Callable[[], object],
) -> Iterator[np.ndarray]:
    """The parameters before the first step and after every one, flat, of the last device."""
    replicas.load(start, {})
    yield _flat(replicas)
    for X, y in batches:
        replicas.train_batch(X, y, OPTIONS["lr"])
        yield _flat(replicas)
        progress()


def _steps(
    replicas: Notebook | loop.Replicas,
    start: dict[str, np.ndarray],
    path: list[np.ndarray],
    batches: Iterable[loop.Batch],
    progress: Callable[[], object],
) -> np.ndarray:
    """(steps,): how far each step from the parameters of a path ends from the path's own, relative to its length."""
    distances = []
    for before, after, (X, y) in zip(path, path[1:], batches):
        replicas.load(_named(before, start), {})
        replicas.train_batch(X, y, OPTIONS["lr"])
        distances.append(np.linalg.norm(_flat(replicas) - after) / np.linalg.norm(after - before))
        progress()
    return np.array(distances)


def _flat(replicas: Notebook | loop.Replicas) -> np.ndarray:
    """All parameters of the last device in one float64 vector: differences of them are exact."""
    arrays = replicas.parameters(len(replicas.ctx) - 1).values()
    return np.concatenate([array.ravel() for array in arrays]).astype(np.float64)


def _named(flat: np.ndarray, like: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    ends = np.cumsum([array.size for array in like.values()])[:-1]
    return {
        name: part.reshape(array.shape).astype(np.float32)
        for (name, array), part in zip(like.items(), np.split(flat, ends))
    }


def _distances(path: list[np.ndarray], other: list[np.ndarray]) -> np.ndarray:
    return np.array([np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(path[1:], other[1:])])


def _turned(array: np.ndarray) -> np.ndarray:
    """The notebook's dense weights are (inputs, outputs), ours (outputs, inputs)."""
    return array.T if array.ndim == 2 else array
