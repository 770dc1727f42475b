"""Hidden cases of the exercises on data parallelism with Gluon."""

from __future__ import annotations

import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.gluon import nn

from gluon_mgpu.exercises.cases import Answer, Numbers, compare, contexts, copies, recording, shown, values
from gluon_mgpu.exercises.report import Mistake

K = 3


def _numbers(net: gluon.Block, pattern: str = ".*") -> Numbers:
    """All numbers that each device holds."""
    return values([[p.data(c) for p in net.collect_params(pattern).values()] for c in contexts(K)])


def replicas(answer: Answer) -> None:
    net, limit = nn.Dense(1, in_units=2), 1.5
    net.initialize(ctx=contexts(K))
    net.weight.set_data(mx.nd.array([[-2.5, 2]]))
    net.bias.set_data(mx.nd.array([1.75]))
    before = _numbers(net)
    answer(net, limit)
    right = np.clip(before[0], -limit, limit)
    mistakes = {"one-replica": [[right, *before[1:]]], "not-in-place": [before]}
    case = f"limit {limit}, {K} devices, each with a weight (2 numbers) and a bias (1 number): {shown(before[:1])}"
    compare(case, _numbers(net), [right] * K, mistakes)


def stats(answer: Answer) -> None:
    net, running = nn.HybridSequential(), ".*running.*"
    net.add(nn.BatchNorm(in_channels=1), nn.BatchNorm(in_channels=1))
    net.initialize(ctx=contexts(K))
    random = np.random.RandomState(0)
    for parameter in net.collect_params(running).values():
        for replica in parameter.list_data():
            replica[:] = K * random.randint(1, 30)
    before = _numbers(net, running)  # mean and variance of the first layer, then of the second
    with recording() as events:
        answer(net)
    mean = np.mean(before, axis=0)
    mistakes = {
        "not-in-place": [before],
        "one-replica": [[mean, *before[1:]]],
        "first-device": [[before[0]] * K],
        "sum": [[mean * K] * K],
        "means-only": [[np.where([True, False, True, False], mean, x) for x in before]],
    }
    case = f"{K} devices with mean, variance, mean, variance of 2 layers: {shown(before)}"
    compare(case, _numbers(net, running), [mean] * K, mistakes)
    copies(case, events, len(mean) * 2 * (K - 1))


def seeds(answer: Answer) -> None:
    ctx, drawn = contexts(K), []
    for seed in (1, 1, 2):
        weights, masks = answer(ctx, seed)
        for kind, arrays, shape in (("weights", weights, (4, 3)), ("masks", masks, (100,))):
            if [(array.context, array.shape) for array in arrays] != [(c, shape) for c in ctx]:
                found = ", ".join(f"{array.shape} on {array.context}" for array in arrays)
                raise Mistake("wrong-device", f"{kind}: {found}; expected: {shape} on each of {ctx}")
        weights, masks = values(weights), values(masks)
        case = f"seed {seed}, {K} devices; the first 3 weights and 6 elements of the mask on each device:"
        case = f"{case}\n{shown([w[:3] for w in weights])}\n{shown([m[:6] for m in masks])}"
        if not all(np.array_equal(w, weights[0]) for w in weights):
            raise Mistake("different-weights", case)
        if any(np.array_equal(masks[i], masks[j]) for i in range(K) for j in range(i)):
            raise Mistake("same-masks", case)
        if any(set(m) != {0, 1} for m in masks):
            raise Mistake("wrong-result", case)
        drawn.append((case, np.concatenate(weights), np.concatenate(masks)))
    first, again, other = drawn
    for part in (1, 2):
        if not np.array_equal(first[part], again[part]):
            raise Mistake("not-repeatable", f"first call: {first[0]}\nsecond call: {again[0]}")
        if np.array_equal(first[part], other[part]):
            raise Mistake("ignores-seed", f"{first[0]}\n{other[0]}")
