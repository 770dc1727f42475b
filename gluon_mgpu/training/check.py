"""Compares a lesson's step on several devices with the same step on one: the same batch, from the same parameters.

That both give the same update is the claim of data parallelism. `compare` checks it claim by claim, and `verdict` names
the likeliest reason if it does not hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from types import ModuleType

import numpy as np
from mxnet import Context, nd

from gluon_mgpu.data.datasets import IMAGE_SHAPE
from gluon_mgpu.data.splitting import shard_sizes
from gluon_mgpu.runtime.errors import UsageError
from gluon_mgpu.training import lessons
from gluon_mgpu.training.build import build
from gluon_mgpu.training.config import Config
from gluon_mgpu.training.model import Model, read_arrays

EXAMPLES = (4, 3, 5)  # per device, in each of the three batches; the second one has one more example, so it is uneven
ROUNDING = 2.0**-24  # largest relative error of one float32 operation
LEFT = "look for what a step leaves behind, such as gradients, a buffer or a counter"
EQUALLY = "add the gradients of all examples, and divide by the size of the batch"
Arrays = dict[str, np.ndarray]
Taken = tuple[np.ndarray, list[Arrays]]  # all losses, and the changes of the arrays on each device
Claims = dict[str, str]  # {claim: what is wrong; empty if the claim holds}


def compare(
    lesson: ModuleType,
    ctx: list[Context],
    config: Config | None = None,
    image_shape: Sequence[int] = IMAGE_SHAPE,
    classes: int = 10,
) -> Claims:
    """Take steps with a lesson's `train_batch` on ctx and on ctx[0], and check what a step must do.

    ctx: at least two devices. config: only its network, and how the network is computed, are used. image_shape,
    classes: see `build`.
    """
    if len(ctx) < 2:
        raise UsageError("gpus", len(ctx), "the comparison with one device needs at least 2 devices")
    config = config or Config()
    plain = Config(impl=lessons.name_of(lesson), model=config.model)
    same = replace(plain, zero=config.zero, tune=config.tune, hybridize=config.hybridize)
    # Each model has its own copy of the lesson, because a lesson may keep values between steps, such as velocities.
    several, one, aside = (
        build(lessons.fresh(lesson), c, settings, image_shape, classes)
        for c, settings in ((ctx, same), (ctx[:1], plain), (ctx[:1], plain))
    )
    rng, k = np.random.default_rng(0), len(ctx)
    start = {  # larger than a lesson's parameters, so that each example has its own loss and gradient
        name: rng.normal(0, (2 / np.prod(a.shape[1:])) ** 0.5, a.shape).astype(np.float32) if a.ndim > 1 else a
        for name, a in read_arrays(one).items()
    }
    differ = _differ(_replicas(several))
    first = f"the devices start with different parameters ({differ}); give each a copy of the same" if differ else ""
    claims = {"start": first, "split": "", "sum": _sum(aside.lesson, ctx)}
    updates, moves = [], False
    for i, per_device in enumerate(EXAMPLES):
        n = k * per_device + (i == 1)
        X, y = rng.random((n, *image_shape)), rng.integers(0, classes, n)
        taken, whole, again = (_step(model, start, X, y) for model in (several, one, aside))
        if i == 0 and (whole[0] != again[0]).any():
            return {"repeatable": "a step uses random numbers, such as dropout; check it without them"}
        found = _compare_step(several, one, aside, start, X, y, taken, whole)
        found["split"] = _split(aside.lesson, ctx, n)
        claims |= {name: claims.get(name) or reason for name, reason in found.items()}
        updates.append(found["update"])
        moves |= any(change.any() for change in whole[1][0].values())
    if not (moves or any(updates)):
        claims["update"] = "the steps do not change the parameters; assign in place, as in p[:] = p - lr * p.grad"
    elif updates[2] and not updates[0]:
        claims["update"] = f"only the first update is that of one device; {LEFT}"
    elif updates[1] and not updates[0]:
        claims["update"] = f"the update is wrong where shards have different sizes; {EQUALLY}"
    if any(claims[name] for name in ("start", "losses", "replicas", "update")):
        return claims
    return {name: reason for name, reason in claims.items() if not reason}  # an unusual split or sum may be right


def verdict(claims: Claims) -> str:
    """What to tell the user: empty if the step on several devices is the step on one, else the likeliest reason."""
    for claim, reason in claims.items():
        if reason:
            differs = "cannot be compared with" if claim == "repeatable" else "does not take the same step as on"
            return f"{differs} one device: {reason}"
    return ""


def _step(model: Model, start: Arrays, X: np.ndarray, y: np.ndarray, lr: float = 1.0) -> Taken:
    """Take one step from the parameters `start`."""
    model.load(start)
    losses = model.step(nd.array(X), nd.array(y), lr)
    changes = [{name: a.astype(np.float64) - start[name] for name, a in arrays.items()} for arrays in _replicas(model)]
    return np.concatenate([shard.asnumpy().reshape(-1) for shard in losses]), changes


def _replicas(model: Model) -> list[Arrays]:
    return [read_arrays(model, device) for device in range(len(model.ctx))]


def _compare_step(
    several: Model, one: Model, aside: Model, start: Arrays, X: np.ndarray, y: np.ndarray, taken: Taken, whole: Taken
) -> Claims:
    """The claims for one batch. taken, whole: the step on several devices and on one. aside: for further steps."""
    n, sizes = len(X), shard_sizes(len(X), len(several.ctx))
    terms = n * int(np.prod(X.shape[2:]))  # of the longest sum in a gradient
    shards = [
        _step(aside, start, X[end - size : end], y[end - size : end]) for size, end in zip(sizes, accumulate(sizes))
    ]
    parts = [{name: c * size / n for name, c in changes.items()} for size, (_, [changes]) in zip(sizes, shards)]
    losses, [expected] = whole
    if one.running_stats:  # batch normalization sees only a shard, so a whole batch gives another result
        losses = np.concatenate([losses for losses, _ in shards])
        expected = {name: np.sum([part[name] for part in parts], axis=0) for name in expected}
    tolerance = {}
    for name in expected:
        size = sum(np.linalg.norm(part[name]) for part in parts)
        tolerance[name] = float(ROUNDING * (terms * size + 4 * np.linalg.norm(start[name])))
    order = np.random.default_rng(1).permutation(n)
    moved, _ = _step(aside, start, X[order], y[order])
    reason = ""
    if len(taken[0]) != n:
        reason = f"the losses of a step on {n} examples are {len(taken[0])}; return one for each example"
    elif not (_alike(taken[0], losses, terms) and _alike(moved, whole[0], terms)):
        reason = "the losses are not those of the batch; leave each image as it is, with its own label"
        still = [_step(m, start, X[o], y[o], 0.0)[0] for m in (one, several) for o in (np.arange(n), order)]
        if all(_alike(other, still[0], terms) for other in still):
            reason = "a loss is computed with parameters that this step has changed; update after all backward passes"
    update = _update(several.ctx, taken[1][0], expected, parts, tolerance)
    return {"losses": reason, "replicas": _equal(several, taken[1]), "update": update}


def _equal(model: Model, changes: list[Arrays]) -> str:
    """Whether the replicas are equal after a step."""
    differ = _differ(changes)
    if not differ:
        return ""
    grads = [{name: g.asnumpy() for name, g in model.grads(device).items()} for device in range(len(model.ctx))]
    of_grads = "and different" if _differ(grads) else "but equal"
    advice = "leave the sum on each device" if _differ(grads) else "update each replica in the same way"
    return f"after a step, the devices have different parameters ({differ}), {of_grads} gradients; {advice}"


def _differ(devices: list[Arrays]) -> str:
    """The first names of arrays that are not the same on all devices."""
    first, *others = devices
    return ", ".join([name for name in first if any((first[name] != other[name]).any() for other in others)][:4])


def _split(lesson: ModuleType, ctx: list[Context], n: int) -> str:
    """Whether `split_and_load` puts each example on exactly one device."""
    if not hasattr(lesson, "split_and_load"):
        return ""
    for first in (10**7, 10**6):  # of the first batch, nothing may come back in the second
        shards = lesson.split_and_load(nd.arange(first, first + n), ctx)
    indices = [(shard.asnumpy() - first).astype(int).tolist() for shard in shards]
    found, batch = sorted(sum(indices, [])), list(range(n))
    if found == batch:
        return ""
    if not {*found} <= {*batch}:
        return "split_and_load returns examples of an earlier batch; make a new copy of each batch"
    if len(indices) > 1 and all(shard == indices[0] for shard in indices):
        part = "whole batch" if len(indices[0]) == n else "same shard"
        return f"split_and_load gives the {part} to each of {len(ctx)} devices; give each a different part"
    if missing := n - len({*found}):
        return f"split_and_load drops {missing} of {n} examples; with a remainder, some shards need one more example"
    return f"split_and_load gives some of {n} examples to several devices"


def _alike(losses: np.ndarray, expected: np.ndarray, terms: int) -> bool:
    """Whether the losses are the same, in any order."""
    if losses.shape != expected.shape:
        return False
    return np.allclose(np.sort(losses), np.sort(expected), rtol=ROUNDING * terms, atol=ROUNDING * terms)


def _sum(lesson: ModuleType, ctx: list[Context]) -> str:
    """Whether `allreduce` leaves the sum on each device."""
    if not hasattr(lesson, "allreduce"):
        return ""
    k = len(ctx)
    values = np.random.default_rng(1).normal(size=(k, 7, 3)).astype(np.float32)
    data = [nd.array(value, ctx=c) for value, c in zip(values, ctx)]
    lesson.allreduce(data)
    results = np.stack([array.asnumpy() for array in data])
    right, mean, first = (
        np.isclose(results, value, rtol=1e-5, atol=1e-5) for value in (values.sum(0), values.mean(0), values[0])
    )
    if right.all():
        return ""
    if mean.all():
        return f"allreduce divides the sum by {k}, the number of devices; divide once, by the size of the batch"
    if first.all():
        return "allreduce copies the first device's array to the others, without adding theirs"
    if all(part.any() and not part.all() for part in right):
        return f"allreduce sums only a part of the array: {right[0].sum()} of {right[0].size} elements"
    return f"allreduce leaves no sum on {', '.join(str(c) for c, part in zip(ctx, right) if not part.all())}"


def _update(
    ctx: list[Context], change: Arrays, expected: Arrays, parts: list[Arrays], tolerance: dict[str, float]
) -> str:
    """Whether an update is that of one device, or what it looks like. parts: what each shard adds to the update."""
    error = {name: np.linalg.norm(change[name] - value) for name, value in expected.items()}
    differ = {n: error[n] / (np.linalg.norm(expected[n]) + 1e-30) for n in expected if error[n] > tolerance[n]}
    if not differ:
        return ""
    k, worst = len(ctx), max(differ, key=lambda name: differ[name])
    factor = np.vdot(change[worst], expected[worst]) / (np.vdot(expected[worst], expected[worst]) + 1e-30)

    def is_like(guess: Arrays, factor: float = 1) -> bool:
        return all(np.linalg.norm(change[n] - factor * guess[n]) <= k * tolerance[n] for n in differ)

    if is_like(expected, factor):
        advice = "use the same learning rate and divisor for any number of devices"
        if is_like(expected, k):
            advice = "add the gradients once, and divide by the size of the batch, not of a shard"
        elif is_like(expected, 1 / k):
            advice = "add the gradients, and divide only by the size of the batch"
        return f"the update is {factor:.4g} times that of one device; {advice}"
    for c, part in zip(ctx, parts):
        if is_like(part):
            return f"the update uses only the gradients of {c}; add those of the others"
    advice = "if all else is right, look for clipping or weight decay before the sum"
    return f"the update differs from that of one device, by {differ[worst]:.0%} for {worst}; {advice}"
