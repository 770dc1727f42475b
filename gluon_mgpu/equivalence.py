"""Compares a lesson's step on several devices with the same step on one: the same batch, from the same parameters.

That both give the same update is the claim of data parallelism. `compare` checks it claim by claim, and `verdict` names
the likeliest reason if it does not hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from types import ModuleType
from typing import NamedTuple

import numpy as np
from mxnet import Context, autograd, nd

from gluon_mgpu import lessons, models
from gluon_mgpu.data.datasets import IMAGE_SHAPE
from gluon_mgpu.data.splitting import shard_sizes
from gluon_mgpu.lessons import LessonConfig
from gluon_mgpu.runtime.errors import UsageError
from gluon_mgpu.training.model import Model, state_dict

EXAMPLES = (4, 3, 5)  # per device, in each of the three batches; the second one has one more example, so it is uneven
ROUNDING = 2.0**-24  # largest relative error of one float32 operation
Arrays = dict[str, np.ndarray]


class Claim(NamedTuple):
    """reason: what is wrong; empty if the claim holds."""

    name: str
    reason: str


def compare(
    lesson: ModuleType,
    ctx: list[Context],
    config: LessonConfig | None = None,
    image_shape: Sequence[int] = IMAGE_SHAPE,
    classes: int = 10,
) -> list[Claim]:
    """Take steps with a lesson's `train_batch` on ctx and on ctx[0]. Returns one `Claim` for each property of a step.

    ctx: at least two devices. config: only its network, and how the network is computed, are used. image_shape,
    classes: see `models.build`.
    """
    if len(ctx) < 2:
        raise UsageError("gpus", len(ctx), "the comparison with one device needs at least 2 devices")
    config = config or LessonConfig()
    plain = LessonConfig(impl=lessons.name_of(lesson), model=config.model)
    same = replace(plain, zero=config.zero, tune=config.tune, hybridize=config.hybridize)
    one = models.build(lesson, ctx[:1], plain, image_shape, classes)
    several = models.build(lesson, ctx, same, image_shape, classes)
    rng, k = np.random.default_rng(0), len(ctx)
    start = _spread(state_dict(one), rng)
    reasons: dict[str, str] = {}
    for i, per_device in enumerate(EXAMPLES):
        n = k * per_device + (i == 1)
        X, y = nd.array(rng.random((n, *image_shape))), nd.array(rng.integers(0, classes, n))
        if i == 0 and (_step(one, start, X, y)[0] != _step(one, start, X, y)[0]).any():
            return [Claim("repeatable", "a step uses random numbers, such as dropout, so two steps cannot be compared")]
        for name, reason in _compare_step(one, several, start, X, y).items():
            reasons.setdefault(name, reason)
            reasons[name] = reasons[name] or reason
    return [Claim(name, reason) for name, reason in reasons.items()]


def verdict(claims: list[Claim]) -> str:
    """What to tell the user: empty if the step on several devices is the step on one, else the likeliest reason."""
    reasons = {claim.name: claim.reason for claim in claims if claim.reason}
    if "repeatable" in reasons:
        return f"cannot be compared with one device: {reasons['repeatable']}"
    if not reasons.keys() & {"losses", "replicas", "update"}:
        return ""
    return f"does not take the same step as on one device: {next(iter(reasons.values()))}"


def _spread(arrays: Arrays, rng: np.random.Generator) -> Arrays:
    """Larger parameters than a lesson starts with, so that each example has its own loss and gradient."""
    start = {}
    for name, array in arrays.items():
        if array.ndim > 1:
            scale = (2 / np.prod(array.shape[1:])) ** 0.5
            array = rng.normal(0, scale, array.shape).astype(np.float32)
        start[name] = array
    return start


def _step(model: Model, start: Arrays, X: nd.NDArray, y: nd.NDArray) -> tuple[np.ndarray, list[Arrays]]:
    """Take one step from `start`. Returns all losses, and the changes of the arrays on each device."""
    model.load(start)
    losses = model.step(X, y, 1.0)
    after = [state_dict(model, device) for device in range(len(model.ctx))]
    changes = [
        {name: array.astype(np.float64) - start[name] for name, array in of_device.items()} for of_device in after
    ]
    return np.concatenate([shard.asnumpy().reshape(-1) for shard in losses]), changes


def _compare_step(one: Model, several: Model, start: Arrays, X: nd.NDArray, y: nd.NDArray) -> dict[str, str]:
    """{claim: reason} for one batch."""
    n, k = X.shape[0], len(several.ctx)
    expected_losses, [expected] = _step(one, start, X, y)
    terms = n * int(np.prod(X.shape[2:]))  # of the longest sum in a gradient
    mislabeled = _losses(expected_losses, _losses_of(one, start, X, y), terms)
    sizes = shard_sizes(n, k)
    shards = [
        _step(one, start, X[end - size : end], y[end - size : end]) for size, end in zip(sizes, accumulate(sizes))
    ]
    if one.running_stats:  # batch normalization sees only a shard, so a whole batch gives another result
        expected_losses = np.concatenate([losses for losses, _ in shards])
        expected = {name: sum(c[name] * s / n for s, (_, [c]) in zip(sizes, shards)) for name in expected}
    losses, changes = _step(several, start, X, y)
    tolerance = {}
    for name in expected:
        size = sum(np.linalg.norm(c[name]) * s / n for s, (_, [c]) in zip(sizes, shards))
        tolerance[name] = ROUNDING * (terms * size + 4 * np.linalg.norm(start[name]))
    reasons = {"split": _split(several, n), "sum": _sum(several)}
    reasons["losses"] = mislabeled or _losses(losses, expected_losses, terms)
    reasons["replicas"] = _replicas(changes)
    reasons["update"] = ""
    differ = [name for name in expected if np.linalg.norm(changes[0][name] - expected[name]) > tolerance[name]]
    if differ:
        first = {name: change * sizes[0] / n for name, change in shards[0][1][0].items()}
        reasons["update"] = _update(changes[0], expected, first, tolerance, differ, k)
    return reasons


def _losses_of(model: Model, start: Arrays, X: nd.NDArray, y: nd.NDArray) -> np.ndarray:
    """The losses of the batch, computed with the lesson's network and loss instead of its step."""
    model.load(start)
    with autograd.train_mode():
        return models.loss_of(model.lesson)(model.predict(X), y).asnumpy().reshape(-1)


def _split(model: Model, n: int) -> str:
    """Whether `split_and_load` puts each example on exactly one device."""
    if not hasattr(model.lesson, "split_and_load"):
        return ""
    shards = model.lesson.split_and_load(nd.arange(n), model.ctx)
    indices = [shard.asnumpy().astype(int).tolist() for shard in shards]
    examples = sorted(example for shard in indices for example in shard)
    if examples == list(range(n)):
        return ""
    k = len(model.ctx)
    if all(sorted(shard) == list(range(n)) for shard in indices):
        return f"split_and_load gives the whole batch to each of {k} devices; give each a different part"
    if len(indices) > 1 and all(shard == indices[0] for shard in indices):
        return f"split_and_load gives the same shard to each of {k} devices; give each a different part"
    missing = sorted(set(range(n)) - set(examples))
    if missing:
        lost = f"{len(missing)} of {n} examples"
        return f"split_and_load drops {lost}; with a remainder, some shards need one more example"
    return f"split_and_load gives some of {n} examples to several devices"


def _losses(losses: np.ndarray, expected: np.ndarray, terms: int) -> str:
    """Whether the losses are those of the batch's examples, in any order."""
    n = len(expected)
    if len(losses) != n:
        return f"a step on {n} examples returns {len(losses)} losses; return one loss for each example"
    close = np.allclose(np.sort(losses), np.sort(expected), rtol=ROUNDING * terms, atol=ROUNDING * terms)
    return "" if close else "the losses are not those of the batch; each image must stay with its own label"


def _sum(model: Model) -> str:
    """Whether `allreduce` leaves the sum on each device."""
    if not hasattr(model.lesson, "allreduce"):
        return ""
    k = len(model.ctx)
    values = np.random.default_rng(1).normal(size=(k, 7, 3)).astype(np.float32)
    data = [nd.array(value, ctx=c) for value, c in zip(values, model.ctx)]
    model.lesson.allreduce(data)
    results, total = [array.asnumpy() for array in data], values.sum(0)

    def all_are(value: np.ndarray) -> bool:
        return all(np.allclose(result, value, rtol=1e-5, atol=1e-5) for result in results)

    if all_are(total):
        return ""
    if all_are(total / k):
        return f"allreduce divides the sum by {k}, the number of devices, and sgd divides by the batch size as well"
    if all_are(values[0]):
        return "allreduce copies the first device's array to the others, without adding theirs"
    right = [np.isclose(result, total, rtol=1e-5, atol=1e-5) for result in results]
    if all(part.any() and not part.all() for part in right):
        return f"allreduce sums only a part of the array: {right[0].sum()} of {right[0].size} elements"
    wrong = [str(c) for c, part in zip(model.ctx, right) if not part.all()]
    return f"after allreduce, the sum is not on {', '.join(wrong)}"


def _replicas(changes: list[Arrays]) -> str:
    differ = [name for name in changes[0] if any((changes[0][name] != other[name]).any() for other in changes[1:])]
    return f"after a step, the devices have different parameters ({', '.join(differ[:4])})" if differ else ""


def _update(
    change: Arrays, expected: Arrays, first: Arrays, tolerance: dict[str, float], differ: list[str], k: int
) -> str:
    """What an update that differs from one device's update looks like."""

    def is_like(guess: Arrays, factor: float = 1) -> bool:
        return all(np.linalg.norm(change[n] - factor * guess[n]) <= k * tolerance[n] for n in differ)

    if is_like(expected, k):
        return f"the update is {k} times that of one device; divide by the size of the batch, not of a shard"
    if is_like(expected, 1 / k):
        return f"the update is 1/{k} of that of one device; add the gradients, and divide only by the batch size"
    if is_like(first):
        return "the update uses only the first device's gradients; add those of the others"
    name = max(differ, key=lambda n: np.linalg.norm(change[n] - expected[n]) / (np.linalg.norm(expected[n]) + 1e-30))
    off = np.linalg.norm(change[name] - expected[name]) / (np.linalg.norm(expected[name]) + 1e-30)
    return f"the update of {', '.join(differ[:4])} differs from that of one device, by {off:.0%} for {name}"
