"""Measures how far scratch and highlevel drift from the notebook's own code over many steps.

The reference is the notebook's code in float64, with parameters rounded to float32 after each step. Its path is the
list of its parameters before the first step and after each step. Each implementation trains on the same batches twice.
The first time, every step starts from the reference's parameters. The second time, only the first step does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import mxnet as mx
import numpy as np
from mxnet import Context, nd
from mxnet.ndarray import NDArray

from gluon_mgpu.data.batches import batches
from gluon_mgpu.data.datasets import Dataset
from gluon_mgpu.networks import LENET_NAMES
from gluon_mgpu.support import log
from gluon_mgpu.training.config import Config
from gluon_mgpu.training.model import read_arrays
from gluon_mgpu.training.models import Model, create_model
from gluon_mgpu.training.recipes import RECIPES
from parity import Finding, notebook

CHECK = "drift"
STEPS = 100
SEED = 1
BATCH_SIZE = RECIPES["scratch-lenet-fashion-mnist-2gpu"].options["batch_size"]
LR = RECIPES["scratch-lenet-fashion-mnist-2gpu"].options["lr"]
NOTEBOOK = "the notebook's code in float32"

EPSILON = 2.0**-23  # of float32
POSITIONS = 26 * 26  # terms per example in LeNet's longest sums: the gradients of the first convolution
# Rounding may move the input of a ReLU to the other side of 0, which changes the gradient of one example. A step uses
# the mean gradient of n examples. Each example's gradient is about sqrt(n) times as long as the mean, because the
# gradients point in many directions.
RELU_FLIP = BATCH_SIZE**-0.5
FACTOR = 20  # limit for the ratio of two correct implementations' path errors; the ratio was at most 9 for seeds 1 to 6

State = dict[str, np.ndarray]


class Drift(NamedTuple):
    step_errors: dict[str, list[float]]  # {name: for each step, distance from the reference / length of the step}
    step_limit: float  # limit for the median of step_errors; a single error may be up to RELU_FLIP
    path_errors: dict[str, list[float]]  # {name: for each step, distance from the reference / length of the reference}
    path_limit: float  # limit for each path error
    moved: float  # distance from the reference's first to its last parameters / length of the first


class Notebook:
    """The notebook's step, with the methods of `Model` that `measure` calls."""

    def __init__(self, ctx: list[Context], dtype: str = "float32") -> None:
        self.ctx, self.dtype = ctx, dtype

    def load(self, state: State) -> None:
        params = [nd.array(_transposed(state[name]), dtype=self.dtype) for name in LENET_NAMES]
        self.gpu_params = [notebook.get_params(params, c) for c in self.ctx]

    def step(self, X: NDArray, y: NDArray, lr: float) -> None:
        notebook.train_batch(X.astype(self.dtype), y.astype(self.dtype), self.gpu_params, self.ctx, lr)

    def arrays(self, device: int = 0) -> dict[str, NDArray]:
        return {name: _transposed(p) for name, p in zip(LENET_NAMES, self.gpu_params[device])}


def reference(ctx: list[Context], data: Dataset, steps: int) -> list[State]:
    """Train the reference and return its path."""
    mx.random.seed(SEED)
    path = [{name: _transposed(p.asnumpy()) for name, p in zip(LENET_NAMES, notebook.init_params())}]
    exact = Notebook(ctx, "float64")
    for X, y in _batches(data, steps, "in float64"):
        exact.load(path[-1])
        exact.step(X, y, LR)
        path.append({name: array.astype(np.float32) for name, array in read_arrays(exact).items()})
    return path


def measure(ctx: list[Context], data: Dataset, path: list[State]) -> Drift:
    """Train all implementations and compare them with the reference. ctx: two contexts. path: the reference's."""
    subjects: dict[str, Notebook | Model] = {
        NOTEBOOK: Notebook(ctx),
        "scratch": create_model("scratch", ctx),
        "highlevel": create_model("highlevel", ctx),
        "highlevel --tune": create_model("highlevel", ctx, Config(tune=True)),
    }
    step_errors: dict[str, list[float]] = {}
    path_errors: dict[str, list[float]] = {}
    for name, model in subjects.items():
        step_errors[name], path_errors[name] = [], []
        for before, after, (X, y) in zip(path, path[1:], _batches(data, len(path) - 1, f"{name}, steps")):
            model.load(before)
            model.step(X, y, LR)
            step_errors[name].append(distance(read_arrays(model, 1), after) / distance(before, after))
        model.load(path[0])
        for after, (X, y) in zip(path[1:], _batches(data, len(path) - 1, f"{name}, path")):
            model.step(X, y, LR)
            path_errors[name].append(distance(read_arrays(model, 1), after) / length(after))
    step_limit, path_limit = limits(path, step_errors[NOTEBOOK], path_errors[NOTEBOOK])
    return Drift(step_errors, step_limit, path_errors, path_limit, distance(path[0], path[-1]) / length(path[0]))


def limits(path: list[State], notebook_steps: list[float], notebook_path: list[float]) -> tuple[float, float]:
    """Compute (step_limit, path_limit) from the reference's path and the errors of the notebook's float32 code.

    step_limit: `rounding`, or twice the notebook's error if that is larger, as on GPUs that round to TF32. path_limit:
    FACTOR times the notebook's error, plus one ReLU flip in the longest step. The notebook's error is measured, because
    how fast errors grow from step to step depends on the data and the processor.
    """
    expected = [rounding(before, after, BATCH_SIZE * POSITIONS) for before, after in zip(path, path[1:])]
    longest = max(distance(before, after) for before, after in zip(path, path[1:]))
    step_limit = max(np.median(expected), 2 * np.median(notebook_steps))
    return float(step_limit), FACTOR * max(notebook_path) + RELU_FLIP * longest / length(path[0])


def rounding(before: State, after: State, additions: int) -> float:
    """The largest distance between two correct float32 steps, relative to the step's length.

    Sums of n terms differ by about EPSILON * sqrt(n). Rounding the parameters moves them by at most EPSILON times their
    Euclidean norm.
    """
    return EPSILON * (math.sqrt(additions) + length(before) / distance(before, after))


def check(drift: Drift) -> Iterator[Finding]:
    """Yields two findings for each implementation: one for single steps, one for all steps."""
    for name in drift.step_errors:
        if name == NOTEBOOK:
            continue
        median, largest = float(np.median(drift.step_errors[name])), max(drift.step_errors[name])
        holds = median <= drift.step_limit and largest <= RELU_FLIP
        figures = f"median error {median:.1e}, limit {drift.step_limit:.1e}; "
        figures += f"largest {largest:.1e}, limit {RELU_FLIP:.1e}"
        yield Finding(CHECK, f"{name}: each step matches the notebook's step", holds, figures)
        steps, apart = len(drift.path_errors[name]), max(drift.path_errors[name])
        figures = f"distance {apart:.1e}, limit {drift.path_limit:.1e}; the parameters moved {drift.moved:.1e}"
        yield Finding(CHECK, f"{name}: {steps} steps end near the reference", apart <= drift.path_limit, figures)


def length(state: State) -> float:
    """The Euclidean norm over all parameters."""
    return float(np.linalg.norm(np.concatenate([array.ravel() for array in state.values()]).astype(np.float64)))


def distance(a: State, b: State) -> float:
    """The Euclidean distance over all parameters."""
    return length({name: a[name].astype(np.float64) - b[name] for name in a})


def _batches(data: Dataset, steps: int, title: str) -> Iterator[tuple[NDArray, NDArray]]:
    """Yields the same batches for each implementation."""
    order = np.random.default_rng(SEED).permutation(len(data.train_labels))[: steps * BATCH_SIZE]
    made = batches(data.train_images, data.train_labels, BATCH_SIZE, order)
    yield from log.progress(iterable=made, total=steps, desc=f"drift: {title}", unit="step")


def _transposed(array: Any) -> Any:
    """Transpose dense weights: (inputs, outputs) in the notebook, (outputs, inputs) in this project."""
    return array.T if array.ndim == 2 else array
