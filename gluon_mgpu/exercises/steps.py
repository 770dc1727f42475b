"""The hidden cases of the exercises on training steps, Gluon and asynchronous execution; see `grading`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
from mxnet import MXNetError, gluon, nd
from mxnet.gluon import nn
from mxnet.ndarray import NDArray

from gluon_mgpu.exercises import Mistake, cases
from gluon_mgpu.exercises.cases import Backward, Copy, Function, Wait, compare, contexts, recording, shown, values

K = 3  # devices in the Gluon exercises
CLOCK, EARLIER, QUEUE = 1000, 100, 1  # for timing: time at the start, seconds of earlier work, seconds to queue


def _rows(shards: list[NDArray]) -> list[list[float]]:
    return [row for shard in shards for row in shard.asnumpy().tolist()]


def split(answer: Function) -> None:
    for n, k in ((6, 2), (7, 3), (10, 4), (3, 3)):
        data, ctx = nd.arange(2 * n).reshape((n, 2)), contexts(k)
        shards = cases.listed(answer(data, ctx))
        if len(shards) != k:
            raise Mistake("wrong-number", f"{n} examples on {k} devices: {len(shards)} shards")
        if any(shard.shape[1:] != (2,) for shard in shards):
            case = f"a batch of shape {data.shape} on {k} devices: shards of shape {[shard.shape for shard in shards]}"
            raise Mistake("wrong-shape", case)
        sizes, devices = [len(shard) for shard in shards], [shard.context for shard in shards]
        known, found = data.asnumpy().tolist(), _rows(shards)
        missing = [i for i in range(n) if known[i] not in found]
        case = f"{n} examples on {k} devices: shards of {sizes} examples on {devices}; missing: {missing or 'none'}"
        mistakes = {
            "changes-examples": any(row not in known for row in found),
            "drops-examples": missing,
            "mixed-up": devices != ctx and set(devices) == set(ctx),
            "wrong-device": devices != ctx,
            "repeats-examples": len(found) != n,
            "unbalanced": max(sizes) - min(sizes) > 1,
            "random-order": _rows(answer(data, ctx)) != found,
        }
        cases.raise_first(case, mistakes)


def step(answer: Function) -> None:
    w = np.array([1.0, -2.0])
    for n, k, lr in ((61, 3, 0.1), (60, 2, 0.25)):
        X, y = cases.linear(n)
        params = cases.on_devices([w] * k)
        for p in params:
            p.attach_grad()
        with recording(params=params) as events:
            try:
                answer(nd.array(X), nd.array(y), [[p] for p in params], contexts(k), lr)
            except MXNetError as error:
                shapes = re.search(r"shapes \[(20|21|61)\] \[(20|21|61)\]", str(error))
                cases.raise_first(f"{n} examples on {k} devices: {shapes and shapes[0]}", {"mixed-up": shapes})
                raise
        found, sums = values(params), values([p.grad for p in params])
        own, gradient, cut = cases.gradients_of(X, y, w, k), cases.gradient_of(X, y, w), n - n % k
        sizes = [len(shard) for shard in np.array_split(X, k)]
        means, zero = [g / size for g, size in zip(own, sizes)], 0 * w
        passes = [i for i, event in enumerate(events) if isinstance(event, Backward)]
        computed = [zero] * k  # by each device, before the allreduce
        for i in passes:
            computed = [new if new.any() else old for old, new in zip(computed, values(events[i].gradients))]
        by_backward, total = np.any(computed), np.sum(computed, axis=0)
        equal, averaged = cases.same(computed, computed[:1] * k), cases.same(computed, means)
        factor = total @ gradient / (gradient @ gradient)
        summed = (event for event in events[: passes[-1]] if isinstance(event, Copy)) if passes else ()
        wrong: dict[str, list[Any]] = {
            "not-in-place": [zero],
            "mean-of-means": [sum(means) / k],
            "mean-loss": [gradient / n**2] + [sum(means) / size for size in (1, n) if averaged],
            "no-division": [gradient],
            "same-shard": [g * k / n for g in own],
            "drops-examples": [cases.gradient_of(X[:cut], y[:cut], w) / size for size in (n, cut) if cut < n],
            "shard-size": [[gradient / size for size in sizes], gradient / cut * k, gradient / sizes[0] / k],
            "scaled-rate": [gradient / n * k],
            "no-allreduce": [[g / size for g in own] for size in (n, n // k, 1)] + [means],
            "one-shard": [g / n for g in own],
            "sums-parameters": [g / n - (k - 1) * w / lr for g in (gradient, np.array(own))]
            + ([gradient / n / k] if by_backward and cases.same(sums, computed) else []),  # averaged
        }
        results = {name: [w - lr * np.array(g) for g in gs] for name, gs in wrong.items()}
        mistakes: dict[str, Any] = {
            "allreduce-in-loop": any(copy.source != params[0].context for copy in summed),
            "whole-batch": by_backward
            and equal
            and any(cases.same(computed[:1], [gradient / size]) for size in (1, n)),
            "same-shard": (by_backward and equal) or results["same-shard"],
            "idle-devices": by_backward and not all(map(np.any, computed)),
            "one-replica": cases.same(found[1:], [w] * (k - 1)) and not cases.same(found[:1], [w]),
            "no-backward": not passes and cases.same(found, [w] * k),
            "gradients-reset": by_backward and not np.any(sums) and cases.same(found, [w] * k),
            "sums-twice": any(np.allclose(x, gradient * k**i, rtol=1e-4) for x in sums for i in range(1, k + 1)),
            **{name: arrays for name, arrays in results.items() if name != "same-shard"},
            "wrong-sum": not (averaged or cases.same(sums, computed) or cases.same(sums, [total] * k)),
            "wrong-gradients": by_backward and not averaged and not cases.same([total], [factor * gradient]),
        }
        case = f"a step of {n} examples on {k} devices with lr {lr}, from w = {shown([w])}"
        if by_backward:
            case = f"{case}\ngradients after backward:  {shown(computed)}\ngradients after the step:  {shown(sums)}"
        compare(f"{case}\nw on each device:", found, w - lr * gradient / n, mistakes, [w] * k)
        cases.raise_first(case, {name: mistakes[name] for name in ("whole-batch", "idle-devices")})
        if not any(isinstance(event, Wait) for event in events):
            _check_work(case, events, k, [n])
        cases.only_queues(case, events)


def _check_work(case: str, events: list[Any], k: int, sizes: Sequence[int]) -> None:
    """Check, by what each device received and sent, that it computed the gradient of its own examples of each batch."""
    n, shard = sum(sizes), 2 * sum(size // k for size in sizes)
    sent, received = cases.traffic(events)
    for device in contexts(k)[1:]:
        case = f"{case}; {device} received {received[device]} numbers, and sent {sent[device]}"
        if received[device] < shard:
            raise Mistake("no-copy" if sent[device] else "idle-devices", case)
        if not sent[device]:
            raise Mistake("whole-batch" if received[device] >= 2 * n else "no-copy", case)


def accumulate(answer: Function) -> None:
    for k, lr, sizes in ((2, 0.1, (7, 4, 2)), (3, 0.25, (9, 6, 11, 3, 8))):
        w, earlier = np.array([1.0, -2.0]), np.zeros(2)
        n = sum(sizes)
        params = cases.on_devices([w] * k)
        for p in params:
            p.attach_grad("add")
        for round in (1, 2):
            parts = [cases.linear(size, seed=round * size) for size in sizes]
            computed = values([p.grad for p in params])
            with recording(params=params) as events:
                answer([(nd.array(X), nd.array(y)) for X, y in parts], [[p] for p in params], contexts(k), lr)
            shares = np.zeros(k, int)  # for each device, the number of backward passes in which it computed a gradient
            for event in events:
                if isinstance(event, Backward):
                    before, computed = computed, values(event.gradients)
                    shares += [new.any() and (new != old).any() for new, old in zip(computed, before)]
            few = 0 < max(shares) and min(shares) < len(sizes)
            idle = few and min(shares) < max(shares)
            whole = any(shares) and cases.same(computed, computed[:1] * k)
            first, *_, last = gradients = [cases.gradient_of(X, y, w) for X, y in parts]
            gradient = np.sum(gradients, axis=0)
            own = np.sum([cases.gradients_of(X, y, w, k) for X, y in parts], axis=0)
            wrong_sizes = (*sizes, sizes[0] * len(sizes), sizes[-1] * k, n // k, n - sizes[-1])
            wrong: dict[str, list[Any]] = {
                "not-in-place": [0 * w],
                "one-replica": [[gradient / n, *[0 * w] * (k - 1)]],
                "no-division": [gradient],
                "mean": [gradient / n / k],
                "sums-twice": [sum(g * k**i for i, g in enumerate(gradients[::-1])) / n, k * gradient / n],
                "part-size": [gradient / size for size in wrong_sizes],
                "missing-parts": [
                    g / size
                    for g in (last, first, gradient - first, gradient - last)
                    for size in (n, sizes[-1], n - sizes[-1])
                ],
                "sums-parameters": [g / n - (k - 1) * w / lr for g in (gradient, k * gradient, own)],
                "number-of-parts": [gradient / size / len(sizes) for size in (1, n)],
                "mean-of-means": [sum(g / size for g, size in zip(gradients, sizes)) / len(sizes)],
                "stale-gradients": [(gradient + i * earlier) / n for i in range(1, k + 1)],
                "no-allreduce": [own / n],
                "one-shard": [g / n for g in own],
            }
            mistakes: dict[str, Any] = {name: [w - lr * np.array(g) for g in gs] for name, gs in wrong.items()}
            mistakes = {"whole-batch": whole, **mistakes, "step-per-part": [], "idle-devices": idle}
            for divisors, again in product((sizes, [n] * len(sizes)), (0, k)):  # again: sums are kept, and summed again
                p, total = w, 0 * w
                for (X, y), size in zip(parts, divisors):
                    total = again * total + cases.gradient_of(X, y, p)
                    p = p - lr * total / size
                mistakes["step-per-part"].append(p)
            right = w - lr * gradient / n
            case = f"step {round}, parts of {', '.join(map(str, sizes))} examples, {k} devices, lr {lr}"
            compare(f"{case}; w on each device:", values(params), right, mistakes, [w] * k)
            case = f"{case}; backward passes of each device: {shares}"
            cases.raise_first(case, {"whole-batch": whole, "idle-devices": idle, "one-part": few})
            if not any(isinstance(event, Wait) for event in events):
                _check_work(case, events, k, sizes)
            cases.only_queues(case, events)
            w, earlier = right, gradient


def predict(answer: Function) -> None:
    for n, k in ((6, 2), (7, 3)):
        scores, ctx = np.random.RandomState(n).permutation(n * 5).reshape(n, 5), contexts(k)
        with recording() as events:

            def net(X: NDArray, *, events: list[Any] = events) -> NDArray:
                events.append(X)
                return X * 2

            classes = answer(nd.array(scores), net, ctx)
        calls = [i for i, event in enumerate(events) if isinstance(event, NDArray)]
        shards = [events[i] for i in calls]
        done = ", ".join(f"{len(X)} on {X.context}" for X in shards)
        case = f"{n} examples on {k} devices; net computed {done or 'nothing'}"
        computed = sum(map(len, shards))
        mistakes = {
            "idle-devices": {X.context for X in shards} != set(ctx),
            "whole-batch": computed > n,
            "drops-examples": computed < n,
        }
        cases.raise_first(case, mistakes)
        found, right = values([cases.array(classes)]), scores.argmax(axis=1).astype(float)
        in_order = Counter(found[0]) == Counter(right)
        compare(case, found, right, {"scores": [2.0 * scores.max(axis=1)], "wrong-order": in_order})
        cases.listed([classes], shape=(n,))
        if classes.context != ctx[0]:
            raise Mistake("wrong-device", f"{case}; the classes are on {classes.context}, expected {ctx[0]}")
        if any(isinstance(event, Wait) for event in events[calls[0] : calls[-1]]):
            raise Mistake("takes-turns", case)
        elsewhere = sum(len(X) for X in shards if X.context != ctx[0])  # examples
        cases.copies(case, events, elsewhere * (5 + 1), allow_numpy=True)  # copy 5 numbers there, and a class back


def _numbers(net: gluon.Block, pattern: str = ".*") -> cases.Numbers:
    """For each device, all elements of its parameters."""
    return values([[p.data(c) for p in net.collect_params(pattern).values()] for c in contexts(K)])


def replicas(answer: Function) -> None:
    for limit in (1.5, 0.6):
        net = nn.Dense(1, in_units=5)
        net.initialize(ctx=contexts(K))
        net.weight.set_data(nd.array([[-2.5, 2, 0.5, -0.75, -1.75]]))
        net.bias.set_data(nd.array([1.75]))
        for gradient in net.weight.list_grad():
            gradient[:] = 2 * limit
        before, arrays = _numbers(net), net.weight.list_data() + net.bias.list_data()
        answer(net, limit)
        x, found = before[0], np.array(_numbers(net))
        right, inside = np.clip(x, -limit, limit), abs(x) <= limit
        (low, *_, high), gradients = np.sort(found[0]), values(net.weight.list_grad())
        mistakes = {
            "one-replica": [[right, *before[1:]]],
            "changes-gradients": not np.equal(gradients, 2 * limit).all(),
            "not-in-place": [before],
            "one-limit": [np.minimum(x, limit), np.maximum(x, -limit)],
            "swapped-limits": [np.where(x > -limit, -limit, limit)],
            "other-limits": low < high and [np.clip(x, low, high)],
            "wrong-sign": (found * x < 0).any(),
            "changes-others": (found != x)[:, inside].any(),
            "zeroed": (found == 0).any(),
        }
        case = f"limit {limit}, {K} devices, each with a weight of 5 elements and a bias of 1: {shown(before[:1])}"
        compare(case, list(found), right, mistakes, before)
        if any((x != y).asnumpy().any() for x, y in zip(arrays, net.weight.list_data() + net.bias.list_data())):
            raise Mistake("not-in-place", f"{case}; the values are right, but in new arrays")


def stats(answer: Function) -> None:
    net, running = nn.HybridSequential(), ".*running.*"
    net.add(nn.BatchNorm(in_channels=2), nn.BatchNorm(in_channels=2))
    net.initialize(ctx=contexts(K))
    random = np.random.RandomState(0)
    for parameter in net.collect_params(running).values():
        for replica in parameter.list_data():
            replica[:] = nd.array(K * random.randint(1, 30, 2))
    for i, c in enumerate(contexts(K)):  # real replicas are equal, so a mean over them would change nothing
        for parameter in net.collect_params(".*(gamma|beta)").values():
            parameter.data(c)[:] = i
    others = _numbers(net, ".*(gamma|beta)")
    before = _numbers(net, running)  # means and variances of the first layer, then of the second layer
    with recording() as events:
        answer(net)
    mean, found = np.mean(before, axis=0), _numbers(net, running)
    weights = np.linalg.lstsq(np.transpose(before), found[0], rcond=None)[0]  # each device's weight in the result
    weighted = np.allclose(weights @ before, found[0], rtol=1e-3) and np.ptp(weights) > 0.01
    mistakes = {
        "not-in-place": [before],
        "one-replica": [[mean, *before[1:]]],
        "one-device": before,
        "early-write": cases.same(found[:1], [mean]),
        "sum": [mean * K],
        "over-channels": [[np.repeat(x.reshape(4, 2).mean(axis=1), 2) for x in xs] for xs in ([mean] * K, before)],
        "unequal-weights": weighted and [found[0]],
        "not-a-sum": cases.operations(before),
    }
    case = f"{K} devices, each with means and variances of 2 channels in layer 1, then in layer 2:\n{shown(before)}"
    compare(case, found, mean, mistakes, before)
    cases.copies(case, events, 2 * (K - 1) * mean.size, allow_numpy=True)
    cases.raise_first(case, {"changes-others": not cases.same(_numbers(net, ".*(gamma|beta)"), others)})


class Devices:
    """Two devices with a simulated clock. Queueing advances the clock by QUEUE; waiting advances it to the time when
    the work is done."""

    def __init__(self, seconds: tuple[int, int]) -> None:
        self.seconds, self.ctx, self.now, self.done = seconds, contexts(2), CLOCK, [CLOCK + EARLIER, 0]
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


def timing(answer: Function) -> None:
    for seconds in ((10, 30), (30, 10)):
        devices = Devices(seconds)
        with recording(devices.on_wait):
            result = answer(devices.work, devices.clock)
        found, right = cases.number(result), QUEUE + max(seconds)
        case = (
            f"work that takes {seconds[0]} s and {seconds[1]} s on two devices, and {QUEUE} s to queue; the first "
            f"device is still busy for {EARLIER} s; seconds:"
        )
        if devices.calls != 1:
            raise Mistake("calls-work-again", f"{case} {found:g}; work() was called {devices.calls} times")
        if devices.reads < 2 and found != devices.now:
            raise Mistake("no-clock", f"{case} {found:g}; expected {right}")
        mistakes = {
            "times-queue": QUEUE,
            "waits-too-early": EARLIER + QUEUE,
            "earlier-work": EARLIER + seconds[0],
            "clock-before-wait": EARLIER + right,
            "waits-for-one": QUEUE + min(seconds),
            "starts-late": max(seconds),
            "no-difference": devices.now,
        }
        results = {name: [np.array([result])] for name, result in mistakes.items()}
        compare(case, [np.array([found])], np.array([right]), results)


def overlap(answer: Function) -> None:
    _, device, host = contexts(3)  # host is not mx.cpu(), the default
    parts = [nd.full((2,), 2**i, ctx=device) for i in range(3)]
    with recording() as events:

        def compute(part: NDArray) -> NDArray:
            events.append("compute" if part.context == device else f"compute on {part.context}")
            return part * 10

        results = answer(parts, compute, host)
    results = cases.listed(results)
    done = [{Copy: "copy", Wait: "wait"}.get(type(event), event) for event in events]
    case = f"{len(parts)} parts; what the function did: {', '.join(done) or 'nothing'}"
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
    cases.raise_first(case, mistakes)
    right = values([part * 10 for part in parts])
    compare(case, values(results), right, {"one-buffer": right, "wrong-order": [right[::-1]]})
    cases.listed(results, shape=parts[0].shape)
    waits = [event.array for event in events if isinstance(event, Wait)]
    single = [array for array in waits if array is not None]
    if len(single) == len(waits):
        on_host = [x / 10 for array in single if array.context == host for x in values([array])[0]]
        missing = [i + 1 for i in range(len(parts)) if not any(int(x) & 2**i for x in on_host)]  # sums of powers of 2
        if missing:
            raise Mistake("waits-for-some", f"{case}; did not wait for the copies of the parts {missing}")
