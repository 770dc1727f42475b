"""Measures how far the steps of scratch and highlevel are from the notebook's own code.

The reference is the notebook's code in float64, with parameters rounded to float32 after each step. Each implementation
takes each of its steps, on the same batch and from the same parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import Context, nd
from mxnet.ndarray import NDArray

from gluon_mgpu.data.batches import batches
from gluon_mgpu.data.datasets import Dataset
from gluon_mgpu.support import log
from gluon_mgpu.training.config import Config
from gluon_mgpu.training.models import LENET_NAMES, Model, create_model, read_arrays
from parity import Finding, notebook
from parity.recipes import RECIPES

CHECK = "drift"
STEPS = 100
SEED = 1
BATCH_SIZE = RECIPES["scratch-lenet-fashion-mnist-2gpu"].options["batch_size"]
LR = RECIPES["scratch-lenet-fashion-mnist-2gpu"].options["lr"]

EPSILON = 2.0**-23  # of float32
POSITIONS = 26 * 26  # terms per example in LeNet's longest sums: the gradients of the first convolution
# Rounding may move the input of a ReLU to the other side of 0, which changes the gradient of one example. A step uses
# the mean gradient of n examples. Each example's gradient is about sqrt(n) times as long as the mean, because the
# gradients point in many directions.
RELU_FLIP = BATCH_SIZE**-0.5

Parameters = dict[str, np.ndarray]


class Notebook:
    """The notebook's step, with the methods of `Model` that `check` calls."""

    def __init__(self, ctx: list[Context], dtype: str = "float32") -> None:
        self.ctx, self.dtype = ctx, dtype

    def load(self, parameters: Parameters) -> None:
        params = [nd.array(_transposed(parameters[name]), dtype=self.dtype) for name in LENET_NAMES]
        self.gpu_params = [notebook.get_params(params, c) for c in self.ctx]

    def step(self, X: NDArray, y: NDArray, lr: float) -> None:
        notebook.train_batch(X.astype(self.dtype), y.astype(self.dtype), self.gpu_params, self.ctx, lr)

    def arrays(self, device: int = 0) -> dict[str, NDArray]:
        return {name: _transposed(p) for name, p in zip(LENET_NAMES, self.gpu_params[device])}


def check(ctx: list[Context], data: Dataset, steps: int) -> Iterator[Finding]:
    """Let all implementations take the reference's steps. Yields a finding for each. ctx: two contexts.

    The limit is what rounding explains: sums of n terms differ by about EPSILON * sqrt(n), and rounding the parameters
    moves them by at most EPSILON times their Euclidean norm. It is twice the median error of the notebook's code in
    float32 if that is larger, as on GPUs that round to TF32.
    """
    subjects: dict[str, Notebook | Model] = {
        "notebook": Notebook(ctx),
        "scratch": create_model("scratch", ctx),
        "highlevel": create_model("highlevel", ctx),
        "highlevel --tune": create_model("highlevel", ctx, Config(tune=True)),
    }
    errors: dict[str, list[float]] = {name: [] for name in subjects}  # distance from the reference / length of the step
    explained = []
    mx.random.seed(SEED)
    after = {name: _transposed(p.asnumpy()) for name, p in zip(LENET_NAMES, notebook.init_params())}
    exact = Notebook(ctx, "float64")
    order = np.random.default_rng(SEED).permutation(len(data.train_labels))[: steps * BATCH_SIZE]
    made = batches(data.train_images, data.train_labels, BATCH_SIZE, order)
    for X, y in log.progress(iterable=made, total=steps, desc=CHECK, unit="step"):
        before = after
        exact.load(before)
        exact.step(X, y, LR)
        after = {name: array.astype(np.float32) for name, array in read_arrays(exact).items()}
        moved = distance(before, after)
        explained.append(EPSILON * (math.sqrt(BATCH_SIZE * POSITIONS) + length(before) / moved))
        for name, model in subjects.items():
            model.load(before)
            model.step(X, y, LR)
            errors[name].append(distance(read_arrays(model, 1), after) / moved)
    limit = max(np.median(explained), 2 * np.median(errors.pop("notebook")))
    for name, measured in errors.items():
        median, largest = np.median(measured), max(measured)
        figures = f"median error {median:.1e}, limit {limit:.1e}; largest {largest:.1e}, limit {RELU_FLIP:.1e}"
        claim = f"{name}: each of {len(measured)} steps matches the notebook's step"
        yield Finding(CHECK, claim, bool(median <= limit and largest <= RELU_FLIP), figures)


def length(parameters: Parameters) -> float:
    """The Euclidean norm over all parameters."""
    return float(np.linalg.norm(np.concatenate([array.ravel() for array in parameters.values()]).astype(np.float64)))


def distance(a: Parameters, b: Parameters) -> float:
    """The Euclidean distance over all parameters."""
    return length({name: a[name].astype(np.float64) - b[name] for name in a})


def _transposed(array: Any) -> Any:
    """Transpose dense weights: (inputs, outputs) in the notebook, (outputs, inputs) in this project."""
    return array.T if array.ndim == 2 else array
