"""Prints what a device of four allocates and sends in a step of DDP and of ZeRO-1 to ZeRO-3, in MB.

`python docs/pictures/memory.py` prints the table of docs/what-came-after.md. The network has eight layers with about
1024 x 1024 weights. "Measured" is what MXNet has allocated on the second device when the update begins.
"""

# ruff: noqa: E402

import json
import tempfile
import time
from functools import partial
from pathlib import Path

import gluon_mgpu

gluon_mgpu.configure(contexts=4)

import mxnet as mx
from mxnet import nd

from gluon_mgpu.partition import hidden, scores
from gluon_mgpu.sharded import adam, ddp, place, sgd, zero1, zero2, zero3

ctx, host = [mx.cpu(i) for i in range(4)], mx.cpu(4)
net = [(hidden, [(1024, 784), (1024,)]), *[(hidden, [(1024, 1024), (1024,)])] * 7, (scores, [(10, 1024), (10,)])]
params = [nd.random.normal(scale=0.05, shape=shape) for _, shapes in net for shape in shapes]
zeros = [nd.zeros_like(p) for p in params]
X, y = nd.random.uniform(shape=(16, 1, 28, 28), ctx=host), nd.zeros(16, ctx=host)
copyto = nd.NDArray.copyto


def new_state(stage, moments):
    return [place(net, params, ctx, stage == 3), *(place(net, zeros, ctx, stage > 0) for _ in range(moments))]


def sent(stage, step):
    """The MB that the busiest device sends in a step."""
    state, sizes = new_state(stage, 1), {}

    def counted(array, other):
        destination = other if isinstance(other, mx.Context) else other.context
        if destination != array.context != host:
            sizes[array.context] = sizes.get(array.context, 0) + 4 * array.size  # bytes of float32
        return copyto(array, other)

    nd.NDArray.copyto = counted
    step(X, y, net, state, ctx, partial(sgd, lr=0.05))
    nd.NDArray.copyto = copyto
    return max(sizes.values()) / 1e6


def allocated(stage, step, optimizer, moments):
    """The MB on the second device when the update begins, and all gradients are there."""
    begun = []
    # The profiler knows only as many devices as the machine has cores, plus 2, so the batch is on the first device.
    X0, y0 = X.copyto(ctx[0]), y.copyto(ctx[0])

    def timed(*arrays):
        if not begun:
            nd.waitall()
            begun.append(time.time() * 1e6)
        optimizer(*arrays)

    nd.waitall()
    file = Path(tempfile.mkdtemp(), "memory.json")
    off = dict.fromkeys(("profile_imperative", "profile_symbolic", "profile_api", "continuous_dump"), False)
    mx.profiler.set_config(filename=str(file), profile_memory=True, **off)
    mx.profiler.set_state("run")
    state = new_state(stage, moments)
    step(X0, y0, net, state, ctx, timed)
    del state
    nd.waitall()
    mx.profiler.set_state("stop")
    mx.profiler.dump()
    # MXNet writes an extra comma into every profile of a process except the first profile.
    text = file.read_text().replace('"traceEvents": [\n,', '"traceEvents": [', 1)
    events = json.loads(text)["traceEvents"]
    counts = [(e["ts"], e["args"][e["name"]]) for e in events if e["name"] == "Memory: cpu/1"]
    return max((ts, size) for ts, size in counts if ts < begun[0])[1] / 1e6


whole = 4 * sum(p.size for p in params) / 1e6
print("| MB | parameters | gradients | momentum: computed, measured | Adam: computed, measured | sent |")
print("|---|---|---|---|---|---|")
for stage, (name, step) in enumerate({"DDP": ddp, "ZeRO-1": zero1, "ZeRO-2": zero2, "ZeRO-3": zero3}.items()):
    weights, grads, moment = (whole / 4 if stage >= first else whole for first in (3, 2, 1))
    cells = [name, f"{weights:.1f}", f"{grads:.1f}"]
    for optimizer, moments in ((partial(sgd, lr=0.05), 1), (partial(adam, lr=0.001), 2)):
        computed = weights + grads + moments * moment
        cells.append(f"{computed:.1f}, {allocated(stage, step, optimizer, moments):.1f}")
    print("|", " | ".join([*cells, f"{sent(stage, step):.1f}"]), "|")
