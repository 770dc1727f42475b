"""Real GPUs compute what CPU contexts compute, in float32 without TF32 (tests/conftest.py turns it off).

`make test-gpu` shows a single GPU as two devices (tests/two_devices.c).
"""

import shutil
import sys

import mxnet as mx
import numpy as np
import pytest
from mxnet import nd
from runs import call, finished, gluon_mgpu
from test_steps import LESSONS, LIMIT, assert_twenty_steps_end_at, expected  # noqa: F401 (a fixture)
from test_twins import ROOT, TORCHRUN, run

from gluon_mgpu import train
from gluon_mgpu.commands.evaluate import evaluate
from gluon_mgpu.compat import cuda
from gluon_mgpu.training.config import Config
from gluon_mgpu.training.models import create_model, read_arrays
from gluon_mgpu.training.record import read

COUNT = mx.context.num_gpus()
GPUS = [mx.gpu(i) for i in range(2)]
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(COUNT == 0, reason="needs a GPU that MXNet can use")]
needs_two = pytest.mark.skipif(COUNT < 2, reason="needs two GPUs, or one that is shown as two: make test-gpu")
ONE_OR_TWO = pytest.mark.parametrize("count", [1, pytest.param(2, marks=needs_two)])


@ONE_OR_TWO
@LESSONS
def test_twenty_steps_on_gpus_end_where_float64_ends(options, count, expected):  # noqa: F811
    assert_twenty_steps_end_at(expected, GPUS[:count], options)


def test_resnet18_on_a_gpu_takes_the_step_of_a_cpu_except_for_rounding():
    """The longest sum in a convolution has 512 x 3 x 3 products. Its error is about the square root of that, in last
    bits: as if the weights differed by 68 of them. Outputs, and so running averages, then differ in proportion.
    Gradients do not: each activation that crosses 0 switches its gradient on or off in ReLU."""
    random, config = np.random.default_rng(1), Config(impl="highlevel", model="resnet18")
    X, y = nd.array(random.random((16, 1, 28, 28))), nd.array(random.integers(0, 10, 16))
    built = {c: create_model("highlevel", [c], config) for c in (mx.cpu(0), GPUS[0])}
    first = read_arrays(built[mx.cpu(0)])
    bits = np.sqrt(512 * 9) * 2.0**-23
    kinds = {kind: [name for name in first if kind in name] for kind in ("running_mean", "running_var")}
    kinds["learned"] = [name for name in first if "running" not in name]
    rounded = {n: (a * (1 + bits * random.choice([-1, 1], a.shape))).astype("f") for n, a in first.items()}
    rounded.update({name: first[name] for kind in ("running_mean", "running_var") for name in kinds[kind]})

    def after_a_step(ctx, start):
        model = built[ctx]
        model.load(start)
        model.step(X, y, 0.02)
        changes = {name: a - start[name].astype("d") for name, a in read_arrays(model).items()}
        if ctx == GPUS[0] and mx.runtime.Features().is_enabled("CUDNN"):  # its variances are divided by n - 1, not n
            positions = {64: 28 * 28, 128: 14 * 14, 256: 7 * 7, 512: 4 * 4}
            for name in kinds["running_var"]:
                variance = changes[name] + 0.1 * start[name]  # the change is 0.1 x (variance - start)
                changes[name] -= variance / (16 * positions[variance.size])
        return {kind: np.concatenate([changes[name].ravel() for name in names]) for kind, names in kinds.items()}

    starts = (mx.cpu(0), first), (mx.cpu(0), rounded), (GPUS[0], first)
    right, other, on_gpu = (after_a_step(*start) for start in starts)
    for kind, change in right.items():
        error, by_rounding = (np.linalg.norm(a[kind] - change) for a in (on_gpu, other))
        print(f"{kind}: {np.linalg.norm(change):.1e}; error {error:.1e}, by rounding {by_rounding:.1e}")
        assert error < by_rounding, kind


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """{device: the folder of a run of one epoch}"""
    folders = {device: tmp_path_factory.mktemp(device) / "run" for device in ("gpu", "cpu")}
    for device, out in folders.items():
        options = {"dataset": "synthetic", "limit": 640, "seed": 1, "momentum": 0.5, "device": device}
        train("highlevel", COUNT, 64, 0.1, epochs=1, out=out, **options)
    return folders


@pytest.mark.parametrize("begin, end", [("gpu", "cpu"), ("cpu", "gpu")])
def test_a_run_that_moves_to_other_devices_ends_as_one_that_stays(begin, end, runs, tmp_path):
    arrays = []
    for name, device in (("moved", end), ("stayed", begin)):
        folder = shutil.copytree(runs[begin], tmp_path / name)
        train(resume=folder, epochs=3, device=device, gpus=COUNT)
        arrays.append(np.concatenate([a.ravel() for a in read(folder).arrays.values()]))
    path = arrays[1] - np.concatenate([a.ravel() for a in read(runs[begin]).arrays.values()])
    assert np.linalg.norm(arrays[0] - arrays[1]) < LIMIT * np.linalg.norm(path)  # 20 steps, as in test_steps.py


def test_evaluate_finds_the_same_answers_on_a_gpu_and_a_cpu(runs, capfd):
    gpu, cpu = (call(capfd, evaluate, runs["gpu"], "--device", device) for device in ("gpu", "cpu"))
    (title, *on_gpu), (_, *on_cpu) = gpu[1].splitlines(), cpu[1].splitlines()
    assert gpu[0] == 0 and "gpu(0)" in title and on_gpu == on_cpu


SMALL = "--dataset synthetic --limit 512 --seed 1 --epochs 1".split()


@needs_two
def test_training_with_gluon_prints_only_the_notebooks_lines():
    done = gluon_mgpu("train", "--impl", "highlevel", "--gpus", "2", "--device", "gpu", *SMALL)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert done.stdout.startswith("running on: [gpu(0), gpu(1)]\nepoch 1, ")


def test_doctor_says_that_each_gpu_works_and_that_training_runs():
    done = gluon_mgpu("doctor")  # its exit status also tells of the data set
    lines = [line for line in done.stdout.splitlines() if " GPU " in line or "running on: " in line]
    assert len(lines) == len(cuda.driver_gpus()) + 1 and all(line.startswith("ok") for line in lines), done.stdout


OLD_PROGRAM = """
import mxnet as mx
from mxnet import autograd, gluon, nd
ctx = [mx.gpu(i) for i in range(COUNT)]
net = gluon.nn.Dense(1)
net.initialize(mx.init.One(), ctx=ctx)
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.5})
with autograd.record():
    losses = [net(X).sum() for X in gluon.utils.split_and_load(nd.ones((4, 3)), ctx)]
for loss in losses:
    loss.backward()
trainer.step(4)
print(*{net.weight.data(c).sum().asscalar() for c in ctx}, losses[-1].context)  # 3 weights of 1 - 0.5
"""


def test_an_old_program_runs_on_the_gpus_that_it_names(tmp_path):
    (tmp_path / "old.py").write_text(OLD_PROGRAM.replace("COUNT", str(COUNT)))
    done = gluon_mgpu("run", "--here", "old.py", cwd=tmp_path)
    assert done.stdout == f"1.5 gpu({COUNT - 1})\n", done.stderr


@pytest.mark.parametrize("name", ["scratch", "ddp", "fsdp"])
def test_two_processes_of_pytorch_on_gpus_have_the_parameters_of_scratch(name, tmp_path):
    count = finished(sys.executable, "-c", "import torch; print(torch.cuda.device_count())").stdout.strip()
    if not count.isdecimal() or count == "0":
        pytest.skip("needs a PyTorch that can use the GPU")
    if name == "fsdp" and count == "1":
        done = finished(*TORCHRUN, ROOT / "docs/pytorch/fsdp.py", "--device", "cuda", "--dataset", "synthetic")
        assert done.returncode and "--device cpu" in done.stderr
    else:
        run(tmp_path, TORCHRUN, f"pytorch/{name}.py", "cuda")


@pytest.mark.parametrize("name", ["scratch", "sharding"])
def test_jax_on_gpus_has_the_parameters_of_scratch(name, tmp_path):
    if finished(sys.executable, "-c", "import jax; jax.devices('gpu')").returncode:
        pytest.skip("needs a JAX that can use the GPU")
    run(tmp_path, [sys.executable], f"jax/{name}.py", "gpu")
