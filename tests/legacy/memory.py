"""`python tests/legacy/memory.py` prints the peak memory of programs with large arrays on 2 contexts: with stock MXNet,
and with `gluon-mgpu run --gpus 2` and different numbers of temporary spaces.
"""

import subprocess
import sys

from gluon_mgpu.runtime import engine

PROGRAM = """
import os, resource, sys
if "GLUON_MGPU_RUN" not in os.environ:
    from gluon_mgpu.runtime import engine
    engine.use_stock_settings()
import mxnet as mx
from mxnet import autograd, gluon, nd
ctx = [mx.cpu(0), mx.cpu(1)]
def training(net, shape):
    net.initialize(ctx=ctx)
    Xs = [nd.ones(shape, device) for device in ctx]
    def step():
        with autograd.record():
            ys = [net(X) for X in Xs]
        autograd.backward(ys)
    return step
{setup}
for _ in range({steps}):
    step()
    nd.waitall()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""
LAYERS = "gluon.nn.Conv2D(32, 3, activation='relu'), gluon.nn.BatchNorm(), gluon.nn.Conv2D(32, 3), gluon.nn.Dense(1)"
BIG = "x = [nd.ones({}, device) for device in ctx]\nstep = lambda: [{} for a in x]"
CONVOLUTIONS = f"net = gluon.nn.Sequential()\nnet.add({LAYERS})\nstep = training(net, (16, 3, 224, 224))"
JOBS = {  # {name: (steps, code that defines step)}
    "sums of arrays of 200 MB": (20, BIG.format("50_000_000", "a + a")),
    "training a dense layer of 100 MB": (10, "step = training(gluon.nn.Dense(5000), (64, 5000))"),
    "training convolutions, activations of 100 MB": (4, CONVOLUTIONS),
    "topk of arrays of 100 MB": (40, BIG.format("(25_000, 1000)", "nd.topk(a, k=3)")),
}
RUN = ["-m", "gluon_mgpu", "run", "--gpus", "2"]
COLUMNS = {"stock MXNet": ([], {"OMP_NUM_THREADS": "1"})}  # with more threads, two contexts can hang
COLUMNS |= {f"{n} spaces": (RUN, {"MXNET_CPU_TEMP_COPY": str(n)}) for n in (4, 8, 16, 64)}


def peak(steps: int, setup: str, command: list[str], settings: dict[str, str]) -> int:
    """Peak memory in MB."""
    program = PROGRAM.format(steps=steps, setup=setup)
    env = {**engine.users_environment(), **settings}
    return int(subprocess.check_output([sys.executable, *command, "-"], input=program, env=env, text=True))


if __name__ == "__main__":
    print("| peak MB |", " | ".join(COLUMNS), "|\n|" + "---|" * (1 + len(COLUMNS)))
    for name, job in JOBS.items():
        print(f"| {name} |", " | ".join(str(peak(*job, *column)) for column in COLUMNS.values()), "|", flush=True)
