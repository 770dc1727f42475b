"""Measures how much of the sums over two workers is hidden behind the backward pass, on links of a given speed.

`python tests/distributed/overlap.py --mbit 100 --mbit 1000`, as root: each worker, with a server if the kvstore has
servers, has its own network namespace. In turn, it times steps, steps without the sums, and the sums alone.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from functools import partial
from itertools import product
from pathlib import Path

sys.path += [str(Path(__file__).parents[i] / name) for i, name in ((0, ""), (1, ""), (2, ""), (2, "scripts"))]

from bench import distributed, harness

from gluon_mgpu.data import datasets
from gluon_mgpu.distributed import process, serve, workers
from gluon_mgpu.runtime import engine

STEPS = {"lenet": 20, "resnet18": 2}
CASES = [("lenet", "scratch"), ("lenet", "highlevel"), ("resnet18", "highlevel")]
PARTS = ("step", "compute", "sums")


def work(kvstore, model, impl, rounds):
    """One process of a run. Worker 0 prints {part: [milliseconds per step, of each round]} as its last line."""
    here = process.require(kvstore)
    if here.role != "worker":
        serve.serve(here)
        return
    engine.configure(1)
    size, steps = harness.BATCH_SIZE[model], STEPS[model]
    data = datasets.synthetic(steps * size, 100, seed=0)
    with workers.join(kvstore) as group:
        from mxnet import nd

        group.exchange_device_counts(1)
        replicas = harness.replicas(impl, model, 1, group)
        step = partial(replicas.train_batch, lr=harness.LR[model], batch_size=size)

        def train(members):
            replicas.workers = members
            harness.train(step, data, size, range(steps * size), group.part)

        def add():
            replicas.workers = group
            for _ in range(steps):
                replicas._sum_over_workers()
                nd.waitall()

        parts = dict(zip(PARTS, (partial(train, group), partial(train, workers.ALONE), add)))
        times = {name: [] for name in parts}
        for i in range(rounds + 1):
            for name, part in parts.items():
                group.all_gather(None)  # all workers start at the same time
                start = time.perf_counter()
                part()
                group.all_gather(None)
                if i:  # the first round is a warm-up
                    times[name].append(1000 * (time.perf_counter() - start) / steps)
    if here.rank == 0:
        print(json.dumps(times), flush=True)


def measure(mbit, kvstore, *arguments):
    """Run `work` on two machines. Returns what worker 0 prints."""
    import machines
    import test_network

    machines.SLOW_BITS = mbit * 1e6
    test_network.WORKERS = test_network.SERVERS = 2
    program = [sys.executable, __file__, kvstore, *map(str, arguments)]
    with tempfile.TemporaryDirectory() as folder:
        network = machines.Network(2, Path(folder), slow=True)
        try:
            ended = test_network.ends(test_network.start_program(network, kvstore, Path(folder), program), 600)
        finally:
            network.end()
    for _, out, _ in ended.values():
        if '{"step"' in out:
            return json.loads(out[out.index('{"step"') :].partition("\n")[0])
    sys.exit("\n".join(f"{name}: {status} {err[-2000:]}" for name, (status, _, err) in ended.items()))


if __name__ == "__main__":
    if len(sys.argv) > 1 and not sys.argv[1].startswith("-"):
        work(*sys.argv[1:4], int(sys.argv[4]))
        sys.exit()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mbit", type=int, action="append", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # the workers are pinned to different cores of this machine
    print(harness.machine_line())
    print(f"medians (min-max): ms per {', '.join(PARTS)}; step / longer part")
    for (model, impl), mbit, kvstore in product(CASES, options.mbit, distributed.installed()):
        times = measure(mbit, kvstore, model, impl, options.rounds)
        ratio = [step / max(compute, sums) for step, compute, sums in zip(*(times[part] for part in PARTS))]
        cells = [harness.spread(times[part], 1) for part in PARTS]
        print(f"{model}, {impl}, {kvstore}, {mbit} Mbit/s:", *cells, harness.spread(ratio, 2), flush=True)
