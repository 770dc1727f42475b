"""Answers to the exercises for test_exercises.py. Each is code that follows our solution and replaces its function.

WRONG: {exercise: {mistake: answers that have it}}. RIGHT: {exercise: correct answers that differ from our solution}.
"""

import textwrap


def answers(*texts):
    return [textwrap.dedent(text) for text in texts]


WRONG = {
    "split": {
        "drops-examples": answers(
            """
            def split_and_load(data, ctx):
                m = len(data) // len(ctx)
                return [data[i * m : (i + 1) * m].as_in_context(c) for i, c in enumerate(ctx)]
            """
        ),
        "wrong-result": answers(
            """
            def split_and_load(data, ctx):  # the last shard is filled up, so that all shards have the same size
                n, k = len(data), len(ctx)
                m = -(-n // k)
                starts = [min(i * m, n - m) for i in range(k)]
                return [data[start : start + m].as_in_context(c) for start, c in zip(starts, ctx)]
            """
        ),
        "wrong-device": answers(
            """
            def split_and_load(data, ctx):
                n, k = len(data), len(ctx)
                return [data[n * i // k : n * (i + 1) // k] for i in range(k)]
            """,
            """
            def split_and_load(data, ctx):
                n, k = len(data), len(ctx)
                return [data[n * i // k : n * (i + 1) // k].as_in_context(ctx[0]) for i in range(k)]
            """,
        ),
        "unbalanced": answers(
            """
            def split_and_load(data, ctx):  # the last device takes the rest
                n, k = len(data), len(ctx)
                bounds = [n // k * i for i in range(k)] + [n]
                return [data[a:b].as_in_context(c) for a, b, c in zip(bounds, bounds[1:], ctx)]
            """
        ),
        "wrong-type": answers(
            """
            def split_and_load(data, ctx):
                for i, c in enumerate(ctx):
                    data[i::len(ctx)].as_in_context(c)
            """
        ),
        "error": answers(
            """
            def split_and_load(data, ctx):
                n, k = len(data), len(ctx)
                m = n // k
                assert m * k == n
                return [data[i * m : (i + 1) * m].as_in_context(ctx[i]) for i in range(k)]
            """,
            """
            def split_and_load(data, ctx):
                return data.split(len(ctx)
            """,
        ),
        "unfinished": answers(
            """
            def split_and_load(data, ctx):
                raise NotImplementedError
            """
        ),
        "missing": answers("del split_and_load"),
    },
    "allreduce": {
        "not-in-place": answers(
            """
            def allreduce(data):
                total = data[0]
                for array in data[1:]:
                    total = total + array.as_in_context(total.context)
                for array in data:
                    array = total.as_in_context(array.context)
            """,
            """
            def allreduce(data):
                total = sum(array.as_in_context(data[0].context) for array in data)
                for i in range(len(data)):
                    data[i] = total.as_in_context(data[i].context)
            """,
            """
            def allreduce(data):
                total = sum(array.as_in_context(data[0].context) for array in data)
                return [total.as_in_context(array.context) for array in data]
            """,
        ),
        "no-broadcast": answers(
            """
            def allreduce(data):
                for i in range(1, len(data)):
                    data[0][:] += data[i].copyto(data[0].context)
            """,
            """
            def allreduce(data):
                for i in range(1, len(data)):
                    data[0][:] += data[i].copyto(data[0].context)
                for i in range(1, len(data)):
                    data[0].copyto(data[i].context)
            """,
        ),
        "early-broadcast": answers(
            """
            def allreduce(data):
                for i in range(1, len(data)):
                    data[0][:] += data[i].copyto(data[0].context)
                    data[0].copyto(data[i])
            """
        ),
        "sums-twice": answers(
            """
            def allreduce(data):
                for i in range(len(data)):
                    data[0][:] += data[i].copyto(data[0].context)
                for i in range(1, len(data)):
                    data[0].copyto(data[i])
            """,
            """
            def allreduce(data):
                for i in range(len(data)):
                    for j in range(len(data)):
                        if i != j:
                            data[i][:] += data[j].copyto(data[i].context)
            """,
        ),
        "mean": answers(
            """
            def allreduce(data):
                for array in data[1:]:
                    data[0][:] += array.copyto(data[0].context)
                data[0][:] /= len(data)
                for array in data[1:]:
                    data[0].copyto(array)
            """
        ),
        "through-host": answers(
            """
            def allreduce(data):
                total = sum(array.asnumpy() for array in data)
                for array in data:
                    array[:] = total
            """
        ),
        "no-copy": answers(
            """
            def allreduce(data):
                for array in data[1:]:
                    data[0][:] += array
                for array in data[1:]:
                    data[0].copyto(array)
            """
        ),
    },
    "step": {
        "not-in-place": answers(
            """
            def train_batch(X, y, device_params, ctx, lr):
                shards = zip(split_and_load(X, ctx), split_and_load(y, ctx), device_params)
                with autograd.record():
                    losses = [loss(*shard) for shard in shards]
                autograd.backward(losses)
                for grads in zip(*([p.grad for p in params] for params in device_params)):
                    allreduce(grads)
                for params in device_params:
                    for i, p in enumerate(params):
                        params[i] = p - lr * p.grad / len(X)
            """
        ),
        "shard-size": answers(
            """
            def train_batch(X, y, device_params, ctx, lr):
                Xs, ys = split_and_load(X, ctx), split_and_load(y, ctx)
                with autograd.record():
                    losses = [loss(*shard) for shard in zip(Xs, ys, device_params)]
                autograd.backward(losses)
                for grads in zip(*([p.grad for p in params] for params in device_params)):
                    allreduce(grads)
                for params, shard in zip(device_params, Xs):
                    sgd(params, lr, len(shard))
            """,
            """
            def train_batch(X, y, device_params, ctx, lr):
                Xs, ys = split_and_load(X, ctx), split_and_load(y, ctx)
                with autograd.record():
                    losses = [loss(*shard).mean() for shard in zip(Xs, ys, device_params)]
                autograd.backward(losses)
                for grads in zip(*([p.grad for p in params] for params in device_params)):
                    allreduce(grads)
                for params in device_params:
                    sgd(params, lr, 1)
            """,
        ),
        "mean-of-means": answers(
            """
            def train_batch(X, y, device_params, ctx, lr):
                shards = zip(split_and_load(X, ctx), split_and_load(y, ctx), device_params)
                with autograd.record():
                    losses = [loss(*shard).mean() for shard in shards]
                autograd.backward(losses)
                for grads in zip(*([p.grad for p in params] for params in device_params)):
                    allreduce(grads)
                for params in device_params:
                    sgd(params, lr, len(ctx))
            """
        ),
        "no-division": answers(
            """
            def train_batch(X, y, device_params, ctx, lr):
                shards = zip(split_and_load(X, ctx), split_and_load(y, ctx), device_params)
                with autograd.record():
                    losses = [loss(*shard) for shard in shards]
                autograd.backward(losses)
                for grads in zip(*([p.grad for p in params] for params in device_params)):
                    allreduce(grads)
                for params in device_params:
                    for p in params:
                        p[:] -= lr * p.grad
            """
        ),
        "idle-devices": answers(
            """
            def train_batch(X, y, device_params, ctx, lr):
                with autograd.record():
                    losses = loss(X, y, device_params[0])
                losses.backward()
                sgd(device_params[0], lr, len(X))
                for params in device_params[1:]:
                    device_params[0][0].copyto(params[0])
            """
        ),
        "one-replica": answers(
            """
            def train_batch(X, y, device_params, ctx, lr):
                shards = zip(split_and_load(X, ctx), split_and_load(y, ctx), device_params)
                with autograd.record():
                    losses = [loss(*shard) for shard in shards]
                autograd.backward(losses)
                for grads in zip(*([p.grad for p in params] for params in device_params)):
                    allreduce(grads)
                sgd(device_params[0], lr, len(X))
            """
        ),
        "no-allreduce": answers(
            """
            def train_batch(X, y, device_params, ctx, lr):
                shards = zip(split_and_load(X, ctx), split_and_load(y, ctx), device_params)
                with autograd.record():
                    losses = [loss(*shard) for shard in shards]
                autograd.backward(losses)
                for params in device_params:
                    sgd(params, lr, len(X))
            """,
            """
            def train_batch(X, y, device_params, ctx, lr):
                for X_shard, y_shard, params in zip(split_and_load(X, ctx), split_and_load(y, ctx), device_params):
                    with autograd.record():
                        shard_loss = loss(X_shard, y_shard, params)
                    shard_loss.backward()
                    sgd(params, lr, len(X_shard))
            """,
        ),
        "sums-twice": answers(
            """
            def train_batch(X, y, device_params, ctx, lr):
                shards = zip(split_and_load(X, ctx), split_and_load(y, ctx), device_params)
                with autograd.record():
                    losses = [loss(*shard) for shard in shards]
                for shard_loss in losses:
                    shard_loss.backward()
                for params in device_params:
                    for grads in zip(*([p.grad for p in params] for params in device_params)):
                        allreduce(grads)
                    sgd(params, lr, len(X))
            """,
            """
            def train_batch(X, y, device_params, ctx, lr):
                shards = zip(split_and_load(X, ctx), split_and_load(y, ctx), device_params)
                with autograd.record():
                    losses = [loss(*shard) for shard in shards]
                autograd.backward(losses)
                for _ in range(2):
                    allreduce([params[0].grad for params in device_params])
                for params in device_params:
                    sgd(params, lr, len(X))
            """,
        ),
    },
    "predict": {
        "idle-devices": answers(
            """
            def predict(X, net, ctx):
                return net(X.as_in_context(ctx[0])).argmax(axis=1)
            """,
            """
            def predict(X, net, ctx):
                return nd.concat(*[net(X[i : i + 2]).argmax(axis=1) for i in range(0, len(X), 2)], dim=0)
            """,
        ),
        "whole-batch": answers(
            """
            def predict(X, net, ctx):
                return [net(X.as_in_context(c)).argmax(axis=1) for c in ctx][0]
            """
        ),
        "wrong-order": answers(
            """
            def predict(X, net, ctx):
                shards = [X[i :: len(ctx)].as_in_context(c) for i, c in enumerate(ctx)]
                return nd.concat(*[net(x).argmax(axis=1).as_in_context(ctx[0]) for x in shards], dim=0)
            """
        ),
        "no-copy": answers(
            """
            def predict(X, net, ctx):
                return nd.concat(*[net(x).argmax(axis=1) for x in split_and_load(X, ctx)], dim=0)
            """
        ),
        "takes-turns": answers(
            """
            def predict(X, net, ctx):
                return nd.array([c for x in split_and_load(X, ctx) for c in net(x).argmax(axis=1).asnumpy()])
            """,
            """
            def predict(X, net, ctx):
                classes = []
                for x in split_and_load(X, ctx):
                    classes.append(net(x).argmax(axis=1).as_in_context(ctx[0]))
                    nd.waitall()
                return nd.concat(*classes, dim=0)
            """,
        ),
    },
    "accumulate": {
        "sums-twice": answers(
            """
            def train_batch(parts, device_params, ctx, lr):
                for params in device_params:
                    params[0].grad[:] = 0
                for X, y in parts:
                    forward_backward(X, y, device_params, ctx)
                    allreduce([params[0].grad for params in device_params])
                for params in device_params:
                    sgd(params, lr, sum(len(X) for X, _ in parts))
            """
        ),
        "part-size": answers(
            """
            def train_batch(parts, device_params, ctx, lr):
                for params in device_params:
                    params[0].grad[:] = 0
                for X, y in parts:
                    forward_backward(X, y, device_params, ctx)
                allreduce([params[0].grad for params in device_params])
                for params in device_params:
                    sgd(params, lr, len(X))
            """
        ),
        "last-part": answers(
            """
            def train_batch(parts, device_params, ctx, lr):
                for X, y in parts:
                    for params in device_params:
                        params[0].grad[:] = 0
                    forward_backward(X, y, device_params, ctx)
                allreduce([params[0].grad for params in device_params])
                for params in device_params:
                    sgd(params, lr, sum(len(X) for X, _ in parts))
            """
        ),
        "stale-gradients": answers(
            """
            def train_batch(parts, device_params, ctx, lr):
                for X, y in parts:
                    forward_backward(X, y, device_params, ctx)
                allreduce([params[0].grad for params in device_params])
                for params in device_params:
                    sgd(params, lr, sum(len(X) for X, _ in parts))
            """
        ),
        "no-allreduce": answers(
            """
            def train_batch(parts, device_params, ctx, lr):
                for params in device_params:
                    params[0].grad[:] = 0
                for X, y in parts:
                    forward_backward(X, y, device_params, ctx)
                for params in device_params:
                    sgd(params, lr, sum(len(X) for X, _ in parts))
            """
        ),
        "step-per-part": answers(
            """
            def train_batch(parts, device_params, ctx, lr):
                for X, y in parts:
                    for params in device_params:
                        params[0].grad[:] = 0
                    forward_backward(X, y, device_params, ctx)
                    allreduce([params[0].grad for params in device_params])
                    for params in device_params:
                        sgd(params, lr, len(X))
            """
        ),
    },
    "tree": {
        "powers-of-2": answers(
            """
            def tree_allreduce(data):
                k = len(data)
                half = k // 2
                while half:
                    for i in range(half):
                        data[i][:] += data[i + half].copyto(data[i].context)
                    half //= 2
                half = 1
                while half < k:
                    for i in range(min(half, k - half)):
                        data[i].copyto(data[i + half])
                    half *= 2
            """
        ),
        "no-broadcast": answers(
            """
            def tree_allreduce(data):
                distance = 1
                while distance < len(data):
                    for i in range(0, len(data) - distance, 2 * distance):
                        data[i][:] += data[i + distance].copyto(data[i].context)
                    distance *= 2
            """
        ),
        "not-a-tree": answers(
            """
            def tree_allreduce(data):  # a star
                for array in data[1:]:
                    data[0][:] += array.copyto(data[0].context)
                for array in data[1:]:
                    data[0].copyto(array)
            """,
            """
            def tree_allreduce(data):  # a chain
                for one, other in zip(data, data[1:]):
                    other[:] += one.copyto(other.context)
                for one, other in zip(data[-2::-1], data[:0:-1]):
                    other.copyto(one)
            """,
        ),
        "not-in-place": answers(
            """
            def tree_allreduce(data):
                if len(data) > 1:
                    half = len(data) // 2
                    tree_allreduce(data[:half])
                    tree_allreduce(data[half:])
                    total = data[0] + data[half].copyto(data[0].context)
                    data[:] = [total.copyto(array.context) for array in data]
            """
        ),
        "no-copy": answers(
            """
            def tree_allreduce(data):
                distance = 1
                while distance < len(data):
                    for i in range(0, len(data) - distance, 2 * distance):
                        data[i][:] += data[i + distance]
                    distance *= 2
                for array in data[1:]:
                    data[0].copyto(array)
            """
        ),
    },
    "ring": {
        "drops-remainder": answers(
            """
            def ring_allreduce(data):
                k = len(data)
                m = len(data[0]) // k

                def chunk(device, index):
                    index %= k
                    return data[device % k][m * index : m * (index + 1)]

                for step in range(k - 1):
                    for i in range(k):
                        chunk(i + 1, i - step)[:] += chunk(i, i - step).copyto(data[(i + 1) % k].context)
                for step in range(k - 1):
                    for i in range(k):
                        chunk(i, i + 1 - step).copyto(chunk(i + 1, i + 1 - step))
            """
        ),
        "sums-twice": answers(
            """
            def ring_allreduce(data):
                k, n = len(data), len(data[0])
                for step in range(2 * k - 2):
                    for i in range(k):
                        index, to = (i - step) % k, data[(i + 1) % k]
                        part = slice(n * index // k, n * (index + 1) // k)
                        to[part][:] += data[i][part].copyto(to.context)
            """
        ),
        "no-gather": answers(
            """
            def ring_allreduce(data):
                k, n = len(data), len(data[0])
                for step in range(k - 1):
                    for i in range(k):
                        index, to = (i - step) % k, data[(i + 1) % k]
                        part = slice(n * index // k, n * (index + 1) // k)
                        to[part][:] += data[i][part].copyto(to.context)
            """
        ),
        "not-a-ring": answers(
            """
            def ring_allreduce(data):
                for array in data[1:]:
                    data[0][:] += array.copyto(data[0].context)
                for array in data[1:]:
                    data[0].copyto(array)
            """
        ),
        "whole-vectors": answers(
            """
            def ring_allreduce(data):
                k = len(data)
                moving = list(data)
                totals = [array.copy() for array in data]
                for _ in range(k - 1):
                    moving = [moving[i - 1].copyto(data[i].context) for i in range(k)]
                    for total, array in zip(totals, moving):
                        total[:] += array
                for total, array in zip(totals, data):
                    array[:] = total
            """
        ),
        "not-in-place": answers(
            """
            def ring_allreduce(data):
                total = data[0]
                for array in data[1:]:
                    total = total.copyto(array.context) + array
            """
        ),
    },
    "replicas": {
        "one-replica": answers(
            """
            def clip(net, limit):
                for parameter in net.collect_params().values():
                    parameter.data()[:] = nd.clip(parameter.data(), -limit, limit)
            """
        ),
        "not-in-place": answers(
            """
            def clip(net, limit):
                for parameter in net.collect_params().values():
                    for replica in parameter.list_data():
                        nd.clip(replica, -limit, limit)
            """,
            """
            def clip(net, limit):
                for parameter in net.collect_params().values():
                    for gradient in parameter.list_grad():
                        nd.clip(gradient, -limit, limit, out=gradient)
            """,
        ),
    },
    "stats": {
        "not-in-place": answers(
            """
            def average_running_stats(net):
                for parameter in net.collect_params(".*running.*").values():
                    mean = sum(r.as_in_context(parameter.list_ctx()[0]) for r in parameter.list_data()) / 3
                    for replica in parameter.list_data():
                        replica = mean.as_in_context(replica.context)
            """
        ),
        "one-replica": answers(
            """
            def average_running_stats(net):
                for parameter in net.collect_params(".*running.*").values():
                    replicas = parameter.list_data()
                    replicas[0][:] = sum(r.as_in_context(replicas[0].context) for r in replicas) / len(replicas)
            """
        ),
        "no-copy": answers(
            """
            def average_running_stats(net):
                for parameter in net.collect_params(".*running.*").values():
                    parameter.set_data(sum(parameter.list_data()) / len(parameter.list_data()))
            """
        ),
        "first-device": answers(
            """
            def average_running_stats(net):
                for parameter in net.collect_params(".*running.*").values():
                    parameter.set_data(parameter.data())
            """
        ),
        "sum": answers(
            """
            def average_running_stats(net):
                from gluon_mgpu.scratch import allreduce

                for parameter in net.collect_params(".*running.*").values():
                    allreduce(parameter.list_data())
            """
        ),
        "means-only": answers(
            """
            def average_running_stats(net):
                for parameter in net.collect_params(".*running_mean").values():
                    replicas = parameter.list_data()
                    parameter.set_data(sum(r.as_in_context(replicas[0].context) for r in replicas) / len(replicas))
            """
        ),
    },
    "seeds": {
        "wrong-device": answers(
            """
            def prepare(ctx, seed):
                mx.random.seed(seed)
                weight = nd.random.normal(shape=(4, 3))
                return [weight.copyto(c) for c in ctx], [nd.random.uniform(shape=100) < 0.5 for _ in ctx]
            """
        ),
        "different-weights": answers(
            """
            def prepare(ctx, seed):
                mx.random.seed(seed)
                weights = [nd.random.normal(shape=(4, 3), ctx=c) for c in ctx]
                return weights, [nd.random.uniform(shape=100, ctx=c) < 0.5 for c in ctx]
            """
        ),
        "same-masks": answers(
            """
            def prepare(ctx, seed):
                weights, masks = [], []
                for c in ctx:
                    mx.random.seed(seed, ctx=c)
                    weights.append(nd.random.normal(shape=(4, 3), ctx=c))
                    masks.append(nd.random.uniform(shape=100, ctx=c) < 0.5)
                return weights, masks
            """,
            """
            def prepare(ctx, seed):
                mx.random.seed(seed)
                weight, mask = nd.random.normal(shape=(4, 3)), nd.random.uniform(shape=100) < 0.5
                return [weight.copyto(c) for c in ctx], [mask.copyto(c) for c in ctx]
            """,
        ),
        "not-repeatable": answers(
            """
            def prepare(ctx, seed):
                weight = nd.random.normal(shape=(4, 3))
                mx.random.seed(seed)
                masks = [nd.random.uniform(shape=100, ctx=c) < 0.5 for c in ctx]
                return [weight.copyto(c) for c in ctx], masks
            """
        ),
        "ignores-seed": answers(
            """
            def prepare(ctx, seed):
                mx.random.seed(0)
                weight = nd.random.normal(shape=(4, 3))
                masks = [nd.random.uniform(shape=100, ctx=c) < 0.5 for c in ctx]
                return [weight.copyto(c) for c in ctx], masks
            """
        ),
    },
    "timing": {
        "no-clock": answers(
            """
            def measure(work, clock):
                import time

                nd.waitall()
                start = time.perf_counter()
                work()
                nd.waitall()
                return time.perf_counter() - start
            """
        ),
        "times-queue": answers(
            """
            def measure(work, clock):
                start = clock()
                work()
                return clock() - start
            """,
            """
            def measure(work, clock):
                nd.waitall()
                start = clock()
                work()
                end = clock()
                nd.waitall()
                return end - start
            """,
        ),
        "earlier-work": answers(
            """
            def measure(work, clock):
                start = clock()
                for result in work():
                    result.wait_to_read()
                return clock() - start
            """
        ),
        "waits-for-one": answers(
            """
            def measure(work, clock):
                nd.waitall()
                start = clock()
                work()[0].asnumpy()
                return clock() - start
            """,
            """
            def measure(work, clock):
                nd.waitall()
                start = clock()
                work()[-1].wait_to_read()
                return clock() - start
            """,
        ),
        "starts-late": answers(
            """
            def measure(work, clock):
                nd.waitall()
                work()
                start = clock()
                nd.waitall()
                return clock() - start
            """
        ),
    },
    "overlap": {
        "waits-in-loop": answers(
            """
            def run_and_copy(parts, compute, host):
                results = []
                for part in parts:
                    results.append(compute(part).copyto(host))
                    results[-1].wait_to_read()
                return results
            """,
            """
            def run_and_copy(parts, compute, host):
                return [nd.array(compute(part).asnumpy(), ctx=host) for part in parts]
            """,
        ),
        "waits-before-copies": answers(
            """
            def run_and_copy(parts, compute, host):
                results = [compute(part) for part in parts]
                nd.waitall()
                results = [result.copyto(host) for result in results]
                nd.waitall()
                return results
            """,
            """
            def run_and_copy(parts, compute, host):
                copies = []
                for result in [compute(part) for part in parts]:
                    copies.append(result.copyto(host))
                    copies[-1].wait_to_read()
                return copies
            """,
        ),
        "wrong-device": answers(
            """
            def run_and_copy(parts, compute, host):
                results = [compute(part.copyto(host)) for part in parts]
                nd.waitall()
                return results
            """
        ),
        "copies-missing": answers(
            """
            def run_and_copy(parts, compute, host):
                results = [compute(part) for part in parts]
                nd.waitall()
                return results
            """,
            """
            def run_and_copy(parts, compute, host):
                whole = nd.stack(*[compute(part) for part in parts]).copyto(host)
                whole.wait_to_read()
                return list(whole)
            """,
        ),
        "returns-early": answers(
            """
            def run_and_copy(parts, compute, host):
                return [compute(part).copyto(host) for part in parts]
            """
        ),
    },
    "rate": {
        "unscaled": answers(
            """
            def learning_rate(lr, batch_size, new_batch_size):
                return lr
            """
        ),
        "square-root": answers(
            """
            def learning_rate(lr, batch_size, new_batch_size):
                return lr * (new_batch_size / batch_size) ** 0.5
            """
        ),
        "wrong-result": answers(
            """
            def learning_rate(lr, batch_size, new_batch_size):
                return 2 * lr
            """
        ),
        "too-large": answers(
            """
            def learning_rate(lr, batch_size, new_batch_size):
                return lr * (new_batch_size / batch_size) ** 2
            """
        ),
    },
}

RIGHT = {
    "split": answers(
        """
        def split_and_load(data, ctx):
            return gluon.utils.split_and_load(data, ctx, even_split=False)

        from mxnet import gluon
        """,
        """
        def split_and_load(data, ctx):
            m, rest = divmod(len(data), len(ctx))
            shards, start = [], 0
            for i, c in enumerate(ctx):
                end = start + m + (i < rest)
                shards.append(data[start:end].copyto(c))
                start = end
            return shards
        """,
    ),
    "allreduce": answers(
        """
        def allreduce(data):  # every device adds copies of all arrays
            copies = [array.copy() for array in data]
            for array in data:
                array[:] = sum(copy.as_in_context(array.context) for copy in copies)
        """,
        """
        def allreduce(data):
            from mxnet import nd

            total = nd.add_n(*[array.as_in_context(data[-1].context) for array in data])
            for array in data:
                array[:] = total.as_in_context(array.context)
        """,
    ),
    "step": answers(
        """
        def train_batch(X, y, device_params, ctx, lr):  # the mean of the whole batch is taken before backward
            Xs, ys = split_and_load(X, ctx), split_and_load(y, ctx)
            with autograd.record():
                losses = [loss(*shard).sum() / len(X) for shard in zip(Xs, ys, device_params)]
            autograd.backward(losses)
            for replicas in zip(*device_params):
                total = sum(p.grad.as_in_context(ctx[0]) for p in replicas)
                for p in replicas:
                    p[:] -= lr * total.as_in_context(p.context)
        """
    ),
    "predict": answers(
        """
        def predict(X, net, ctx):
            n, k = len(X), len(ctx)
            scores = [net(X[n * i // k : n * (i + 1) // k].as_in_context(c)) for i, c in enumerate(ctx)]
            return nd.array([row.argmax() for shard in scores for row in shard.asnumpy()])
        """
    ),
    "tree": answers(
        """
        def tree_allreduce(data):  # a binary heap: the children of device i are 2 i + 1 and 2 i + 2
            for i in range(len(data) - 1, 0, -1):
                parent = data[(i - 1) // 2]
                parent[:] += data[i].copyto(parent.context)
            for i in range(1, len(data)):
                data[i][:] = data[(i - 1) // 2].copyto(data[i].context)
        """,
        """
        def tree_allreduce(data):  # a half adds its sum to the other half's
            if len(data) == 1:
                return

            def reduce(start, end):
                if end - start > 1:
                    middle = (start + end) // 2
                    reduce(start, middle)
                    reduce(middle, end)
                    data[start][:] += data[middle].as_in_context(data[start].context)

            def broadcast(start, end):
                if end - start > 1:
                    middle = (start + end) // 2
                    data[start].copyto(data[middle])
                    broadcast(start, middle)
                    broadcast(middle, end)

            reduce(0, len(data))
            broadcast(0, len(data))
        """,
    ),
    "ring": answers(
        """
        def ring_allreduce(data):  # in the other direction, with larger chunks first
            k = len(data)
            m, rest = divmod(len(data[0]), k)
            starts = [i * m + min(i, rest) for i in range(k + 1)]
            parts = [slice(a, b) for a, b in zip(starts, starts[1:])]
            for phase in ("add", "copy"):
                for step in range(k - 1):
                    for i in range(k):
                        part = parts[(i + step + (phase == "copy") * (k - 1)) % k]
                        to = data[i - 1]
                        sent = data[i][part].copyto(to.context)
                        to[part] = to[part] + sent if phase == "add" else sent
        """
    ),
    "replicas": answers(
        """
        def clip(net, limit):
            for parameter in net.collect_params().values():
                parameter.set_data(parameter.data().clip(-limit, limit))
        """
    ),
    "stats": answers(
        """
        def average_running_stats(net):
            for parameter in net.collect_params(".*running.*").values():
                mean = sum(replica.asnumpy() for replica in parameter.list_data()) / len(parameter.list_data())
                for replica in parameter.list_data():
                    replica[:] = mean
        """,
        """
        def average_running_stats(net):
            for layer in net:
                for parameter in (layer.running_mean, layer.running_var):
                    replicas = parameter.list_data()
                    parameter.set_data(sum(r.as_in_context(replicas[0].context) for r in replicas) / len(replicas))
        """,
    ),
    "seeds": answers(
        """
        def prepare(ctx, seed):
            import numpy as np

            random = np.random.RandomState(seed)
            weight = random.normal(size=(4, 3))
            masks = random.randint(2, size=(len(ctx), 100))
            return [nd.array(weight, ctx=c) for c in ctx], [nd.array(mask, ctx=c) for mask, c in zip(masks, ctx)]
        """
    ),
    "timing": answers(
        """
        def measure(work, clock):
            nd.waitall()
            start = clock()
            for result in work():
                result.wait_to_read()
            return clock() - start
        """
    ),
    "overlap": answers(
        """
        def run_and_copy(parts, compute, host):
            results = [compute(part) for part in parts]
            copies = [result.as_in_context(host) for result in results]
            for copy in copies:
                copy.wait_to_read()
            return copies
        """
    ),
}
