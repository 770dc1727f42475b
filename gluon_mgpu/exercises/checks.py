"""The hidden cases: one function per exercise, named after it, which raises the first Mistake that it finds."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
from mxnet import Context, gluon, nd
from mxnet.gluon import nn
from mxnet.ndarray import NDArray

from gluon_mgpu import scratch
from gluon_mgpu.exercises import Mistake
from gluon_mgpu.exercises.cases import Answer, Copy, Numbers, Wait, compare, contexts, copies, recording, shown, values

K = 3  # devices in the exercises on Gluon
EARLIER, QUEUE = 100, 1  # for timing: seconds that device 0 is busy at the start; seconds that queueing takes
N, FEATURES, CLASSES, BATCH, LR = 288, 8, 3, 16, 0.01  # for rate


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
            raise Mistake("wrong-result", f"{case}; some examples occur more than once")


def _reduce(answer: Answer, k: int, n: int) -> tuple[str, Numbers, Numbers, list[Any]]:
    """Sum vectors of n elements on k devices. Returns the case, the values before and after, and the events."""
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
        for i in range(k):  # each device adds all arrays, some of which are already sums
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
        busy: Counter[Any] = Counter()  # {device: round of its last copy}, if each takes part in one copy per round
        for copy in copies(case, events, 2 * (k - 1)):
            busy[copy.source] = busy[copy.target] = max(busy[copy.source], busy[copy.target]) + 1
        rounds, most = max(busy.values(), default=0), 4 * math.ceil(math.log2(k))
        if k == 16 and rounds > most:
            raise Mistake("not-a-tree", f"{k} devices: the copies take {rounds} rounds; {most} are enough for any tree")


def ring(answer: Answer) -> None:
    for k, n in ((2, 4), (4, 8), (3, 6), (3, 7), (4, 11)):
        case, before, found, events = _reduce(answer, k, n)
        total, cut = np.sum(before, axis=0), n - n % k
        holders = np.sum([np.isclose(x, total) for x in found], axis=0)  # per element: how many devices have its sum
        mistakes = {
            "not-in-place": [before],
            "drops-remainder": [found] if cut < n and (holders[:cut] == k).all() else [],
            "sums-twice": [found] if np.greater_equal(found, total).all() else [],  # the elements are positive
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
            case = f"{k} devices, vectors of {n} elements: {device} receives {most} elements; {enough} are enough"
            raise Mistake("whole-vectors", case)


def _linear(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A batch for a linear model: X (n, 2), y (n,)."""
    random = np.random.RandomState(seed)
    return random.normal(size=(n, 2)), random.normal(size=n)


def _gradient(X: np.ndarray, y: np.ndarray, w: np.ndarray) -> np.ndarray:
    return ((X @ w - y)[:, None] * X).sum(axis=0)


def _shards(X: np.ndarray, y: np.ndarray, w: np.ndarray, k: int) -> Numbers:
    """The gradients of k shards of nearly equal size."""
    return [_gradient(*shard, w) for shard in zip(np.array_split(X, k), np.array_split(y, k))]


def step(answer: Answer) -> None:
    k, lr, w = 3, 0.1, np.array([1.0, -2.0])
    for n in (6, 7):
        X, y = _linear(n)
        params = [nd.array(w, ctx=c) for c in contexts(k)]
        for p in params:
            p.attach_grad()
        answer(nd.array(X), nd.array(y), [[p] for p in params], contexts(k), lr)
        found, sums = values(params), values([p.grad for p in params])
        own, gradient = _shards(X, y, w, k), _gradient(X, y, w)
        right = w - lr * gradient / n
        too_often = [gradient * k**i for i in range(1, k + 1)]
        means = [g / len(shard) for g, shard in zip(own, np.array_split(X, k))]
        mistakes = {
            "sums-twice": [found] if any(np.allclose(x, g, rtol=1e-4) for x in sums for g in too_often) else [],
            "not-in-place": [[w] * k],
            "mean-of-means": [[w - lr * np.mean(means, axis=0)] * k],
            "shard-size": [[w - lr * gradient / (n // k)] * k],
            "no-division": [[w - lr * gradient] * k],
            "one-replica": [[right] + [w] * (k - 1)],
            "no-allreduce": [[w - lr * g / size for g in own] for size in (n, n // k)],
        }
        case = f"a step of {n} examples on {k} devices with lr {lr}, from w = {shown([w])}"
        compare(f"{case}; w on each device:", found, [right] * k, mistakes)
        if not all(x.any() for x in sums):
            raise Mistake("idle-devices", f"{case}; gradients on each device: {shown(sums)}")


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
        mistakes["no-allreduce"] = [[w - lr * g / n for g in np.sum([_shards(X, y, w, k) for X, y in parts], axis=0)]]
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
        found, right = [classes.asnumpy().ravel()], [scores.argmax(axis=1).astype(float)]
        compare(case, found, right, {"wrong-order": [found] if Counter(found[0]) == Counter(right[0]) else []})
        if any(isinstance(event, Wait) for event in events[calls[0] : calls[-1]]):
            raise Mistake("takes-turns", case)
        copies(case, events, 2 * (k - 1), allow_numpy=True)  # copies of shards and of classes


def _numbers(net: gluon.Block, pattern: str = ".*") -> Numbers:
    """For each device, all elements of its parameters."""
    return values([[p.data(c) for p in net.collect_params(pattern).values()] for c in contexts(K)])


def replicas(answer: Answer) -> None:
    net, limit = nn.Dense(1, in_units=2), 1.5
    net.initialize(ctx=contexts(K))
    net.weight.set_data(nd.array([[-2.5, 2]]))
    net.bias.set_data(nd.array([1.75]))
    before = _numbers(net)
    answer(net, limit)
    right = np.clip(before[0], -limit, limit)
    mistakes = {"one-replica": [[right, *before[1:]]], "not-in-place": [before]}
    case = f"limit {limit}, {K} devices, each with a weight (2 elements) and a bias (1 element): {shown(before[:1])}"
    compare(case, _numbers(net), [right] * K, mistakes)


def stats(answer: Answer) -> None:
    net, running = nn.HybridSequential(), ".*running.*"
    net.add(nn.BatchNorm(in_channels=1), nn.BatchNorm(in_channels=1))
    net.initialize(ctx=contexts(K))
    random = np.random.RandomState(0)
    for parameter in net.collect_params(running).values():
        for replica in parameter.list_data():
            replica[:] = K * random.randint(1, 30)
    before = _numbers(net, running)  # mean and variance of the first layer, then of the second layer
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
    case = f"{K} devices, each with mean and variance of layer 1, then of layer 2: {shown(before)}"
    compare(case, _numbers(net, running), [mean] * K, mistakes)
    copies(case, events, len(mean) * 2 * (K - 1), allow_numpy=True)


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


class Devices:
    """Two devices with a simulated clock. Queueing advances the clock by QUEUE; waiting advances it to the time when
    the work is done."""

    def __init__(self, seconds: tuple[int, int]) -> None:
        self.seconds, self.ctx, self.now, self.done, self.reads = seconds, contexts(2), 0, [EARLIER, 0], 0

    def clock(self) -> int:
        self.reads += 1
        return self.now

    def work(self) -> list[NDArray]:
        self.now += QUEUE
        self.done = [max(done, self.now) + seconds for done, seconds in zip(self.done, self.seconds)]
        return [nd.zeros(1, ctx=c) for c in self.ctx]

    def on_wait(self, context: Context | None) -> None:
        self.now = max([self.now, *(done for done, c in zip(self.done, self.ctx) if context in (None, c))])


def timing(answer: Answer) -> None:
    for seconds in ((10, 30), (30, 10)):
        devices = Devices(seconds)
        with recording(devices.on_wait):
            found = float(answer(devices.work, devices.clock))
        right = QUEUE + max(seconds)
        mistakes: dict[float, str] = {
            QUEUE: "times-queue",
            EARLIER + seconds[0]: "earlier-work",
            QUEUE + min(seconds): "waits-for-one",
            max(seconds): "starts-late",
        }
        case = (
            f"work that takes {seconds[0]} s and {seconds[1]} s on two devices, and {QUEUE} s to queue; the first "
            f"device is still busy for {EARLIER} s\nexpected  {right} s\nfound     {found:g} s"
        )
        if devices.reads < 2:
            raise Mistake("no-clock", case)
        if found != right:
            raise Mistake(mistakes.get(found, "wrong-result"), case)


def overlap(answer: Answer) -> None:
    host, device = contexts(2)
    parts = [nd.full((2,), i + 1, ctx=device) for i in range(3)]
    with recording() as events:

        def compute(part: NDArray) -> NDArray:
            events.append("compute" if part.context == device else f"compute on {part.context}")
            return part * 10

        results = answer(parts, compute, host)
    done = [{Copy: "copy", Wait: "wait"}.get(type(event), event) for event in events]
    case = f"{len(parts)} parts; what the function did: {', '.join(done) or 'nothing'}"
    first_wait = done.index("wait") if "wait" in done else len(done)
    if done.count("compute") < len(parts):
        raise Mistake("wrong-device", case)
    if "compute" in done[first_wait:]:
        raise Mistake("waits-in-loop", case)
    if "copy" in done[first_wait:]:
        raise Mistake("waits-before-copies", case)
    if done.count("copy") < len(parts) or {result.context for result in results} != {host}:
        raise Mistake("copies-missing", case)
    if first_wait == len(done):
        raise Mistake("returns-early", case)
    compare(case, values(results), values([part * 10 for part in parts]), {})


def _net(X: NDArray, params: list[NDArray]) -> NDArray:
    return nd.FullyConnected(X, *params, num_hidden=CLASSES)


def _loss_after_an_epoch(k: int, lr: float) -> float:
    """Train a linear classifier for an epoch on k devices, with BATCH examples per device, and return its loss."""
    random = np.random.RandomState(0)
    centers, labels = random.normal(size=(CLASSES, FEATURES)), np.arange(N) % CLASSES
    X = centers[labels] + 2 * random.normal(size=(N, FEATURES))
    X[:, 0] *= 5  # with 9 times the learning rate, steps in this direction overshoot
    X, y = nd.array(X), nd.array(labels)
    params = [nd.zeros((CLASSES, FEATURES)), nd.zeros(CLASSES)]
    replicas = [scratch.get_params(params, c) for c in contexts(k)]
    for start in range(0, N, BATCH * k):
        end = start + BATCH * k
        scratch.train_batch(X[start:end], y[start:end], replicas, contexts(k), lr, net=_net)
    return float(scratch.loss(_net(X, replicas[0]), y).mean().asscalar())


def rate(answer: Answer) -> None:
    untrained, alone = math.log(CLASSES), _loss_after_an_epoch(1, LR)
    for k in (3, 2):
        lr = float(answer(LR, BATCH, BATCH * k))
        loss = _loss_after_an_epoch(k, lr)
        if abs(loss - alone) < 0.05 * (untrained - alone):
            continue
        known = {1: "unscaled", math.sqrt(k): "square-root", k * k: "too-large"}
        names = [name for ratio, name in known.items() if math.isclose(lr, LR * ratio, rel_tol=0.01)]
        case = (
            f"loss before training: {untrained:.3f}\n"
            f"batch size {BATCH}, lr {LR}: {alone:.3f} after an epoch of {N // BATCH} steps\n"
            f"batch size {BATCH * k}, lr {lr:g}: {loss:.3f} after an epoch of {N // BATCH // k} steps"
        )
        raise Mistake(names[0] if names else "wrong-result", case)
