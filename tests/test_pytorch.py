"""The twins in docs/pytorch.md take the same steps as scratch, and a checkpoint carries over as the page shows."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from own_process import finished

from gluon_mgpu import scratch
from gluon_mgpu.runtime import engine
from gluon_mgpu.training import batches, datasets

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/pytorch.md").read_text()
TWINS = re.findall(r"^```python\n(# PyTorch\n.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
TRAIN = re.findall(r"^python (scripts/train.py .*)", PAGE, re.MULTILINE)[0].split()
CARRY_OVER = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)[-1]
needs_torch = pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="PyTorch is an extra: pytorch")


@pytest.mark.slow
@needs_torch
def test_the_twins_in_pytorch_take_the_same_steps(tmp_path):
    """From scratch on two replicas, and as two processes of DistributedDataParallel."""
    mx.random.seed(1)
    data = datasets.synthetic(101, 100, seed=1)
    start, (X, y) = scratch.init_params(0.1), next(batches.batches(data.train_images, data.train_labels, 101))
    replicas = [scratch.get_params(start, mx.cpu(i)) for i in range(2)]
    for _ in range(3):
        scratch.train_batch(X, y, replicas, [mx.cpu(0), mx.cpu(1)], 0.2)
    given = {
        f"{name}{i}": p.asnumpy() for name, ps in (("start", start), ("end", replicas[0])) for i, p in enumerate(ps)
    }
    np.savez(tmp_path / "given.npz", X=X.asnumpy(), y=y.asnumpy(), **given)
    (tmp_path / "twins.py").write_text("\n".join([*TWINS, STEPS]))
    command, env = [sys.executable, "twins.py"], engine.users_environment()
    workers = [subprocess.Popen([*command, rank], cwd=tmp_path, env=env) for rank in "01"]
    assert [worker.wait(120) for worker in workers] == [0, 0]


STEPS = """
import pathlib, sys
import numpy as np

given = {name: torch.from_numpy(array) for name, array in np.load("given.npz").items()}
start, X, y = [given[f"start{i}"] for i in range(8)], given["X"], given["y"].long()
assert [p.shape for p in init_params()] == [p.shape for p in start]
store = f"file://{pathlib.Path.cwd()}/store"
dist.init_process_group("gloo", init_method=store, rank=int(sys.argv[1]), world_size=2)
with torch.no_grad():
    for p, value in zip(net.parameters(), start):
        p.copy_(value)
net = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
devices = [torch.device("cpu")] * 2
replicas = [get_params(start, d) for d in devices]
for _ in range(3):
    train_batch(X, y, replicas, devices, 0.2)
    train_batch_ddp(X, y, net, optimizer)
for params in (*replicas, list(net.parameters())):
    for i, p in enumerate(params):
        moved = (given[f"end{i}"] - start[i]).abs().max()
        assert (p - given[f"end{i}"]).abs().max() < 1e-3 * moved, i
dist.destroy_process_group()
"""


@pytest.mark.slow
@needs_torch
def test_a_carried_over_checkpoint_has_its_accuracy_in_pytorch(tmp_path):
    """The page's command and program, with synthetic images."""
    script, *options = TRAIN
    options += ["--dataset", "synthetic", "--device", "cpu"]
    (tmp_path / "runs").mkdir()
    finished(sys.executable, ROOT / script, *options, cwd=tmp_path, env=engine.users_environment(), check=True)
    load = 'datasets.load("fashion-mnist", limit=6000)'
    assert load in CARRY_OVER
    program = "\n".join([*TWINS, CARRY_OVER.replace(load, 'datasets.load("synthetic", limit=6000, seed=1)')])
    (tmp_path / "carry_over.py").write_text(program)
    done = finished(sys.executable, "carry_over.py", cwd=tmp_path, env=engine.users_environment())
    assert done.returncode == 0, done.stderr
    last = json.loads((tmp_path / "runs/first/metrics.jsonl").read_text().splitlines()[-1])
    assert abs(float(done.stdout.split()[-1]) - last["test_accuracy"]) <= 1e-3  # one of 1000 images
    assert last["test_accuracy"] > 0.2
