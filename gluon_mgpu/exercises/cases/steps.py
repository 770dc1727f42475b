"""The hidden cases of the exercises on training steps, Gluon and asynchronous execution; see `cases`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from mxnet import gluon, nd
from mxnet.gluon import nn
from mxnet.ndarray import NDArray

from gluon_mgpu.exercises import Mistake, cases
from gluon_mgpu.exercises.cases import Case, Function, Numbers, Results, Trial, contexts, inputs, same, shown, values
from gluon_mgpu.exercises.cases.events import Backward, Call, Copy, Wait, copies, recording, traffic, waits
from gluon_mgpu.support.log import plural

CLOCK, EARLIER, QUEUE = 1000, 100, 1  # for timing: time at the start, seconds of earlier work, seconds to queue


def _rows(arrays: Sequence[NDArray]) -> list[list[float]]:
    return [row for array in arrays for row in array.asnumpy().reshape(len(array), -1).tolist()]


@inputs(((14, 2), [1, 4]), ((6, 2), [1, 1]), ((11, 2, 2), [2, 1, 3]), ((9, 1), [3, 2, 1, 2]))
def split(shape: tuple[int, ...], speeds: list[int]) -> Case:
    n, ctx, data = shape[0], contexts(len(speeds)), nd.arange(np.prod(shape)).reshape(shape)
    batch = _rows([data])

    def call(function: Function) -> Trial:
        shards, again = (cases.listed(function(data.copy(), [*ctx], [*speeds])) for _ in range(2))
        sizes, devices = [len(shard) for shard in shards], [shard.context for shard in shards]
        text = f"a batch of shape {shape}, speeds {speeds}: shards of {sizes} examples on {devices}"
        if len(shards) != len(ctx):
            raise Mistake("wrong-number", text)
        if any(shard.shape[1:] != shape[1:] for shard in shards):
            raise Mistake("wrong-shape", f"{text}, of the shapes {[shard.shape for shard in shards]}")
        found, right = _rows(shards), [n * speed / sum(speeds) for speed in speeds]
        missing = [i for i, row in enumerate(batch) if row not in found]
        mistakes = {
            "changes-examples": any(row not in batch for row in found),
            "drops-examples": missing,
            "mixed-up": devices != ctx and set(devices) == set(ctx),
            "wrong-device": devices != ctx,
            "repeats-examples": len(found) != n,
            "equal-shards": len(set(speeds)) > 1 and max(sizes) - min(sizes) <= 1,
            "unbalanced": any(abs(size - exact) >= 1 for size, exact in zip(sizes, right)),
            "random-order": _rows(again) != found,
        }
        cases.raise_first(f"{text}; missing: {missing or 'none'}", mistakes)
        return Trial({}, [])

    return Case("", call)


def _linear_model(
    text: str, k: int, sizes: Sequence[int], steps: Sequence[Callable[..., object]], grad_req: str = "write"
) -> Case:
    """Training steps of a linear model with parameters w (2,) and b (1,) on k devices.

    sizes: the number of examples in each part of a step's batch. steps: each calls a function with the parameters.
    """
    w, b = nd.array([1, -2]), nd.array([0.5])
    start = [np.array([1, -2, 0.5])] * k

    def call(function: Function) -> Trial:
        params = [[w.copyto(c), b.copyto(c)] for c in contexts(k)]
        for p in (p for own in params for p in own):
            p.attach_grad(grad_req)
        results: Results = {}
        events: list[Any] = []
        for number, step in enumerate(steps, 1):
            given = [[*own] for own in params]
            with recording(params=params) as done:
                step(function, given)
            results[f"w and b on each device after step {number}"] = values(params)
            events += [*done, *cases.replaced(params, given)]
        if len(steps) > 1:
            return Trial(results, events)
        computed, _ = _backward(events, [3] * k)
        grads = values([[p.grad for p in own] for own in params])
        notes = {"gradients after backward": computed, "gradients after the step": grads}
        return Trial(results, events, notes if np.any(computed) else {})

    def misdivided(events: list[Any]) -> dict[str, bool]:
        """Mistakes in how the work was divided among the devices."""
        (computed, passes), needed = _backward(events, [3] * k), len(sizes) * len(steps)
        return {
            "whole-batch": bool(k > 1 and np.any(computed) and same(computed, computed[:1] * k)),
            "idle-devices": min(passes) < min(needed, max(passes)),
            "one-part": 0 < max(passes) < needed,
        }

    def check(events: list[Any]) -> None:
        _, passes = _backward(events, [3] * k)
        cases.raise_first(f"{text}; backward passes of each device: {passes}", misdivided(events))
        if not waits(events):
            _check_work(text, events, k, sizes, len(steps))
        cases.check_copies(text, events)

    def mistakes(mine: Trial, right: Trial) -> dict[str, bool]:
        return _stages(mine, right) if mine.notes else {**misdivided(mine.events), "one-part": False}

    return Case(text, call, {"w and b on each device after step 1": start}, check, mistakes)


def _backward(events: list[Any], sizes: Sequence[int]) -> tuple[Numbers, list[int]]:
    """For each device: the last gradients that it computed, and the number of backward passes in which it did.
    sizes: of the gradients on each device."""
    computed, passes = [np.zeros(size) for size in sizes], [0] * len(sizes)
    last = computed
    for event in events:
        if isinstance(event, Backward):
            now = values(event.gradients)
            passes = [count + bool(x.any() and (x != old).any()) for count, x, old in zip(passes, now, last)]
            computed = [x if x.any() else old for x, old in zip(now, computed)]
            last = now
    return computed, passes


def _check_work(text: str, events: list[Any], k: int, sizes: Sequence[int], steps: int) -> None:
    """Check, by what each device received and sent, that it computed the gradient of its own examples of each part."""
    n, shard = steps * sum(sizes), steps * sum(size // k for size in sizes)
    sent, received = traffic(events)
    for device in contexts(k)[1:]:
        case = f"{text}; {device} received {received[device]} numbers, and sent {sent[device]}"
        if received[device] < 2 * shard:
            raise Mistake("no-copy" if sent[device] else "idle-devices", case)
        if not sent[device]:
            raise Mistake("whole-batch" if received[device] >= 2 * n else "no-copy", case)


def _stages(mine: Trial, right: Trial) -> dict[str, bool]:
    """The stages of a step that are wrong, in order, up to a factor: an answer may divide losses instead of a sum."""
    (computed, summed), (right_computed, right_summed) = mine.notes.values(), right.notes.values()
    last = max(i for i, event in enumerate(mine.events) if isinstance(event, Backward))
    wrong = not _proportional([np.sum(computed, axis=0)], [np.sum(right_computed, axis=0)])
    equal = len(computed) > 1 and same(computed, computed[:1] * len(computed))
    return {
        "allreduce-in-loop": any(copy.source.device_id for copy in copies(mine.events[:last])),
        "same-shard": equal and wrong,
        "whole-batch": equal,
        "idle-devices": not all(map(np.any, computed)),
        "wrong-gradients": wrong,
        "wrong-sum": not same(summed, computed) and not _proportional(summed, right_summed),
    }


def _proportional(found: Numbers, right: Numbers) -> bool:
    sizes = [max(float(np.linalg.norm(arrays)), 1e-9) for arrays in (found, right)]
    return same([x / sizes[0] for x in found], [x / sizes[1] for x in right])


@inputs((61, 3, 0.1), (60, 2, 0.25), (10, 4, 0.5), (7, 1, 0.1))
def step(n: int, k: int, lr: float) -> Case:
    X, y = map(nd.array, cases.linear(n))
    text = f"a step of {n} examples on {k} {plural(k, 'device')} with lr {lr}, from w = [1 -2], b = [0.5]"
    return _linear_model(text, k, [n], [lambda function, params: function(X.copy(), y.copy(), params, contexts(k), lr)])


@inputs((2, 0.1, (7, 4, 2)), (3, 0.25, (9, 6, 11, 3, 8)), (4, 0.1, (6, 9)), (1, 0.5, (5,)))
def accumulate(k: int, lr: float, sizes: tuple[int, ...]) -> Case:
    def train(seed: int, function: Function, params: list[list[NDArray]]) -> None:
        parts = [cases.linear(size, seed=seed * size) for size in sizes]
        function([(nd.array(X), nd.array(y)) for X, y in parts], params, contexts(k), lr)

    text = f"parts of {', '.join(map(str, sizes))} examples, {k} {plural(k, 'device')}, lr {lr}"
    return _linear_model(text, k, sizes, [partial(train, 1), partial(train, 2)], grad_req="add")


@inputs((2, (6, 5)), (3, (7, 2, 2)), (4, (9, 3)), (1, (3, 4)))
def predict(k: int, shape: tuple[int, ...]) -> Case:
    n, classes, ctx = shape[0], int(np.prod(shape[1:])), contexts(k)
    X = np.random.RandomState(n).permutation(n * classes).reshape(shape)
    text = f"a batch of shape {shape}, {classes} classes, {k} {plural(k, 'device')}"

    def call(function: Function) -> Trial:
        def net(shard: NDArray) -> NDArray:
            events.append(Call(shard.context, len(shard)))
            return shard.reshape((len(shard), -1)) * 2

        with recording() as events:
            found = cases.array(function(nd.array(X), net, [*ctx]))
        cases.check_shapes(text, [found], (n,))
        if found.context != ctx[0]:
            raise Mistake("wrong-device", f"{text}; the classes are on {found.context}, expected {ctx[0]}")
        return Trial({"": values([found])}, events)

    def misdivided(events: list[Any]) -> dict[str, bool]:
        """Mistakes in how the work was divided among the devices."""
        calls = [event for event in events if isinstance(event, Call)]
        computed = sum(event.size for event in calls)
        idle = {event.context for event in calls} != set(ctx)
        return {"idle-devices": idle, "whole-batch": computed > n, "drops-examples": computed < n}

    def check(events: list[Any]) -> None:
        calls = {i: event for i, event in enumerate(events) if isinstance(event, Call)}
        done = ", ".join(f"{size} on {context}" for context, size in calls.values())
        done = f"{text}; net computed {done or 'nothing'}"
        cases.raise_first(done, misdivided(events))
        if waits(events[min(calls) : max(calls)]):
            raise Mistake("takes-turns", done)
        elsewhere = sum(event.size for event in calls.values() if event.context != ctx[0])  # examples
        cases.check_copies(done, events, elsewhere * (classes + 1), allow_numpy=True)  # numbers there, classes back

    return Case(text, call, {}, check, lambda mine, right: misdivided(mine.events))


def _numbers(net: gluon.Block, pattern: str, ctx: Sequence[Any]) -> Numbers:
    """For each device, all elements of its parameters."""
    return values([[p.data(c) for p in net.collect_params(pattern).values()] for c in ctx])


def _check_arrays(text: str, events: list[Any]) -> None:
    if cases.REPLACED in events:
        raise Mistake("not-in-place", f"{text}; the values are right, but in new arrays")


@inputs((3, 1.5), (3, 0.6), (2, 1), (4, 2))
def replicas(k: int, limit: float) -> Case:
    ctx = contexts(k)
    net = nn.HybridSequential()
    net.add(nn.Dense(2, in_units=3), nn.Dense(1, in_units=2))
    net.initialize(ctx=ctx)
    start: list[Any] = [[[-2.5, 2, 0.5], [-0.75, -1.75, 0.25]], [1.75, -0.25], [[-3, 0.75]], [2.25]]
    parameters = list(net.collect_params().values())

    def call(function: Function) -> Trial:
        for parameter, value in zip(parameters, start):
            parameter.set_data(nd.array(value))
            for gradient in parameter.list_grad() if parameter.grad_req != "null" else ():
                gradient[:] = 2 * limit
        arrays = [array for parameter in parameters for array in parameter.list_data()]
        function(net, limit)
        now = [array for parameter in parameters for array in parameter.list_data()]
        results = {"": _numbers(net, ".*", ctx), "the gradients": values(parameters[0].list_grad())}
        return Trial(results, cases.replaced([arrays], [now]))

    before = [np.concatenate([np.ravel(value) for value in start])] * k
    text = f"limit {limit}, {k} devices, each with arrays of the shapes (2, 3), (2,), (1, 2), (1,): {shown(before[:1])}"
    return Case(text, call, {"": before}, lambda events: _check_arrays(text, events))


@inputs((3, (2, 3)), (2, (3, 1)), (4, (2, 2)))
def stats(k: int, channels: tuple[int, int]) -> Case:
    ctx, running, trained = contexts(k), ".*running.*", ".*(gamma|beta)"
    net = nn.HybridSequential()
    net.add(*[nn.BatchNorm(in_channels=count) for count in channels])
    net.initialize(ctx=ctx)

    def reset() -> None:
        random = np.random.RandomState(0)
        for parameter in net.collect_params(running).values():
            for replica in parameter.list_data():
                replica[:] = nd.array(12 * random.randint(1, 30, replica.shape))
        for i, c in enumerate(ctx):  # real replicas are equal, so a mean over them would change nothing
            for parameter in net.collect_params(trained).values():
                parameter.data(c)[:] = i

    reset()
    before = {"": _numbers(net, running, ctx), "gamma and beta": _numbers(net, trained, ctx)}
    layers = f"{channels[0]} channels, then of {channels[1]}"
    text = f"{k} devices, each with means and variances of {layers}:\n{shown(before[''])}"

    def call(function: Function) -> Trial:
        reset()
        with recording() as events:
            function(net)
        return Trial({"": _numbers(net, running, ctx), "gamma and beta": _numbers(net, trained, ctx)}, events)

    def check(events: list[Any]) -> None:
        cases.check_copies(text, events, 2 * (k - 1) * before[""][0].size, allow_numpy=True)

    return Case(text, call, before, check)


class Devices:
    """Devices with a simulated clock. Queueing advances the clock by QUEUE; waiting advances it to the time when the
    work is done. seconds: how long each device works. busy: the device with earlier work."""

    def __init__(self, seconds: list[int], busy: int) -> None:
        self.seconds, self.ctx, self.now = seconds, contexts(len(seconds)), CLOCK
        self.done = [CLOCK + EARLIER * (i == busy) for i in range(len(seconds))]
        self.reads = self.calls = 0

    def clock(self) -> int:
        self.reads += 1
        return self.now

    def work(self) -> list[NDArray]:
        self.now += QUEUE
        self.calls += 1
        self.done = [max(done, self.now) + seconds for done, seconds in zip(self.done, self.seconds)]
        return [nd.zeros(1, ctx=c) for c in self.ctx]

    def on_wait(self, array: NDArray | None) -> None:
        """Wait for all work, or for an array. No array that exists before the call of work() depends on any work."""
        waited = [done for done, c in zip(self.done, self.ctx) if array is None or (self.calls and array.context == c)]
        self.now = max([self.now, *waited])


@inputs(([10, 30], 0), ([30, 10], 0), ([20, 40, 30], 2), ([5], 0))
def timing(seconds: list[int], busy: int) -> Case:
    text = (
        f"work that takes {' s, '.join(map(str, seconds))} s on {len(seconds)} {plural(len(seconds), 'device')}, and "
        f"{QUEUE} s to queue; device {busy} is still busy for {EARLIER} s; seconds:"
    )

    def call(function: Function) -> Trial:
        devices = Devices(seconds, busy)
        with recording(devices.on_wait):
            found = cases.number(function(devices.work, devices.clock))
        if devices.calls != 1:
            raise Mistake("calls-work-again", f"{text} {found:g}; work() was called {devices.calls} times")
        if devices.reads < 2 and found != devices.now:
            raise Mistake("no-clock", f"{text} {found:g}; expected {QUEUE + max(seconds)}")
        return Trial({"": [np.array([found])]}, [])

    return Case(text, call)


@inputs([(2,), (2,), (2,)], [(1, 3), (2,), (2, 2), (1,)])
def overlap(*shapes: tuple[int, ...]) -> Case:
    _, device, host = contexts(3)  # host is not mx.cpu(), the default

    def call(function: Function) -> Trial:
        parts = [nd.full(shape, 2**i, ctx=device) for i, shape in enumerate(shapes)]

        def compute(part: NDArray) -> NDArray:
            events.append("compute" if part.context == device else f"compute on {part.context}")
            return part * 10

        with recording() as events:
            results = function([*parts], compute, host)
        results = cases.listed(results)
        done = [{Copy: "copy", Wait: "wait"}.get(type(event), event) for event in events]
        text = f"{len(parts)} parts; what the function did: {', '.join(done) or 'nothing'}"
        while done[:1] == ["wait"]:  # does not delay anything
            done.pop(0)
        first_wait = done.index("wait") if "wait" in done else len(done)
        mistakes = {
            "wrong-device": any(name.startswith("compute on") for name in done),
            "missing-parts": done.count("compute") < len(parts),
            "computes-twice": done.count("compute") > len(parts),
            "copies-parts": done[:1] == ["copy"],
            "waits-in-loop": "compute" in done[first_wait:],
            "waits-before-copies": "copy" in done[first_wait:],
            "copies-missing": done.count("copy") < len(parts) or {result.context for result in results} != {host},
            "returns-early": first_wait == len(done),
        }
        cases.raise_first(text, mistakes)
        return Trial({"": values(results)}, events)

    def check(events: list[Any]) -> None:
        waited = [event.array for event in events if isinstance(event, Wait)]
        if any(array is None for array in waited):
            return
        on_host = {
            int(x)
            for array in waited
            if array is not None and array.context == host
            for x in array.asnumpy().ravel() / 10
        }
        missing = [i + 1 for i in range(len(shapes)) if not any(x & 2**i for x in on_host)]  # sums of powers of 2
        if missing:
            raise Mistake("waits-for-some", f"{len(shapes)} parts; did not wait for the copies of the parts {missing}")

    return Case(f"{len(shapes)} parts", call, {}, check)


@inputs((2, 2, 5, 2, 3), (3, 1, 7, 2, 2), (1, 3, 4, 2, 5), (2, 3, 6, 3, 6))
def hybrid(rows: int, columns: int, n: int, d: int, h: int) -> Case:
    random = np.random.RandomState(rows + columns)
    X, y = random.randint(-1, 4, (n, d)).astype(float), random.randint(-4, 5, n).astype(float)
    s, W, v = (random.randint(1, 4, shape).astype(float) for shape in ((d,), (h, d), (h,)))
    parts = [[s, *part, np.array([0.5])] for part in zip(np.array_split(W, columns), np.array_split(v, columns))]
    text = f"{rows} x {columns} devices, {n} examples, {h} hidden values"
    names = [f"{name} on each device" for name in "sWvb"]

    def call(function: Function) -> Trial:
        devices = iter(contexts(rows * columns))
        mesh = [[[nd.array(p, ctx=c) for p in part] for part, c in zip(parts, devices)] for _ in range(rows)]
        on_devices = [params for row in mesh for params in row]
        for p in (p for params in on_devices for p in params):
            p.attach_grad()
        given = [[[*params] for params in row] for row in mesh]
        with recording(params=[[W, v] for _, W, v, _ in on_devices]) as events:
            function(nd.array(X), nd.array(y), given, 0.1)
        now = [params for row in given for params in row]
        results = {name: values(arrays) for name, arrays in zip(names, zip(*on_devices))}
        return Trial(results, [*events, *cases.replaced(on_devices, now)])

    def check_groups(what: str, number: int, of: Callable[[int], int], needed: int, events: list[Any]) -> None:
        """Check that each row, or each column, sent and received at least `needed` elements."""
        ctx = contexts(number)
        grouped = [Copy(ctx[of(c.source.device_id)], ctx[of(c.target.device_id)], c.size) for c in copies(events)]
        sent, received = traffic([copy for copy in grouped if copy.source != copy.target])
        for i, c in enumerate(ctx if number > 1 else []):
            if min(sent[c], received[c]) < needed:
                counts = f"received {received[c]} elements from other {what}s, and sent {sent[c]}; each needs {needed}"
                raise Mistake("no-copy", f"{text}; {what} {i} {counts}")

    def check(events: list[Any]) -> None:
        computed, _ = _backward(events, [W.size + v.size for _, W, v, _ in parts] * rows)
        row_grads = [np.concatenate(computed[i : i + columns]) for i in range(0, rows * columns, columns)]
        mistakes = {
            "idle-devices": np.any(row_grads) and not all(map(np.any, row_grads)),
            "same-shard": rows > 1 and np.any(row_grads) and same(row_grads, row_grads[:1] * rows),
        }
        cases.raise_first(f"{text}; gradients of W and v in each row after backward:\n{shown(row_grads)}", mistakes)
        cases.check_copies(text, events, needed=1)
        check_groups("row", rows, lambda device: device // columns, W.size + v.size + d + 1, events)
        check_groups("column", columns, lambda device: device % columns, n + d, events)  # outputs, and gradients of s

    start = {name: [p.ravel() for p in arrays] * rows for name, arrays in zip(names, zip(*parts))}
    return Case(text, call, start, check)
