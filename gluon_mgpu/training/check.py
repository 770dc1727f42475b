"""Takes a lesson's step on several devices and on one, and compares them: the same batch, from the same parameters.

That both give the same update is the claim of data parallelism. `compare` checks it claim by claim; what holds and what
the likeliest mistake is follows from arrays alone, in `gluon_mgpu.check.comparison`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from types import ModuleType

import numpy as np
from mxnet import Context, nd

from gluon_mgpu.check import comparison
from gluon_mgpu.check.comparison import Arrays, Claims, Step
from gluon_mgpu.data.datasets import IMAGE_SHAPE
from gluon_mgpu.data.splitting import shard_sizes
from gluon_mgpu.runtime.errors import UsageError
from gluon_mgpu.training import lessons, models
from gluon_mgpu.training.config import Config
from gluon_mgpu.training.model import Model, state_dict


def compare(
    lesson: ModuleType,
    ctx: list[Context],
    config: Config | None = None,
    image_shape: Sequence[int] = IMAGE_SHAPE,
    classes: int = 10,
) -> Claims:
    """Take steps with a lesson's `train_batch` on ctx and on ctx[0], and check what a step must do.

    ctx: at least two devices. config: only its network, and how the network is computed, are used. image_shape,
    classes: see `models.build`.
    """
    if len(ctx) < 2:
        raise UsageError("gpus", len(ctx), "the comparison with one device needs at least 2 devices")
    config = config or Config()
    plain = Config(impl=lessons.name_of(lesson), model=config.model)
    same = replace(plain, zero=config.zero, tune=config.tune, hybridize=config.hybridize)
    # Each model has its own copy of the lesson, because a lesson may keep values between steps, such as velocities.
    several, one, aside = (
        models.build(lessons.fresh(lesson), c, settings, image_shape, classes)
        for c, settings in ((ctx, same), (ctx[:1], plain), (ctx[:1], plain))
    )
    rng, k = np.random.default_rng(0), len(ctx)
    start = {  # larger than a lesson's parameters, so that each example has its own loss and gradient
        name: rng.normal(0, (2 / np.prod(a.shape[1:])) ** 0.5, a.shape).astype(np.float32) if a.ndim > 1 else a
        for name, a in state_dict(one).items()
    }
    claims = {"start": comparison.start(_replicas(several)), "split": "", "sum": _sum(aside.lesson, ctx)}
    batches, moves = [], False
    for i, per_device in enumerate(comparison.EXAMPLES):
        n = k * per_device + (i == 1)
        X, y = rng.random((n, *image_shape)), rng.integers(0, classes, n)
        taken, whole, again = (_step(model, start, X, y) for model in (several, one, aside))
        if i == 0 and (whole.losses != again.losses).any():
            return {"repeatable": "a step uses random numbers, such as dropout; check it without them"}
        batches.append(
            {"split": _split(aside.lesson, ctx, n), **_compare_step(several, one, aside, start, X, y, taken, whole)}
        )
        moves |= any(change.any() for change in whole.changes[0].values())
    claims |= comparison.combine(batches)
    if not (moves or any(batch["update"] for batch in batches)):
        claims["update"] = "the steps do not change the parameters; assign in place, as in p[:] = p - lr * p.grad"
    if any(claims[name] for name in ("start", "losses", "replicas", "update")):
        return claims
    return {name: reason for name, reason in claims.items() if not reason}  # an unusual split or sum may be right


def _step(model: Model, start: Arrays, X: np.ndarray, y: np.ndarray, lr: float = 1.0) -> Step:
    """Take one step from the parameters `start`."""
    model.load(start)
    losses = model.step(nd.array(X), nd.array(y), lr)
    changes = [{name: a.astype(np.float64) - start[name] for name, a in arrays.items()} for arrays in _replicas(model)]
    grads = [{name: g.asnumpy() for name, g in model.grads(device).items()} for device in range(len(model.ctx))]
    return Step(np.concatenate([shard.asnumpy().reshape(-1) for shard in losses]), changes, grads)


def _replicas(model: Model) -> list[Arrays]:
    return [state_dict(model, device) for device in range(len(model.ctx))]


def _compare_step(
    several: Model, one: Model, aside: Model, start: Arrays, X: np.ndarray, y: np.ndarray, taken: Step, whole: Step
) -> Claims:
    """The claims for one batch. taken, whole: the step on several devices and on one. aside: for further steps."""
    n, sizes = len(X), shard_sizes(len(X), len(several.ctx))
    terms = n * int(np.prod(X.shape[2:]))
    shards = [
        _step(aside, start, X[end - size : end], y[end - size : end]) for size, end in zip(sizes, accumulate(sizes))
    ]
    parts = comparison.weighted(shards, sizes)
    losses, [expected] = whole.losses, whole.changes
    if one.running_stats:  # batch normalization sees only a shard, so a whole batch gives another result
        losses = np.concatenate([shard.losses for shard in shards])
        expected = {name: np.sum([part[name] for part in parts], axis=0) for name in expected}
    order = np.random.default_rng(1).permutation(n)
    moved = _step(aside, start, X[order], y[order])
    reason = comparison.losses(taken, losses, terms) or comparison.losses(moved, whole.losses, terms)
    if reason and len(taken.losses) == n:
        still = [_step(m, start, X[o], y[o], 0.0).losses for m in (one, several) for o in (np.arange(n), order)]
        if all(comparison.alike(other, still[0], terms) for other in still):
            reason = "a loss is computed with parameters that this step has changed; update after all backward passes"
    bound = comparison.rounding_bound(parts, start, terms)
    names = [str(c) for c in several.ctx]
    update = comparison.update(names, taken.changes[0], expected, parts, bound)
    return {"losses": reason, "replicas": comparison.replicas(taken), "update": update}


def _split(lesson: ModuleType, ctx: list[Context], n: int) -> str:
    """Whether `split_and_load` puts each example on exactly one device."""
    if not hasattr(lesson, "split_and_load"):
        return ""
    for first in (10**7, 10**6):  # of the first batch, nothing may come back in the second
        shards = lesson.split_and_load(nd.arange(first, first + n), ctx)
    return comparison.split([(shard.asnumpy() - first).astype(int).tolist() for shard in shards], n)


def _sum(lesson: ModuleType, ctx: list[Context]) -> str:
    """Whether `allreduce` leaves the sum on each device."""
    if not hasattr(lesson, "allreduce"):
        return ""
    values = np.random.default_rng(1).normal(size=(len(ctx), 7, 3)).astype(np.float32)
    data = [nd.array(value, ctx=c) for value, c in zip(values, ctx)]
    lesson.allreduce(data)
    return comparison.reduced(values, np.stack([array.asnumpy() for array in data]), [str(c) for c in ctx])
