"""Draws overlap.png: two contexts and their links during a step of LeNet, with and without overlap.

The links are simulated: an operator waits as long as a link of MB_PER_SECOND would take, in a thread of its own and
without using a core. `python docs/pictures/overlap.py` prints the times too.
"""

# ruff: noqa: E402

import os
import sys
import threading
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import median

import gluon_mgpu

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
os.environ["MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN"] = "1"  # otherwise, a gradient waits for later operators
gluon_mgpu.configure(contexts=3)

import mxnet as mx
from bench import timeline
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from mxnet import nd

from gluon_mgpu import scratch, sharded

MB_PER_SECOND, EXAMPLES, STEPS = 4, 512, 11
COLORS = {"forward": "#4477aa", "backward": "#ee8866", "allreduce": "#aa3377"}
INITIALIZE_GRADIENTS = ("SetValueOp", "_full", "zeros_like")
OTHERS = ("Copy", "add_n", "ElementwiseSum", "Delete", "WaitForVar", "Reorder")  # neither forward nor backward
ctx, host = [mx.cpu(0), mx.cpu(1)], mx.cpu(2)
copyto, sent = nd.NDArray.copyto, []  # sent: (device, start, end) of each chunk
links = [threading.Lock() for _ in ctx]  # each device sends one chunk at a time


class Link(mx.operator.CustomOp):
    def __init__(self, device):
        super().__init__()
        self.device = device

    def forward(self, is_train, req, in_data, out_data, aux):
        with links[self.device]:
            start = time.time()
            time.sleep(4 * in_data[0].size / (1e6 * MB_PER_SECOND))
            copyto(in_data[0], out_data[0])
            sent.append((self.device, start, time.time()))


@mx.operator.register("link")
class LinkProp(mx.operator.CustomOpProp):
    def __init__(self, device):
        super().__init__()
        self.device = int(device)

    def create_operator(self, ctx, shapes, dtypes):
        return Link(self.device)


def slow_copyto(array, other):
    to = other if isinstance(other, mx.Context) else other.context
    if array.context in (host, to):  # also true for `a[:] = b` on one device
        return copyto(array, other)
    return copyto(nd.Custom(array, op_type="link", device=array.context.device_id), other)


def without_overlap(X, y, net, weights, moments, ctx, optimizer):
    """`sharded.ddp`, except that it waits for the whole backward pass before the sums."""
    Xs, ys = scratch.split_and_load(X, ctx), scratch.split_and_load(y, ctx)
    losses, grads = sharded.forward_backward(net, weights, Xs, ys, reduce=lambda data: data)
    nd.waitall()
    for data in reversed(grads):
        sharded.ring_allreduce(data)
    sharded.update(optimizer, weights, grads, moments, X.shape[0])
    return losses


def draw(axes, start, sent, spans):
    """Draw one step, which began at `start`, in seconds. spans: its operators, from `timeline.recorded`."""
    bars = [(2 * i, begin, end, "allreduce") for i, begin, end in sent]
    for context, operator, begin, end in spans:
        phase = "backward" if "_backward_" in operator or operator in INITIALIZE_GRADIENTS else "forward"
        if context < len(ctx) and not operator.startswith(OTHERS) and not operator.endswith("_update"):
            bars.append((2 * context - 1, begin / 1e6, end / 1e6, phase))
    for lane, begin, end, phase in bars:
        bar = (1000 * (begin - start), 1000 * (end - begin))
        axes.broken_barh([bar], (lane + 0.6, 0.8), color=COLORS[phase], linewidth=0)
    axes.set_yticks(range(4), ["cpu(0)", "its link", "cpu(1)", "its link"])
    axes.invert_yaxis()


nd.NDArray.copyto = slow_copyto
mx.random.seed(1)
X, y, params = nd.random.uniform(shape=(EXAMPLES, 1, 28, 28), ctx=host), nd.zeros(EXAMPLES, host), scratch.init_params()
steps = {"sums after the backward pass": without_overlap, "sums during the backward pass": sharded.ddp}
states = [[sharded.place(sharded.LENET, arrays, ctx, False) for arrays in (params, params)] for _ in steps]
seconds, recorded = {name: [] for name in steps}, {name: [] for name in steps}
for i in range(2 * STEPS):  # the profiler records the second half
    for (name, step), (weights, velocities) in zip(steps.items(), states):
        nd.waitall()
        sent.clear()
        with timeline.recorded() if i >= STEPS else nullcontext() as spans:
            start = time.time()
            step(X, y, sharded.LENET, weights, [velocities], ctx, partial(sharded.sgd, lr=0.01))
            nd.waitall()
            elapsed = time.time() - start
        if i < STEPS:
            seconds[name].append(elapsed)
        else:
            recorded[name].append((elapsed, start, [*sent], spans))
figure = Figure(figsize=(9, 4.4), layout="constrained")
for axes, (name, runs) in zip(figure.subplots(2, sharex=True), recorded.items()):
    draw(axes, *min(runs, key=lambda run: abs(run[0] - median(seconds[name])))[1:])  # a typical one
    axes.set_title(name, loc="left", fontsize="medium")
axes.set_xlabel("ms")
labels = {"forward": "forward", "backward": "backward", "allreduce": "a chunk on the link"}
handles = [Patch(color=COLORS[phase], label=label) for phase, label in labels.items()]
figure.legend(handles=handles, loc="outside lower center", ncol=3, frameon=False)
figure.savefig(Path(__file__).with_suffix(".png"), dpi=110)
for name, times in seconds.items():
    print(f"{name}: {1000 * median(times):.0f} ms ({1000 * min(times):.0f}-{1000 * max(times):.0f})")
