"""The hidden cases of the exercises that sum arrays over devices; see `cases`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from mxnet import nd

from gluon_mgpu.exercises import Mistake, cases
from gluon_mgpu.exercises.cases import Case, Function, Results, Trial, contexts, inputs, shown, values
from gluon_mgpu.exercises.cases.events import copies, recording, traffic, waits
from gluon_mgpu.support.log import plural


def _in_place(k: int, shape: tuple[int, ...], check: Callable[[str, list[Any]], object], **case: Any) -> Case:
    """A function changes one array per device in place."""
    before = cases.vectors(k, math.prod(shape))
    kind = f"arrays of shape {shape}: " if len(shape) > 1 else ""
    text = f"{k} {plural(k, 'device')} with {kind}{shown(before)}"

    def call(function: Function) -> Trial:
        arrays = cases.on_devices([x.reshape(shape) for x in before])
        given = [*arrays]
        with recording() as events:
            function(given)
        return Trial({"": values(arrays)}, [*events, *cases.replaced([arrays], [given])])

    return Case(text, call, {"": before}, lambda events: check(text, events), **case)


def _rounds(events: list[Any]) -> int:
    """The number of rounds that the copies need, if each device takes part in one copy per round."""
    busy = Counter[Any]()  # {device: round of its last copy}
    for copy in copies(events):
        busy[copy.source] = busy[copy.target] = max(busy[copy.source], busy[copy.target]) + 1
    return max(busy.values(), default=0)


@inputs((2, (2,)), (3, (2,)), (4, (3, 2)), (1, (2,)), (5, (1, 3)))
def allreduce(k: int, shape: tuple[int, ...]) -> Case:
    return _in_place(k, shape, lambda text, events: cases.check_copies(text, events, 2 * (k - 1) * math.prod(shape)))


@inputs(*((k, shape) for k, shape in zip((2, 4, 16, 1, 3, 5, 6, 7, 33), ((2,), (2, 2), (1,), (3,), (2,)) * 2)))
def tree(k: int, shape: tuple[int, ...]) -> Case:
    def check(text: str, events: list[Any]) -> None:
        cases.check_copies(text, events, 2 * (k - 1) * math.prod(shape))
        rounds, most = _rounds(events), 4 * math.ceil(math.log2(k))
        if k > 8 and rounds > most:
            raise Mistake("not-a-tree", f"{k} devices: {rounds} rounds; a tree needs at most {most}")

    return _in_place(k, shape, check)


def _by_rounds(needed: int) -> Callable[[Trial, Trial], dict[str, bool]]:
    """Mistakes by the number of chunks that each device sends: `needed`, if there is one per round."""

    def mistakes(mine: Trial, right: Trial) -> dict[str, bool]:
        rounds = max(Counter(copy.source for copy in copies(mine.events)).values(), default=0)
        found, expected = (np.concatenate(trial.results[""]) for trial in (mine, right))
        more = found.size == expected.size and bool((found >= expected).all())  # the numbers are positive
        if not rounds:
            return {}
        return {
            "sums-twice": more,
            "missing-round": rounds < needed,
            "extra-round": rounds > needed,
            "wrong-chunk": True,
        }

    return mistakes


def _check_traffic(text: str, events: list[Any], rounds: int, k: int, n: int) -> None:
    """Check that arrays were copied, and that no device sent or received more than a chunk in each round."""
    cases.check_copies(text, events, rounds * n, rounds * math.ceil(n / k))


@inputs((4, 8), (2, 4), (3, 6), (3, 7), (4, 11), (4, 5), (1, 3))
def ring(k: int, n: int) -> Case:
    def check(text: str, events: list[Any]) -> None:
        for copy in copies(events):
            if (copy.source.device_id - copy.target.device_id) % k != 1 % k:
                raise Mistake("not-a-ring", f"{k} devices: {copy.source} sends to {copy.target}")
        _check_traffic(text, events, 2 * (k - 1), k, n)

    return _in_place(k, (n,), check, mistakes=_by_rounds(2 * (k - 1)))


@inputs((4, 8), (2, 4), (8, 16), (4, 11), (2, 3), (1, 2))
def reduce_scatter(k: int, n: int) -> Case:
    before, ctx = cases.vectors(k, n), contexts(k)
    text = f"{k} {plural(k, 'device')} with {shown(before)}"
    shapes = [(n * (i + 1) // k - n * i // k,) for i in range(k)]

    def call(function: Function) -> Trial:
        arrays = cases.on_devices(before)
        with recording() as events:
            chunks = cases.listed(function(arrays), ctx)
        for chunk, shape in zip(chunks, shapes):
            cases.check_shapes(text, [chunk], shape)
        return Trial({"": values(chunks)}, events)

    def check(events: list[Any]) -> None:
        rounds = int(math.log2(k))
        cases.check_copies(text, events, (k - 1) * n, sum(math.ceil(n / k) * 2**r for r in range(rounds)))
        found = Counter(copy.source for copy in copies(events))
        if k > 1 and max(found.values()) > rounds:
            raise Mistake("not-halved", f"{text}; a device sends {max(found.values())} times; {rounds} are enough")

    return Case(text, call, {}, check, _by_rounds(int(math.log2(k))))


@inputs(
    (2, [(2, 2), (3,), (1,)], 0.25, 0.9, 5), (3, [(2,), (1, 3), (4,), (2, 2)], 0.5, 0.75, 8), (3, [(3,)], 1, 0.5, 4)
)
def zero1(k: int, shapes: list[tuple[int, ...]], lr: float, momentum: float, batch_size: int) -> Case:
    random, ctx = np.random.RandomState(k), contexts(k)
    w, v = ([random.randint(1, 9, shape).astype(float) for shape in shapes] for _ in range(2))
    grads = [[[random.randint(1, 20, shape) for shape in shapes] for _ in ctx] for _ in range(2)]  # for each step
    sizes = " + ".join(map(str, map(math.prod, shapes)))
    text = f"{k} devices, parameters of {sizes} elements, lr {lr}, momentum {momentum}, batch size {batch_size}"

    def call(function: Function) -> Trial:
        params = [[nd.array(p, ctx=c) for p in w] for c in ctx]
        velocities = [nd.array(x, ctx=ctx[i % k]) for i, x in enumerate(v)]
        given = [[*arrays] for arrays in (*params, velocities)]
        results: Results = {}
        events: list[Any] = []
        for number, step_grads in enumerate(grads, 1):
            gradients = [[nd.array(g, ctx=c) for g in own] for own, c in zip(step_grads, ctx)]
            with recording() as done:
                function(given[:-1], gradients, given[-1], lr, momentum, batch_size)
            results[f"p on each device after step {number}"] = values(params)
            results[f"v after step {number}"] = values(velocities)
            events += done
        return Trial(results, [*events, *cases.replaced([*params, velocities], given)])

    def check(events: list[Any]) -> None:
        """By the numbers that each device received: its gradients from all others, and their parameters."""
        _, received = traffic(events)
        for i, c in enumerate(ctx):
            own = sum(math.prod(shape) for shape in shapes[i::k])
            needed = len(grads) * ((k - 1) * own + sum(map(math.prod, shapes)) - own)
            case = f"{text}; {c} received {received[c]} numbers; expected {needed}"
            cases.raise_first(case, {"no-copy": received[c] < needed, "too-much-traffic": received[c] > needed})
        cases.check_copies(text, events)

    before = {
        "p on each device after step 1": [np.concatenate([x.ravel() for x in w])] * k,
        "v after step 1": [x.ravel() for x in v],
    }
    return Case(text, call, before, check)


SHAPES = [(2, 2), (2,), (5,), (1,), (1,), (1, 3)]  # of the gradients, for buckets


@inputs(
    (2, SHAPES, 5),
    (2, SHAPES, 7),
    (2, SHAPES, 2),
    (2, SHAPES, 16),
    (3, SHAPES[::-1], 5),
    (4, [(3,), (2, 1)], 4),
    (3, [(2,)], 3),
)
def buckets(k: int, shapes: list[tuple[int, ...]], limit: int) -> Case:
    sizes, ctx = [*map(math.prod, shapes)], contexts(k)
    before = cases.vectors(k, sum(sizes))
    splits = [np.split(x, np.cumsum(sizes)[:-1]) for x in before]
    text = f"arrays of {', '.join(map(str, sizes))} elements, limit {limit}, {k} devices: {shown(before)}"
    sums, filled = "the gradients on each device", "the elements in each bucket"

    def call(function: Function) -> Trial:
        grads = [[nd.array(x.reshape(s), ctx=c) for x, s in zip(split, shapes)] for split, c in zip(splits, ctx)]
        given = [[*own] for own in grads]
        with recording() as events:
            function(given, limit)
        sent = [copy.size for copy in copies(events) if copy.source == ctx[-1]]
        events += cases.replaced(grads, given)
        return Trial({sums: values(grads), filled: [np.array(sent)]}, events)

    def mistakes(mine: Trial, right: Trial) -> dict[str, bool]:
        wanted, [sizes_sent] = right.results[sums], mine.results[filled]
        if not cases.same(mine.results[sums], wanted):
            return {"wrong-place": bool(np.isin(mine.results[sums], wanted[0]).all())}
        return {
            "through-host": not sizes_sent.size and waits(mine.events),
            "no-copy": not sizes_sent.size,
            "over-limit": any(size > limit and size not in sizes for size in sizes_sent),
            "wrong-buckets": True,
        }

    return Case(text, call, {sums: before}, lambda events: cases.check_copies(text, events), mistakes)


@inputs((2, 3, 20, 6, 2), (3, 2, 10, 5, 3), (1, 2, 4, 6, 2), (4, 1, 7, 3, 1))
def block(k: int, n: int, h: int, d: int, m: int) -> Case:
    random, ctx = np.random.RandomState(k), contexts(k)
    shapes = (n, d), (h, d), (h,), (h, d), (m, h), (m,)
    arrays = [random.randint(-4, 5, shape).astype(float) for shape in shapes]
    arrays[2][-1] = 100  # relu keeps the last hidden value
    sizes = f"{n} {plural(n, 'example')}, {d} inputs, {h} hidden values, {m} {plural(m, 'output')}"
    text = f"{sizes}, {k} {plural(k, 'device')}"

    def call(function: Function) -> Trial:
        with recording() as events:
            outputs = cases.listed(function(*map(nd.array, arrays), ctx), ctx)
        cases.check_shapes(text, outputs, (n, m))
        return Trial({"the outputs on each device": values(outputs)}, events)

    def check(events: list[Any]) -> None:
        """By the numbers that each device sent and received: that it computed its share of the hidden values."""
        sent, received = traffic(events)
        row, output = 2 * d + 1 + m, n * m  # the parameters of one hidden value
        for i, device in enumerate(ctx):
            count, found = h // k, received[device]
            least = n * d + count * row if i else 0
            most = n * d + (count + 1) * row + 2 * output if i else (k - 1) * output
            mistakes = {
                "whole-weights": i and found >= h * (row - 1),
                "idle-devices": i and found < least and not sent[device],
                "no-copy": found < least,
                "too-much-traffic": found > most,
            }
            cases.raise_first(f"{text}; {device} received {found} numbers, and sent {sent[device]}", mistakes)
        cases.check_copies(text, events)

    return Case(text, call, {}, check)
