"""The hidden cases of the exercises that return a number which needs no devices; see `grading`."""

from __future__ import annotations

import math

import numpy as np

from gluon_mgpu.exercises import cases
from gluon_mgpu.exercises.cases import Function, compare

N, FEATURES, CLASSES, BATCH, LR = 288, 8, 3, 16, 0.01  # for rate


def _loss_after_an_epoch(batch_size: int, lr: float) -> float:
    """Train a linear classifier for an epoch, and return its loss."""
    random = np.random.RandomState(0)
    centers, labels = random.normal(size=(CLASSES, FEATURES)), np.arange(N) % CLASSES
    X, W = centers[labels] + 2 * random.normal(size=(N, FEATURES)), np.zeros((FEATURES, CLASSES))
    X[:, 0] *= 5  # with 9 times the learning rate, steps in this direction overshoot

    def probabilities(X: np.ndarray) -> np.ndarray:
        powers = np.exp(X @ W - (X @ W).max(axis=1, keepdims=True))
        return powers / powers.sum(axis=1, keepdims=True)

    for start in range(0, N, batch_size):
        batch = slice(start, start + batch_size)
        W -= lr / batch_size * X[batch].T @ (probabilities(X[batch]) - np.eye(CLASSES)[labels[batch]])
    return float(-np.log(probabilities(X)[np.arange(N), labels]).mean())


def rate(answer: Function) -> None:
    others = ((0.2, 256, 512), (0.2, 100, 250), (0.1, 64, 4096), (0.004, 32, 96), (0.1, 48, 64))
    runs = ((LR, BATCH, 3 * BATCH), (LR, BATCH, 2 * BATCH), *others)
    answers = [cases.number(answer(*run)) for run in runs]
    ratios = [new / old for _, old, new in runs]
    rules: dict[str, list[float]] = {
        "constant": [answers[0] / lr for lr, *_ in runs],
        "unscaled": [1] * len(runs),
        "inverse": [1 / ratio for ratio in ratios],
        "square-root": [math.sqrt(ratio) for ratio in ratios],
        "too-large": [ratio**2 for ratio in ratios],
        "whole-number": [ratio // 1 for ratio in ratios],
        "logarithm": [1 + math.log2(ratio) for ratio in ratios],
    }
    factors = [found / lr for found, (lr, *_) in zip(answers, runs)]
    names = [name for name, rule in rules.items() if np.allclose(factors, rule, rtol=0.01)]
    for (lr, old, new), found in zip(runs, answers):
        right = lr * new / old
        case = f"lr {lr} for batch size {old}\nbatch size {new}: expected lr {right:g}, found {found:g}"
        if old == BATCH:
            losses = [_loss_after_an_epoch(*run) for run in ((old, lr), (new, found))]
            case += (
                f"\nloss: {math.log(CLASSES):.3f} before training; after an epoch {losses[0]:.3f}, now {losses[1]:.3f}"
            )
        name = names[0] if names else "too-small" if found < right else "other-rule"
        cases.first(case, {name: not math.isclose(found, right, rel_tol=0.001)})


def speedup(answer: Function) -> None:
    example, fixed, (few, many) = 0.001, 0.0037, (16, 64)
    measured = ((few, fixed + few * example), (many, fixed + many * example))
    for k, n, size, latency, bandwidth in (
        (5, 252, 5e6, 0.0006, 2e9),
        (2, 100, 5e6, 0.0006, 2e9),
        (3, 8, 6e6, 0.002, 5e8),  # slower than one device
        (8, 1000, 4e8, 0.00001, 1e10),
        (1, 64, 5e6, 0.0006, 2e9),
    ):
        found = cases.number(answer(k, n, measured, size, latency, bandwidth))
        shard, rounds, send = math.ceil(n / k), 2 * (k - 1), size / k / bandwidth
        one, here, ring = fixed + n * example, fixed + shard * example, rounds * (latency + send)
        per_example = [seconds / examples for examples, seconds in measured]  # with the fixed time in it
        hidden = [(start, e) for e in per_example for start in (fixed, *(s - m * e for m, s in measured))]
        seconds = {  # {mistake: (seconds on one device, seconds on k devices)}
            "inverse": [(here + ring, one)],
            "no-allreduce": [(one, here)],
            "divides-all": [(one, one / k + ring), (one, fixed / k + shard * example + ring)],
            "no-fixed-time": [
                *((n * e, shard * e + ring) for e in (example, *per_example)),
                *((f + n * e, f + shard * e + ring) for f, e in hidden),
                (one, shard * example + ring),
            ],
            "smaller-shards": [(one, fixed + m * example + ring) for m in (n / k, n // k)],
            "whole-vectors": [(one, here + rounds * (latency + size / bandwidth))],
            "one-round": [(one, here + latency + extra) for extra in (send, size / bandwidth, rounds * send)],
            "no-latency": [(one, here + rounds * (part + send)) for part in (0, latency / k)],
            "other-batch": [(measurement, here + ring) for _, measurement in measured],
            "half-a-ring": [(one, here + ring / 2)],
            "extra-round": [(one, here + ring / rounds * 2 * k)] if rounds else [],
            "bytes": [(one, here + rounds * (latency + factor * send)) for factor in (4, 1 / 4, 8, 1 / 8)],
            "fixed-per-device": [(one, k * fixed + shard * example + ring)],
        }
        right = one / (here + ring)
        mistakes = {name: [np.array([a / b]) for a, b in pairs] for name, pairs in seconds.items()}
        mistakes |= {
            "at-least-1": [np.array([max(1, right)])],
            "seconds": [np.array([x]) for x in (here + ring, one - here - ring)],
            "per-device": [np.array([right / k])],
            "ideal": [np.array([k])],
        }
        measurements = " and ".join(f"{seconds:g} s for {examples} examples" for examples, seconds in measured)
        case = (
            f"one device: {measurements}, so {example:g} s per example and {fixed:g} s of fixed time\n"
            f"{n} examples on {k} device{'s'[: k > 1]}: {shard} in the largest shard\n{size:g} bytes, {latency:g} s "
            f"per round, {bandwidth:g} bytes/s: {rounds} rounds of {latency + send:g} s\ntimes as fast:"
        )
        compare(case, [np.array([found])], np.array([right]), mistakes)
