"""The hidden cases of the exercises that sum vectors over devices, or join them; see `grading`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
from mxnet import Context, nd

from gluon_mgpu.exercises import Mistake, cases
from gluon_mgpu.exercises.cases import Copy, Function, Numbers, compare, contexts, recording, shown, values
from gluon_mgpu.support.log import plural

SHAPES = [(2, 2), (2,), (5,), (1,), (1,), (1, 3)]  # for buckets


def _reduce(answer: Function, k: int, *shape: int) -> tuple[str, Numbers, Numbers, list[Any], dict[str, Any]]:
    """Sum arrays of this shape on k devices, in place. Returns the case, the values before and after, the events, and
    the mistakes that are the same in all such exercises."""
    n = math.prod(shape)
    before = cases.vectors(k, n)
    arrays = cases.on_devices([x.reshape(shape) for x in before])
    given = list(arrays)
    with recording() as events:
        answer(given)
    found, total = values(arrays), np.sum(before, axis=0)
    replaced = len(given) != k or any(x is not y for x, y in zip(given, arrays))
    mistakes = {
        "not-in-place": replaced or [before],
        "mean": [total / k],
        "no-broadcast": [[total, *before[1:]]],
        "not-a-sum": cases.operations(before),
        "over-elements": [np.full(n, np.sum(before)), [np.full(n, x.sum()) for x in before]],
    }
    kind = f"arrays of shape {shape}: " if len(shape) > 1 else ""
    return f"{k} {plural(k, 'device')} with {kind}{shown(before)}", before, found, events, mistakes


def _counts(found: Numbers, before: Numbers) -> dict[str, bool]:
    """Name the mistake if each result is a sum in which some arrays are missing, or occur more than once."""
    counts = list(product(range(5), repeat=len(before)))[1:]
    sums = list(zip(counts, counts @ np.array(before)))
    fits = [[count for count, total in sums if np.allclose(total, x)] for x in found]
    used = np.sum([fit[0] for fit in fits if fit], axis=0)  # how often each array was added, on all devices
    name = "sums-twice" if any(max(fit[0]) > 1 for fit in fits if fit) else "missing-arrays"
    return {"overwritten" if np.min(used) == 0 else name: all(fits)}


def _rounds(found: Numbers, right: Numbers, events: list[Any], needed: int) -> dict[str, bool]:
    """Name the mistake in a ring by the number of chunks that each device sent."""
    sent = Counter(event.source for event in events if isinstance(event, Copy))
    rounds = max(sent.values(), default=0)
    name = "missing-round" if rounds < needed else "extra-round" if rounds > needed else "wrong-chunk"
    return {name: rounds > 0 and (rounds < needed or [x.size for x in found] == [x.size for x in right])}


def _traffic(case: str, events: list[Any], rounds: int, k: int, n: int) -> None:
    """Check that arrays were copied, and that no device sent or received more than a chunk in each round."""
    copies = cases.copies(case, events, rounds * n)  # in each round, every element is sent once
    most, chunk = max(max(elements.values()) for elements in cases.traffic(events)), math.ceil(n / k)
    enough = rounds * chunk
    if most > enough:
        one_more = most <= enough + chunk and max(copy.size for copy in copies) <= chunk
        case = f"{case}; a device sends or receives {most} elements; {enough} are enough"
        raise Mistake("extra-round" if one_more else "too-much-traffic", case)


def allreduce(answer: Function) -> None:
    for k, shape in ((2, (2,)), (3, (2,)), (4, (3, 2)), (1, (2,))):
        case, before, found, events, mistakes = _reduce(answer, k, *shape)
        sums = np.cumsum(before, axis=0)
        early = {"early-broadcast": k > 2 and [[sums[-1], *sums[1:]]]}
        compare(case, found, sums[-1], {**early, **mistakes, **_counts(found, before)})
        cases.copies(case, events, 2 * (k - 1) * math.prod(shape))


def tree(answer: Function) -> None:
    for k in (2, 4, 16, 1, 3, 5, 6, 7, 33):
        try:
            case, before, found, events, mistakes = _reduce(answer, k, 2)
        except IndexError as error:
            cases.raise_first(f"{k} devices: IndexError: {error}", {"powers-of-2": k in (3, 5, 6, 7)})
            raise
        total = np.sum(before, axis=0)
        counted = _counts(found, before) if k <= 4 else {}
        twice = {name: made for name, made in counted.items() if name == "sums-twice"}
        mistakes |= {"no-broadcast": [[total, *found[1:]]], "powers-of-2": k in (3, 5, 6, 7)}
        compare(case, found, total, {**twice, **mistakes, **counted})
        busy: Counter[Any] = Counter()  # {device: round of its last copy}, if each takes part in one copy per round
        done = cases.copies(case, events, 2 * (k - 1) * 2)
        for copy in done:
            busy[copy.source] = busy[copy.target] = max(busy[copy.source], busy[copy.target]) + 1
        rounds, most = max(busy.values(), default=0), 4 * math.ceil(math.log2(k))
        if k == 16 and rounds > most:
            down, up = (max(Counter(copy[end] for copy in done).values()) == k - 1 for end in (0, 1))
            name = "star-up" if up and not down else "star-down" if down and not up else "not-a-tree"
            raise Mistake(name, f"{k} devices: {rounds} rounds; a tree needs at most {most}")


def ring(answer: Function) -> None:
    for k, n in ((4, 8), (2, 4), (3, 6), (3, 7), (4, 11), (4, 5)):
        case, before, found, events, mistakes = _reduce(answer, k, n)
        total, cut = np.sum(before, axis=0), n - n % k
        holders = np.sum([np.isclose(x, total) for x in found], axis=0)  # per element: how many devices have its sum
        rounds = _rounds(found, before, events, 2 * (k - 1))
        mistakes |= {
            "drops-remainder": cut < n and (holders[:cut] == k).all(),
            "sums-twice": np.greater_equal(found, total).all(),  # the elements are positive
            "no-gather": (holders == 1).all(),
            "no-sum": np.isin(found, before).all() and "missing-round" not in rounds,
        }
        compare(case, found, total, {**mistakes, **rounds})
        for copy in (event for event in events if isinstance(event, Copy)):
            if (copy.target.device_id - copy.source.device_id) % k != 1:
                raise Mistake("not-a-ring", f"{k} devices: {copy.source} sends to {copy.target}")
        _traffic(f"{k} devices, vectors of {n} elements", events, 2 * (k - 1), k, n)


def _chunks(vectors: Numbers) -> Numbers:
    """Chunk i of vector i, for each of k vectors."""
    k = len(vectors)
    return [x[len(x) * i // k : len(x) * (i + 1) // k] for i, x in enumerate(vectors)]


def reduce_scatter(answer: Function) -> None:
    for k, n in ((4, 8), (2, 4), (3, 6), (3, 8)):
        before = cases.vectors(k, n)
        arrays, total = cases.on_devices(before), np.sum(before, axis=0)
        own, right = _chunks(before), _chunks([total] * k)
        with recording() as events:
            result = answer([*arrays])
        found = values(cases.listed(result, contexts(k)))
        others = [right[i:] + right[:i] for i in range(1, k)] + [right[::-1]]
        in_order = all(sorted(x) == sorted(r) for x, r in zip(found, right))
        rounds = _rounds(found, right, events, k - 1)
        too_few = {name: made for name, made in rounds.items() if name == "missing-round" and made and len(events) >= k}
        no_sum: Any = [before, own, *(_chunks([x] * k) for x in before)]
        if not cases.same(values(arrays), before):  # sums are somewhere else
            others.append(own)
            no_sum = np.isin(np.concatenate(found), before).all()
        mistakes = {
            **too_few,
            "misplaced-chunks": others,
            "not-scattered": [total],
            "mean": [[x / k for x in right]],
            "sums-twice": [[x + y for x, y in zip(right, own)]],
            "own-chunks": [[sum(_chunks([x] * k)) for x in before]] if n % k == 0 else [],
            "no-sum": no_sum,
            "wrong-order": in_order,
            **rounds,
        }
        compare(f"{k} devices with {shown(before)}", found, right, mistakes)
        for array, x in zip(result, right):
            cases.listed([array], shape=x.shape)
        _traffic(f"{k} devices with {shown(before)}", events, k - 1, k, n)


def zero1(answer: Function) -> None:
    for k, n, lr, momentum, batch_size in ((2, 4, 0.25, 0.9, 5), (3, 7, 0.5, 0.75, 8)):
        random = np.random.RandomState(k)
        w, v = random.randint(-5, 5, n).astype(float), random.randint(1, 5, n).astype(float)
        params, velocities = cases.on_devices([w] * k), cases.on_devices(_chunks([v] * k))
        for number in (1, 2):
            grads = list(random.randint(1, 20, (k, n)).astype(float))
            with recording() as events:
                answer([*params], cases.on_devices(grads), [*velocities], lr, momentum, batch_size)
            total, own, old = np.sum(grads, axis=0), np.concatenate(_chunks(grads)), momentum * v
            new = old - lr * total / batch_size
            before, after = _chunks([w] * k), _chunks([w + new] * k)
            wrong = {  # {mistake: changes of the parameters}
                "no-division": [old - lr * total],
                "mean": [old - lr * total / k / batch_size],
                "sums-twice": [old - lr * total * k / batch_size],
                "no-momentum": [new - old],
                "wrong-sign": [2 * old - new],
                "other-momentum": [
                    momentum * new + new - old,
                    *(old + factor * (new - old) for factor in (momentum, 1 - momentum)),
                    old / momentum + new - old,
                    new - old - lr * old,
                ],
                "no-allreduce": [old - lr * g / batch_size for g in (own, np.array(grads))],
            }
            unchanged = [np.array_equal(x, y) for x, y in zip(values(velocities), _chunks([v] * k))]
            mistakes = {
                "nothing-new": all(unchanged) and [w],
                "parameters-first": [w + v],
                "no-gradient": [w + old],
                "not-in-place": [w],
                "idle-devices": not unchanged[0] and all(unchanged[1:]) and [np.concatenate([after[0], *before[1:]])],
                "gathers-velocities": [new],
                "no-gather": [
                    [np.concatenate([*before[:i], after[i], *before[i + 1 :]]) for i in range(k)],
                    np.concatenate([after[0], *before[1:]]),
                ],
                **{name: [w + change for change in changes] for name, changes in wrong.items()},
            }
            case = (
                f"step {number} with lr {lr}, momentum {momentum} and batch size {batch_size}, from p = {shown([w])}\n"
                f"velocities {shown(_chunks([v] * k))}, gradients {shown(grads)}; "
            )
            compare(f"{case}p on each device:", values(params), w + new, mistakes, [w] * k)
            mistakes = {"old-velocities": [_chunks([v] * k)], "other-momentum": [_chunks([-new / lr] * k)]}
            compare(f"{case}v on each device:", values(velocities), _chunks([new] * k), mistakes)
            _traffic(case, events, 2 * (k - 1), k, n)
            w, v = w + new, new


def _filled(sizes: list[int], limit: int) -> list[list[int]]:
    """The sizes of the arrays in each bucket, if arrays of these sizes are added in this order."""
    found = [sizes[:1]]
    for size in sizes[1:]:
        if sum(found[-1]) + size > limit:
            found.append([])
        found[-1].append(size)
    return found


def buckets(answer: Function) -> None:
    sizes = [math.prod(shape) for shape in SHAPES]
    for k, limit in ((2, 5), (2, 7), (2, 2), (2, sum(sizes)), (3, 5)):
        before, ctx = cases.vectors(k, sum(sizes)), contexts(k)
        splits = [np.split(x, np.cumsum(sizes)[:-1]) for x in before]
        grads = [[nd.array(x.reshape(s), ctx=c) for x, s in zip(split, SHAPES)] for split, c in zip(splits, ctx)]
        with recording() as events:
            answer([list(own) for own in grads], limit)
        arrays = f"arrays of {', '.join(map(str, sizes))} elements, limit {limit}, {k} devices"
        found, total = values(grads), np.sum(before, axis=0)
        order = _filled(sizes[::-1], limit)  # the gradients from last to first
        unsent = sum(order[-1])  # elements in the last bucket, which contains the first gradients
        mistakes = {
            "not-in-place": [before],
            "no-broadcast": [[total, *before[1:]]],
            "last-bucket": [[np.append(x[:unsent], total[unsent:]) for x in before]],
            "wrong-place": np.isin(found, total).all(),
        }
        compare(f"{arrays}: {shown(before)}", found, total, mistakes, before)
        sent = [copy.size for copy in cases.copies(arrays, events, 2 * (k - 1) * sum(sizes)) if copy.source == ctx[-1]]
        right, forward = ([sum(bucket) for bucket in filled] for filled in (order, _filled(sizes, limit)))
        case = f"{arrays}; elements in each bucket:\nexpected  {right}\nfound     {sent}"
        mistakes = {
            "over-limit": any(size > limit and size not in sizes for size in sent),
            "no-buckets": sorted(sent) == sorted(sizes) != sorted(right),
            "first-layer-first": sent == forward != right,
            "wrong-buckets": sent != right,
        }
        cases.raise_first(case, mistakes)


def block(answer: Function) -> None:
    n, d, m = 2, 6, 2
    for k, h in ((2, 20), (3, 10), (1, 4)):
        random, ctx = np.random.RandomState(k), contexts(k)
        X, W1, b1, W2, b2 = (
            random.randint(-4, 5, shape).astype(float) for shape in ((n, d), (h, d), (h,), (m, h), (m,))
        )
        b1[-1], W2[:, -1] = 100, (-4, 4)  # relu keeps the last hidden value, and would change a negative output
        with recording() as events:
            result = answer(*[nd.array(x) for x in (X, W1, b1, W2, b2)], ctx)
        found = values(cases.listed(result, ctx))
        rows = np.array_split(np.arange(h), k)
        before = X @ W1.T + b1
        hidden = np.maximum(before, 0)
        parts, right = [hidden[:, own] @ W2[:, own].T for own in rows], hidden @ W2.T + b2
        partial = sum(np.maximum(X[:, own] @ W1[:, own].T + b1 / k, 0) for own in np.array_split(np.arange(d), k))
        used = np.arange(h - h % k)
        wrong = {
            "bias-on-each": [right + (k - 1) * b2],
            "no-bias": [right - b2, *((np.maximum(X @ W1.T, 0) + late) @ W2.T + b2 for late in (0, b1))],
            "no-relu": [before @ W2.T + b2, before @ W2.T + k * b2],
            "relu-of-sum": [np.maximum(right, 0), np.maximum(before @ W2.T + b2, 0)],
            "relu-of-parts": [partial @ W2.T + b2, sum(np.maximum(part, 0) for part in parts) + b2],
            "drops-channels": [hidden[:, used] @ W2[:, used].T + b2] if h % k else [],
            "mean": [sum(parts) / k + b2, right / k],
        }
        mistakes: dict[str, Any] = {name: [x.ravel() for x in results] for name, results in wrong.items()}
        mistakes["no-broadcast"] = [
            [right.ravel(), *[(part + extra).ravel() for part in parts[1:]]] for extra in (0, b2)
        ]
        mistakes["no-sum"] = [[(part + extra).ravel() for part in parts] for extra in (0, b2)]
        case = f"{n} examples, {d} inputs, {h} hidden values, {m} outputs, {k} {plural(k, 'device')}"
        compare(f"{case}; the outputs on each device:", found, right.ravel(), mistakes)
        for array in result:
            cases.listed([array], shape=(n, m))
        _check_block(case, events, ctx, h, n * d, d + 1 + m, n * m)
        cases.only_queues(case, events)


def _check_block(case: str, events: list[Any], ctx: Sequence[Context], h: int, X: int, row: int, output: int) -> None:
    """Check, by the numbers that each device sent and received, that it computed its share of the hidden values.

    X, row, output: the sizes of the input, of the parameters of one hidden value, and of the output.
    """
    sent, received = cases.traffic(events)
    for i, device in enumerate(ctx):
        count, found = h // len(ctx), received[device]
        mine = X + count * row if i else 0
        most = X + (count + 1) * row + 2 * output if i else (len(ctx) - 1) * output
        mistakes = {
            "whole-weights": i and found >= h * (row - 1),
            "idle-devices": i and found < mine and not sent[device],
            "no-copy": found < mine,
            "too-much-traffic": found > most,
        }
        cases.raise_first(f"{case}; {device} received {found} numbers, and sent {sent[device]}", mistakes)
