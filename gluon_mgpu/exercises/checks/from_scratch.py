"""Hidden cases of the exercises on data parallelism from scratch."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
from mxnet import nd
from mxnet.ndarray import NDArray

from gluon_mgpu.exercises.cases import (
    Answer,
    Copy,
    Numbers,
    Wait,
    compare,
    contexts,
    copies,
    recording,
    same,
    shown,
    values,
)
from gluon_mgpu.exercises.report import Mistake


def split(answer: Answer) -> None:
    for n, k in ((6, 2), (7, 3), (10, 4), (3, 3)):
        data, ctx = nd.arange(n).reshape((n, 1)), contexts(k)
        shards = answer(data, ctx)
        sizes, devices = [len(shard) for shard in shards], [shard.context for shard in shards]
        case = f"{n} examples on {k} devices: shards of {sizes} examples on {devices}"
        rows = np.concatenate(values(shards)).astype(int).tolist()
        missing = set(range(n)) - set(rows)
        if missing:
            raise Mistake("drops-examples", f"{case}; missing: {sorted(missing)}")
        if devices != ctx:
            raise Mistake("wrong-device", case)
        if max(sizes) - min(sizes) > 1:
            raise Mistake("unbalanced", case)
        if len(rows) != n:
            raise Mistake("wrong-result", f"{case}; more examples than there are")


def _reduce(answer: Answer, k: int, n: int) -> tuple[str, Numbers, Numbers, list[Any]]:
    """Sum vectors of n numbers on k devices. Returns the case, the numbers before and after, and what was recorded."""
    before = list(np.random.RandomState(k).randint(1, 100, (k, n)).astype(float))
    arrays = [nd.array(x, ctx=c) for x, c in zip(before, contexts(k))]
    with recording() as events:
        answer(list(arrays))
    case = f"{k} device{'s'[: k > 1]} with {shown(before)}"
    return case, before, values(arrays), events


def allreduce(answer: Answer) -> None:
    for k in (2, 3, 4, 1):
        case, before, found, events = _reduce(answer, k, 2)
        total, repeated = np.sum(before, axis=0), list(before)
        for i in range(k):  # each device adds all arrays, of which some are sums already
            repeated[i] = np.sum(repeated, axis=0)
        mistakes = {
            "not-in-place": [before],
            "no-broadcast": [[total, *before[1:]]],
            "early-broadcast": [[total, *np.cumsum(before, axis=0)[1:]]],
            "sums-twice": [[total + before[0]] * k, [total * 2] * k, repeated],
            "mean": [[total / k] * k],
        }
        compare(case, found, [total] * k, mistakes)
        copies(case, events, 2 * (k - 1))


def tree(answer: Answer) -> None:
    for k in (2, 4, 16, 1, 3, 5, 6, 7):
        case, before, found, events = _reduce(answer, k, 1)
        right = [np.sum(before, axis=0)] * k
        mistakes = {
            "powers-of-2": [found] if k in (3, 5, 6, 7) else [],
            "not-in-place": [before],
            "no-broadcast": [[right[0], *found[1:]]],
        }
        compare(case, found, right, mistakes)
        busy: Counter[Any] = Counter()  # the round of a device's last copy, if it takes part in one copy per round
        for copy in copies(case, events, 2 * (k - 1)):
            busy[copy.source] = busy[copy.target] = max(busy[copy.source], busy[copy.target]) + 1
        rounds, most = max(busy.values(), default=0), 4 * math.ceil(math.log2(k))
        if k == 16 and rounds > most:
            raise Mistake("not-a-tree", f"{k} devices: the copies take {rounds} rounds; {most} are enough for any tree")


def ring(answer: Answer) -> None:
    for k, n in ((2, 4), (4, 8), (3, 6), (3, 7), (4, 11)):
        case, before, found, events = _reduce(answer, k, n)
        total, cut = np.sum(before, axis=0), n - n % k
        holders = np.sum([np.isclose(x, total) for x in found], axis=0)  # how many devices have the sum, per number
        mistakes = {
            "not-in-place": [before],
            "drops-remainder": [found] if cut < n and (holders[:cut] == k).all() else [],
            "no-gather": [found] if (holders == 1).all() else [],
        }
        compare(case, found, [total] * k, mistakes)
        received: Counter[Any] = Counter()
        for copy in copies(case, events, 2 * (k - 1)):
            received[copy.target] += copy.size
            if (copy.target.device_id - copy.source.device_id) % k not in (1, k - 1):
                raise Mistake("not-a-ring", f"{k} devices: {copy.source} sends to {copy.target}")
        (device, most), enough = received.most_common(1)[0], 2 * (k - 1) * math.ceil(n / k)
        if most > enough:
            case = f"{k} devices, vectors of {n} numbers: {device} receives {most} numbers; {enough} are enough"
            raise Mistake("whole-vectors", case)


def _linear(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A batch for a linear model: X (n, 2), y (n,)."""
    random = np.random.RandomState(seed)
    return random.normal(size=(n, 2)), random.normal(size=n)


def _gradient(X: np.ndarray, y: np.ndarray, w: np.ndarray) -> np.ndarray:
    return ((X @ w - y)[:, None] * X).sum(axis=0)


def step(answer: Answer) -> None:
    n, k, lr, w = 6, 3, 0.1, np.array([1.0, -2.0])
    X, y = _linear(n)
    params = [nd.array(w, ctx=c) for c in contexts(k)]
    for p in params:
        p.attach_grad()
    answer(nd.array(X), nd.array(y), [[p] for p in params], contexts(k), lr)
    found, sums = values(params), values([p.grad for p in params])
    own = [_gradient(*shard, w) for shard in zip(np.split(X, k), np.split(y, k))]
    gradient = np.sum(own, axis=0)
    right = w - lr * gradient / n
    too_often = [gradient * k**i for i in range(1, k + 1)]
    mistakes = {
        "sums-twice": [found] if any(same([x], [g]) for x in sums for g in too_often) else [],
        "not-in-place": [[w] * k],
        "shard-size": [[w - lr * gradient / (n // k)] * k],
        "no-division": [[w - lr * gradient] * k],
        "one-replica": [[right] + [w] * (k - 1)],
        "no-allreduce": [[w - lr * g / size for g in own] for size in (n, n // k)],
    }
    case = f"a step of {n} examples on {k} devices with lr {lr}, from w = {shown([w])}; w on each device:"
    compare(case, found, [right] * k, mistakes)


def accumulate(answer: Answer) -> None:
    k, lr, sizes, w, earlier = 2, 0.1, (6, 2), np.array([1.0, -2.0]), np.zeros(2)
    n = sum(sizes)
    params = [nd.array(w, ctx=c) for c in contexts(k)]
    for p in params:
        p.attach_grad("add")
    for number in (1, 2):
        parts = [_linear(size, seed=number * size) for size in sizes]
        answer([(nd.array(X), nd.array(y)) for X, y in parts], [[p] for p in params], contexts(k), lr)
        first, last = (_gradient(X, y, w) for X, y in parts)
        gradient, moved = first + last, w - lr * first / sizes[0]
        wrong = {
            "sums-twice": [k * first + last],
            "part-size": [gradient * n / size for size in sizes],
            "last-part": [last, last * n / sizes[1]],
            "stale-gradients": [gradient + k * earlier, gradient + earlier] if number > 1 else [],
        }
        mistakes = {name: [[w - lr * g / n] * k for g in gradients] for name, gradients in wrong.items()}
        mistakes["step-per-part"] = [[moved - lr * _gradient(*parts[1], moved) / sizes[1]] * k]
        case = f"step {number}, parts of {sizes[0]} and {sizes[1]} examples, {k} devices, lr {lr}; w on each device:"
        w, earlier = w - lr * gradient / n, gradient
        compare(case, values(params), [w] * k, mistakes)


def predict(answer: Answer) -> None:
    for n, k in ((6, 2), (7, 3)):
        scores, ctx = np.random.RandomState(n).permutation(n * 5).reshape(n, 5), contexts(k)
        with recording() as events:

            def net(X: NDArray, events: list[Any] = events) -> NDArray:
                events.append(X)
                return X * 2

            classes = answer(nd.array(scores), net, ctx)
        calls = [i for i, event in enumerate(events) if isinstance(event, NDArray)]
        shards = [events[i] for i in calls]
        done = ", ".join(f"{len(X)} on {X.context}" for X in shards)
        case = f"{n} examples on {k} devices; net computed {done or 'nothing'}"
        if {X.context for X in shards} != set(ctx):
            raise Mistake("idle-devices", case)
        if sum(map(len, shards)) > n:
            raise Mistake("whole-batch", case)
        found, right = values([classes]), [scores.argmax(axis=1).astype(float)]
        compare(case, found, right, {"wrong-order": [found] if Counter(found[0]) == Counter(right[0]) else []})
        if any(isinstance(event, Wait) for event in events[calls[0] : calls[-1]]):
            raise Mistake("takes-turns", case)
        if sum(isinstance(event, (Copy, Wait)) for event in events) < 2 * (k - 1):  # shards there, classes back
            raise Mistake("no-copy", case)
