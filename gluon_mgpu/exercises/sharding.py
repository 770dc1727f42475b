"""The hidden cases of the exercises on buckets and ZeRO; see `checks`."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
from mxnet import nd
from mxnet.ndarray import NDArray

from gluon_mgpu.exercises import Mistake, cases
from gluon_mgpu.exercises.cases import Answer, Copy, Numbers, compare, contexts, recording, shown, values

SIZES = ((3, 6), (2, 4), (4, 8), (3, 7))  # numbers of devices, lengths of vectors
SHAPES = [(2, 2), (2,), (5,), (1,), (1,), (1, 3)]  # for buckets


def _vectors(k: int, n: int) -> Numbers:
    return list(np.random.RandomState(k + n).randint(1, 100, (k, n)).astype(float))


def _chunks(vectors: Numbers) -> Numbers:
    """Chunk i of vector i, for each of k vectors."""
    k = len(vectors)
    return [x[len(x) * i // k : len(x) * (i + 1) // k] for i, x in enumerate(vectors)]


def _on_devices(arrays: Numbers) -> list[NDArray]:
    return [nd.array(x, ctx=c) for x, c in zip(arrays, contexts(len(arrays)))]


def _rounds(found: Numbers, right: Numbers, events: list[Any]) -> dict[str, list[Numbers]]:
    """Name the mistake in a result of the right size by the number of chunks that each device sent."""
    sent, needed = sum(isinstance(event, Copy) for event in events) / len(right), len(right) - 1
    name = "missing-round" if sent < needed else "extra-round" if sent > needed else "wrong-chunk"
    return {name: [found] if sent and [x.size for x in found] == [x.size for x in right] else []}


def _traffic(case: str, events: list[Any], rounds: int, k: int, n: int) -> None:
    """Check that arrays were copied, and that no device sent or received more than a chunk in each round."""
    sent: Counter[str] = Counter()
    for copy in cases.copies(case, events, k):
        sent[f"{copy.source} sends"] += copy.size
        sent[f"{copy.target} receives"] += copy.size
    (device, most), enough = sent.most_common(1)[0], rounds * math.ceil(n / k)
    if most > enough:
        raise Mistake("too-much-traffic", f"{case}; {device} {most} elements; {enough} are enough")


def reduce_scatter(answer: Answer) -> None:
    for k, n in SIZES:
        before = _vectors(k, n)
        with recording() as events:
            result = answer(_on_devices(before))
        found, total = values(cases.listed(result, contexts(k))), np.sum(before, axis=0)
        case, right = f"{k} devices with {shown(before)}", _chunks([total] * k)
        mistakes = {
            "not-scattered": [[total] * k],
            "no-sum": [before, _chunks(before)],
            "mean": [[x / k for x in right]],
            "sums-twice": [[x + y for x, y in zip(right, _chunks(before))]],
            "misplaced-chunks": [right[i:] + right[:i] for i in range(1, k)],
            **_rounds(found, right, events),
        }
        compare(case, found, right, mistakes)
        for array, x in zip(result, right):
            cases.listed([array], shape=x.shape)
        _traffic(case, events, k - 1, k, n)


def all_gather(answer: Answer) -> None:
    for k, n in SIZES:
        (total,) = _vectors(1, n)
        parts = _chunks([total] * k)
        with recording() as events:
            result = answer(_on_devices(parts))
        found = values(cases.listed(result, contexts(k)))
        case, right = f"{k} devices with {shown(parts)}", [total] * k
        mistakes = {
            "not-gathered": [parts],
            "wrong-order": [found] if all(sorted(x) == sorted(total) for x in found) else [],
            "one-replica": [[total, *parts[1:]]],
            "sum": [[np.sum(parts, axis=0)] * k] if n % k == 0 else [],
            **_rounds(found, right, events),
        }
        compare(case, found, right, mistakes)
        cases.listed(result, shape=(n,))
        _traffic(case, events, k - 1, k, n)


def zero1(answer: Answer) -> None:
    lr, momentum, batch_size = 0.1, 0.9, 4
    for k, n in ((2, 4), (3, 7)):
        random = np.random.RandomState(k)
        w, v = random.randint(-5, 5, n).astype(float), np.zeros(n)
        params, velocities = _on_devices([w] * k), _on_devices(_chunks([v] * k))
        for number in (1, 2, 3):
            grads = list(random.randint(1, 20, (k, n)).astype(float))
            with recording() as events:
                answer(params, _on_devices(grads), velocities, lr, momentum, batch_size)
            total, own = np.sum(grads, axis=0), np.concatenate(_chunks(grads))
            moved, step = w + momentum * v, lr / batch_size
            right = moved - step * total
            old, new = _chunks([w] * k), _chunks([right] * k)
            mistakes = {
                "not-in-place": [[w] * k],
                "no-gather": [[np.concatenate([*old[:i], new[i], *old[i + 1 :]]) for i in range(k)]],
                "no-allreduce": [[moved - step * own] * k, [moved - step * g for g in grads]],
                "no-momentum": [[w - step * total] * k] if number > 1 else [],
                "sums-twice": [[moved - k * step * total] * k],
            }
            case = (
                f"step {number} with lr {lr}, momentum {momentum} and batch size {batch_size}, from p = {shown([w])}\n"
                f"velocities {shown(_chunks([v] * k))}, gradients {shown(grads)}; p on each device:"
            )
            compare(case, values(params), [right] * k, mistakes, [w] * k)
            _traffic(case, events, 2 * (k - 1), k, n)
            w, v = right, right - w


def _filled(sizes: list[int], limit: int) -> list[list[int]]:
    """The sizes of the arrays in each bucket, if arrays of these sizes are added in this order."""
    found = [sizes[:1]]
    for size in sizes[1:]:
        if sum(found[-1]) + size > limit:
            found.append([])
        found[-1].append(size)
    return found


def buckets(answer: Answer) -> None:
    sizes = [int(np.prod(shape)) for shape in SHAPES]
    for k, limit in ((2, 5), (2, 3), (2, sum(sizes)), (3, 5)):
        before, ctx = _vectors(k, sum(sizes)), contexts(k)
        splits = [np.split(x, np.cumsum(sizes)[:-1]) for x in before]
        grads = [[nd.array(x.reshape(s), ctx=c) for x, s in zip(split, SHAPES)] for split, c in zip(splits, ctx)]
        with recording() as events:
            answer([list(own) for own in grads], limit)
        arrays = f"arrays of {', '.join(map(str, sizes))} elements, limit {limit}, {k} devices"
        found, total = values(grads), np.sum(before, axis=0)
        order = _filled(sizes[::-1], limit)  # of the gradients from last to first
        unsent = sum(order[-1])  # elements in the last bucket, which contains the first gradients
        mistakes = {
            "not-in-place": [before],
            "no-broadcast": [[total, *before[1:]]],
            "last-bucket": [[np.append(x[:unsent], total[unsent:]) for x in before]],
            "wrong-place": [found] if np.isin(found, total).all() else [],
        }
        case = f"{arrays}: {shown(before)}"
        compare(case, found, [total] * k, mistakes, before)
        sent = [copy.size for copy in cases.copies(case, events, 2 * (k - 1)) if copy.source == ctx[-1]]
        right, forward = ([sum(bucket) for bucket in filled] for filled in (order, _filled(sizes, limit)))
        if sent != right:
            case = f"{arrays}; elements in each bucket:\nexpected  {right}\nfound     {sent}"
            if any(size > limit and size not in sizes for size in sent):
                raise Mistake("over-limit", case)
            if sorted(sent) == sorted(sizes):
                raise Mistake("no-buckets", case)
            raise Mistake("first-layer-first" if sent == forward else "wrong-buckets", case)
