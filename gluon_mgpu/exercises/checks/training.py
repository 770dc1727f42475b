"""Hidden cases of the exercises on the learning rate."""

from __future__ import annotations

import math

import numpy as np
from mxnet import nd
from mxnet.ndarray import NDArray

from gluon_mgpu import scratch
from gluon_mgpu.exercises.cases import Answer, compare, contexts
from gluon_mgpu.exercises.report import Mistake

N, FEATURES, CLASSES, BATCH, LR = 256, 8, 3, 16, 0.02


def _net(X: NDArray, params: list[NDArray]) -> NDArray:
    return nd.FullyConnected(X, *params, num_hidden=CLASSES)


def _loss_after_an_epoch(k: int, lr: float) -> float:
    """Train a linear classifier on k devices, with BATCH examples per device."""
    random = np.random.RandomState(0)
    centers, labels = random.normal(size=(CLASSES, FEATURES)), np.arange(N) % CLASSES
    X = centers[labels] + 2 * random.normal(size=(N, FEATURES))
    X[:, 0] *= 4  # with 16 times the rate, steps in this direction overshoot
    X, y = nd.array(X), nd.array(labels)
    params = [nd.zeros((CLASSES, FEATURES)), nd.zeros(CLASSES)]
    replicas = [scratch.get_params(params, c) for c in contexts(k)]
    for start in range(0, N, BATCH * k):
        end = start + BATCH * k
        scratch.train_batch(X[start:end], y[start:end], replicas, contexts(k), lr, net=_net)
    return float(scratch.loss(_net(X, replicas[0]), y).mean().asscalar())


def rate(answer: Answer) -> None:
    untrained, alone = math.log(CLASSES), _loss_after_an_epoch(1, LR)
    for k in (4, 2):
        lr = float(answer(LR, BATCH, BATCH * k))
        loss = _loss_after_an_epoch(k, lr)
        if abs(loss - alone) < 0.05 * (untrained - alone):
            continue
        known = {1: "unscaled", 1 / k: "inverse", math.sqrt(k): "square-root", k * k: "too-large"}
        names = [name for ratio, name in known.items() if math.isclose(lr, LR * ratio, rel_tol=0.01)]
        case = (
            f"batch size {BATCH}, lr {LR}: loss {untrained:.3f} before and {alone:.3f} after an epoch of {N // BATCH} steps\n"
            f"batch size {BATCH * k}, lr {lr:g}, {k} devices: {loss:.3f} after an epoch of {N // BATCH // k} steps"
        )
        raise Mistake(names[0] if names else "wrong-result", case)


def warmup(answer: Answer) -> None:
    for lr, k, steps in ((0.1, 4, 4), (0.5, 2, 5), (0.1, 4, 0)):
        peak, numbers = lr * k, np.arange(steps + 4)
        slope = (peak - lr) / max(steps, 1)
        right = np.minimum(lr + slope * numbers, peak) if steps else np.full(4, peak)
        wrong = {
            "unscaled": np.full(steps + 4, lr),
            "no-warmup": np.full(steps + 4, peak),
            "from-zero": np.minimum(peak * numbers / max(steps, 1), peak),
            "keeps-growing": lr + slope * numbers,
            "falls-back": np.where(numbers < steps, right, lr),
            "one-step-early": np.minimum(lr + (peak - lr) * numbers / max(steps - 1, 1), peak),
        }
        found = np.array([float(answer(number, lr, k, steps)) for number in numbers.tolist()])
        case = f"lr {lr}, {k} devices, warmup_steps {steps}: the rates of steps 0 to {len(numbers) - 1}"
        compare(case, [found], [right], {name: [[rates]] for name, rates in wrong.items()})
