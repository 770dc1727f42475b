"""Processes that MPI connects train as one process does, agree on what to do, and end together."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import mxnet as mx
import numpy as np
import pytest
import runs
from runs import ROOT, TRAIN

from gluon_mgpu import models
from gluon_mgpu.data import datasets
from gluon_mgpu.data.batches import batches, shuffled
from gluon_mgpu.runtime import engine
from gluon_mgpu.train import train
from gluon_mgpu.training import checkpoint, workers
from gluon_mgpu.training.workers import Group

pytestmark = runs.needs_mpi

SYNTHETIC = {"dataset": "synthetic", "batch_size": 64, "lr": 0.2, "seed": 3, "epochs": 1, "device": "cpu"}
EXTRAS = {"momentum": 0.9, "weight_decay": 0.001, "max_grad_norm": 0.5, "grad_accum_steps": 2}
LESSON = (ROOT / "gluon_mgpu/scratch.py").read_text()
# Copies of the lessons, with other networks: a smaller LeNet, and one with batch normalization.
SMALL = LESSON.replace("(128, 800), (10, 128)", "(30, 800), (10, 30)").replace("num_hidden=128", "num_hidden=30")
NORMALIZED = (
    (ROOT / "gluon_mgpu/highlevel.py").read_text()
    + """
def lenet():
    net = nn.HybridSequential(prefix="normalized_")
    with net.name_scope():
        net.add(nn.Conv2D(6, 3, strides=2, use_bias=False), nn.BatchNorm(), nn.Activation("relu"), nn.MaxPool2D())
        net.add(nn.Dense(20, use_bias=False), nn.BatchNorm(scale=False), nn.Dense(10))
    return net
"""
)
FILES = {"small.py": SMALL, "normalized.py": NORMALIZED}
CASES = [(impl, extras) for impl in ("scratch", "highlevel", *FILES) for extras in ({}, EXTRAS)]
# A program of a user, which trains several times.
PROGRAM = """
import json, sys
from gluon_mgpu.train import train
for options in json.loads(sys.argv[1]):
    train(kvstore="mpi", **options)
"""
UNIT = 2.0**-24  # the largest relative error of a rounded float32 operation


@pytest.fixture(scope="module")
def lessons(tmp_path_factory):
    """A folder with FILES."""
    folder = tmp_path_factory.mktemp("lessons")
    for name, code in FILES.items():
        (folder / name).write_text(code)
    return folder


def flags(options):
    return [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]


def mpiexec(*workers, **options):
    """Run mpiexec. workers: (number, *command) for each kind of worker. Returns the finished process."""
    return runs.finished(*runs.mpiexec(*workers), env=engine.users_environment(), timeout=runs.HORIZON, **options)


def command(*words, **options):
    return [*TRAIN, "--kvstore", "mpi", *words, *flags({**SYNTHETIC, "limit": 256, **options})]


def train_together(count, runs_options):
    done = mpiexec((count, sys.executable, "-c", PROGRAM, json.dumps(runs_options)))
    assert done.returncode == 0, done.stderr


def arrays(folder):
    return checkpoint.load(folder / "checkpoint.npz")[0]


def bits(folder):
    return {name: array.tobytes() for name, array in arrays(folder).items()}


# The same parameters


@pytest.fixture(scope="module")
def two(lessons, tmp_path_factory):
    """A folder with a run of two workers for each of CASES. The last of its 4 steps has 57 examples."""
    folder = tmp_path_factory.mktemp("two")
    options = [
        {**SYNTHETIC, **extras, "impl": impl_of(impl, lessons), "limit": 249, "out": str(folder / str(i))}
        for i, (impl, extras) in enumerate(CASES)
    ]
    train_together(2, options)
    return folder


def impl_of(name, lessons):
    return str(lessons / name) if name in FILES else name


@pytest.mark.parametrize("case", range(len(CASES)), ids=lambda i: f"{CASES[i][0]}{' extras' * bool(CASES[i][1])}")
def test_two_workers_end_with_the_bits_of_two_contexts(case, two, lessons, tmp_path):
    impl, extras = CASES[case]
    alone = train(**{**SYNTHETIC, **extras, "impl": impl_of(impl, lessons), "limit": 249, "gpus": 2, "out": tmp_path})
    assert bits(two / str(case)) == bits(tmp_path)
    metrics = json.loads((two / str(case) / "metrics.jsonl").read_text())
    assert metrics["test_accuracy"] == alone[0].test_accuracy
    assert metrics["train_loss"] == pytest.approx(alone[0].train_loss, rel=1e-12)  # sums of float64 in another order


@pytest.mark.parametrize("count, gpus", [(3, 1), (2, 2)])
def test_a_step_of_several_workers_is_the_step_on_all_shards_except_for_rounding(count, gpus, tmp_path):
    options = {**SYNTHETIC, "impl": "scratch", "limit": 100, "batch_size": 100}
    train_together(count, [{**options, "gpus": gpus, "out": str(tmp_path)}])
    mx.random.seed(3)
    ctx = [mx.cpu(i) for i in range(count * gpus)]
    model = models.build("scratch", ctx)
    start = {name: array.asnumpy() for name, array in model.arrays().items()}
    data = datasets.load("synthetic", None, 100, 3)
    ((X, y),) = batches(data.train_images, data.train_labels, 100, shuffled(100, 3, 1))
    model.forward_backward(model.split_and_load(X), model.split_and_load(y))
    for name, found in arrays(tmp_path).items():
        grads = [model.grads(i)[name].asnumpy().astype(np.float64) for i in range(len(ctx))]
        expected = start[name] - 0.2 / 100 * sum(grads)
        # n - 1 additions of the gradients, and 3 operations of the update, with at most this many roundings each
        error = 0.2 / 100 * (len(ctx) + 2) * UNIT * sum(np.abs(grads)) + UNIT * np.abs(expected)
        np.testing.assert_array_less(np.abs(found - expected), 1.01 * error + 1e-30, err_msg=name)


# The backward pass of the first layer waits until the first sum has begun. Prints the sizes of what a step sums.
GATED = """
import os, threading
from mxnet import autograd, nd
from gluon_mgpu import models, scratch
from gluon_mgpu.lessons import LessonConfig, load
from gluon_mgpu.runtime import devices
from gluon_mgpu.training import step, workers

begun = threading.Event()

class Gate(autograd.Function):
    def forward(self, x):
        return x

    def backward(self, grad):
        print("waited" if begun.wait(60) else "no sum has begun", flush=True)
        return grad

def lenet(X, params):
    return scratch.lenet(X, [Gate()(params[0]), *params[1:]])

with workers.join("mpi") as group:
    ctx = devices.contexts(1, "cpu")
    model = models.build(load("scratch", lenet=lenet), ctx)
    allreduce, sizes = group.allreduce, []

    def noted(array):
        if array.size > 1:
            sizes.append(array.size)
            begun.set()
        return allreduce(array)

    group.allreduce = noted
    step.extended(model, group)(nd.ones((8, 1, 28, 28)), nd.zeros(8), 0.1)
    nd.waitall()
    if not group.rank:
        print(sizes == [array.size for array in reversed(list(model.arrays().values()))])
        print(os.environ["MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN"])
"""


def test_the_last_layers_gradient_is_summed_before_the_first_layers_is_computed():
    done = mpiexec((2, sys.executable, "-c", GATED))
    assert (done.returncode, sorted(done.stdout.split("\n"))) == (0, ["", "1", "True", "waited", "waited"]), done.stderr


@pytest.mark.parametrize("size, gpus", [(1, 1), (2, 1), (3, 2), (7, 1)])
def test_every_example_of_a_batch_belongs_to_one_worker(size, gpus):
    for n in (1, 2, 5, 6, 7, 33, 256):
        parts = [Group(SimpleNamespace(rank=rank, size=size)).part(n, gpus) for rank in range(size)]
        assert np.concatenate([np.arange(n)[part] for part in parts]).tolist() == list(range(n))


# Failures

RAISES = (
    SMALL
    + """
import os
calls, original = [], forward_backward

def forward_backward(*args):
    calls.append(args)
    if len(calls) == 3 and os.environ["PMI_RANK"] in WORKERS:
        raise ValueError("no room")
    return original(*args)
"""
)


def failures(folder):
    """{case: (the workers for mpiexec, the exit status, a pattern for the only error)}. folder: the current folder."""
    for who in ("1", "01"):
        (folder / f"raises{who}.py").write_text(RAISES.replace("WORKERS", repr(who)))
    other = folder / "other"
    other.mkdir()
    data = datasets.load("synthetic", None, 100, 3)
    for where, labels in ((folder, data.train_labels), (other, data.train_labels[::-1])):
        content = {"train_images": data.train_images, "test_images": data.test_images, "test_labels": data.test_labels}
        np.savez(where / "data.npz", train_labels=labels, **content)
    own = command(dataset="own", data_dir="data.npz", limit=100)
    return {
        "a lesson in one": ([(2, *command(impl="raises1.py"))], 1, "worker 1: .*raises1.py, line .*no room"),
        "a lesson in all": ([(3, *command(impl="raises01.py"))], 1, r"\S*raises01.py, line .*no room"),
        "other options in one": ([(1, *command()), (1, *command(max_grad_norm=1))], 2, "worker 1: --max-grad-norm"),
        "an invalid option in one": ([(1, *command()), (1, *command(lr=-1))], 2, "worker 1: .*--lr"),
        "an invalid option in all": ([(3, *command(lr=-1))], 2, "Invalid .*--lr"),
        "missing data in one": ([(1, *own), (1, "-wdir", folder.parent, *own)], 2, "worker 1: --data-dir"),
        "other data in one": ([(1, *own), (1, "-wdir", other, *own)], 2, "worker 1: .*checksum"),
        "sharded": ([(2, *command(impl="sharded"))], 2, "--kvstore mpi: .*sharded"),
        "no --kvstore": ([(3, *TRAIN)], 2, "--kvstore local: "),
    }


CAUSES = ["a lesson in one", "a lesson in all", "other options in one", "an invalid option in one"]
CAUSES += ["an invalid option in all", "missing data in one", "other data in one", "sharded", "no --kvstore"]


@pytest.mark.parametrize("cause", CAUSES)
def test_a_failure_ends_all_workers_with_its_status_and_one_line(cause, tmp_path):
    kinds, status, pattern = failures(tmp_path)[cause]
    done = mpiexec(*kinds, cwd=tmp_path)
    errors = [line for line in done.stderr.splitlines() if not line.startswith("gluon_mgpu: ")]
    assert (done.returncode, len(errors)) == (status, 1), done.stderr
    assert re.match(f"error: {pattern}", errors[0]), errors


def test_an_exception_in_one_worker_of_a_users_program_ends_all(tmp_path):
    (tmp_path / "raises.py").write_text(RAISES.replace("WORKERS", "'1'"))
    options = [{**SYNTHETIC, "limit": 256, "impl": str(tmp_path / "raises.py")}]
    done = mpiexec((2, sys.executable, "-c", PROGRAM, json.dumps(options)))
    assert (done.returncode, done.stderr.count("Traceback")) == (1, 1), done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: worker 1: ")


@pytest.mark.parametrize(
    "kvstore, variables",
    [
        ("mpi", {}),
        ("local", {"PMI_RANK": "1", "PMI_SIZE": "2"}),
        ("local", {"PMIX_RANK": "0"}),  # it is not known how many others there are
        ("mpi", {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}),  # the mpiexec of another MPI
    ],
)
def test_a_process_that_was_not_started_for_this_kvstore_is_refused(kvstore, variables):
    code = "import sys; from gluon_mgpu.training.workers import join; join(sys.argv[1]).__enter__()"
    done = runs.finished(sys.executable, "-c", code, kvstore, env={**engine.users_environment(), **variables})
    assert "UsageError: kvstore=" in done.stderr.splitlines()[-1]


def test_one_worker_may_train_without_mpi(monkeypatch):
    monkeypatch.setenv("PMI_RANK", "0")  # as under srun
    monkeypatch.setenv("PMI_SIZE", "1")
    with workers.join("local") as group:
        assert (group.rank, group.size) == (0, 1)


# Signals, and runs that go on


class Workers:
    """A run of two workers with small steps, which would take hours. folder: its folder."""

    def __init__(self, folder, **options):
        self.folder = folder
        words = runs.mpiexec((2, *command(impl="scratch", out=folder, **{"epochs": 9999, **options})))
        self.process = runs.start(words)
        assert self.process.stdout.readline().startswith("running on: [cpu(0)] as worker 0 of 2")
        self.process.stdout.readline()  # the first epoch
        self.pids = runs.processes(str(folder))
        assert len(self.pids) == 2

    def end(self, seconds):
        """(exit status, standard error) once all have ended, which may take this long."""
        try:
            err = self.process.communicate(timeout=seconds)[1]
            runs.wait(lambda: not runs.alive(self.pids.values()), seconds)
        finally:
            for pid in runs.alive(self.pids.values()):
                os.kill(pid, signal.SIGKILL)
            self.process.kill()
        return self.process.returncode, err


@pytest.fixture
def busy():
    """Another job on the machine."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    yield
    process.kill()
    process.wait()


@pytest.mark.parametrize("rank", [0, 1])
def test_if_one_worker_is_killed_the_others_end_within_5_seconds(rank, busy, tmp_path):
    run = Workers(tmp_path / "run")
    os.kill(run.pids[rank], signal.SIGKILL)
    assert run.end(5)[0] == 9
    assert arrays(run.folder)


@pytest.mark.parametrize(
    "who, signals",
    [("mpiexec", [signal.SIGINT]), ("mpiexec", [signal.SIGTERM] * 2), (1, [signal.SIGTERM])],
    ids=["Ctrl-C", "SIGTERM twice", "SIGTERM at worker 1"],
)
def test_a_signal_stops_all_workers_at_the_same_step_with_a_checkpoint(who, signals, tmp_path):
    run = Workers(tmp_path / "run")
    for which in signals:  # a second one that comes at once is a duplicate
        os.kill(run.process.pid if who == "mpiexec" else run.pids[who], which)
    status, err = run.end(30)
    lines = [line for line in err.splitlines() if line.startswith(("interrupted", "error"))]
    assert (status, len(lines)) == (130, 1), err
    assert "checkpoint saved" in lines[0] and str(run.folder) in lines[0]
    finished = len((run.folder / "metrics.jsonl").read_text().splitlines())
    whole = tmp_path / "whole"
    train(resume=run.folder, gpus=2, device="cpu", epochs=finished + 1)
    train(**{**SYNTHETIC, "impl": "scratch", "limit": 256, "gpus": 2, "out": whole, "epochs": finished + 1})
    assert bits(run.folder) == bits(whole)


def test_a_second_ctrl_c_ends_all_workers_even_if_one_hangs(tmp_path):
    run = Workers(tmp_path / "run")
    os.kill(run.pids[1], signal.SIGSTOP)
    for _ in range(2):
        time.sleep(0.2)
        run.process.send_signal(signal.SIGINT)
    assert run.end(10)[0] not in (0, None)


def resume(folder, *kinds, **options):
    """Continue a run with workers of which only worker 0 has its folder. kinds: numbers of workers."""
    words = [*TRAIN, "--kvstore", "mpi", "--resume", folder.name, "--device", "cpu", *flags(options)]
    elsewhere = [(count, "-wdir", "/", *words) for count in kinds]
    return mpiexec((1, *words), *elsewhere, cwd=folder.parent)


def test_three_workers_continue_a_run_of_two_as_three_contexts_would(two, tmp_path):
    folder, alone = (shutil.copytree(two / "0", tmp_path / name) for name in ("run", "alone"))
    done = resume(folder, 2, epochs=2)
    assert done.returncode == 0 and "workers 3 instead of 2" in done.stderr, done.stderr
    train(resume=alone, gpus=3, device="cpu", epochs=2)
    expected = arrays(alone)
    for name, found in arrays(folder).items():
        # 4 steps with lr 0.2, in each of which 3 mean gradients, whose elements are below 10, are added and rounded
        np.testing.assert_allclose(found, expected[name], rtol=0, atol=4 * 0.2 * 5 * UNIT * 10, err_msg=name)


def test_a_finished_run_that_two_workers_resume_ends_with_status_0(two, busy, tmp_path):
    folder = shutil.copytree(two / "0", tmp_path / "run")
    before = bits(folder)
    for _ in range(3):
        done = resume(folder, 1)
        assert done.returncode == 0, done.stderr
    assert bits(folder) == before
