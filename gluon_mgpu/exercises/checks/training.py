"""Hidden cases of the exercises on the learning rate."""

from __future__ import annotations

import math

import numpy as np
from mxnet import nd
from mxnet.ndarray import NDArray

from gluon_mgpu import scratch
from gluon_mgpu.exercises.cases import Answer, contexts
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
        known = {1: "unscaled", math.sqrt(k): "square-root", k * k: "too-large"}
        names = [name for ratio, name in known.items() if math.isclose(lr, LR * ratio, rel_tol=0.01)]
        case = (
            f"loss before training: {untrained:.3f}\n"
            f"batch size {BATCH}, lr {LR}: {alone:.3f} after an epoch of {N // BATCH} steps\n"
            f"batch size {BATCH * k}, lr {lr:g}: {loss:.3f} after an epoch of {N // BATCH // k} steps"
        )
        raise Mistake(names[0] if names else "wrong-result", case)
