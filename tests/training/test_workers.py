"""Processes that MPI connects agree on what to do, and end together. tests/test_features.py compares their results with
those of one process."""

import json
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import runs
from runs import ROOT, TRAIN

from gluon_mgpu import scratch, train
from gluon_mgpu.compat import startup
from gluon_mgpu.data import datasets
from gluon_mgpu.support import subprocesses
from gluon_mgpu.training import checkpoint, loop, workers

pytestmark = runs.needs_mpi

SYNTHETIC = {"dataset": "synthetic", "batch_size": 64, "lr": 0.2, "seed": 3, "epochs": 1, "device": "cpu"}
# A program of a user, which trains several times.
PROGRAM = """
import json, sys
from gluon_mgpu import train
for options in json.loads(sys.argv[1]):
    train(kvstore="mpi", **options)
"""
UNIT = 2.0**-24  # the largest relative error of a rounded float32 operation


def mpiexec(*workers, **options):
    """Run mpiexec. workers: (number, *command) for each kind of worker. Returns the finished process."""
    environment = {**subprocesses.users_environment(), "OMP_NUM_THREADS": "1"}  # as with several contexts
    return runs.finished(*runs.mpiexec(*workers), env=environment, timeout=runs.HORIZON, **options)


def command(**options):
    options = {"kvstore": "mpi", **SYNTHETIC, "limit": 256, **options}
    return [*TRAIN, *(word for name in options for word in (f"--{name.replace('_', '-')}", options[name]))]


def train_together(count, options, **how):
    """Run PROGRAM. options: of each training."""
    return mpiexec((count, sys.executable, "-c", PROGRAM, json.dumps(options)), **how)


def arrays(folder):
    return checkpoint.load(folder / "checkpoint.npz")[0]


def bits(folder):
    return {name: array.tobytes() for name, array in arrays(folder).items()}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The folder of a run of two workers, of 4 steps, of which the last one has 57 examples."""
    folder = tmp_path_factory.mktemp("two") / "run"
    done = train_together(2, [{**SYNTHETIC, "limit": 249, "out": str(folder)}])
    assert done.returncode == 0, done.stderr
    return folder


def assert_same_except_for_rounding(folder, others, steps):
    """The parameters of two runs, which sum the gradients of the same shards in different orders."""
    expected = arrays(others)
    for name, found in arrays(folder).items():
        # In each step with lr 0.2, at most 4 gradients with elements below 10 are added with at most 6 roundings.
        np.testing.assert_allclose(found, expected[name], rtol=0, atol=steps * 0.2 * 6 * UNIT * 10, err_msg=name)


@pytest.mark.slow
def test_a_step_of_two_workers_with_two_devices_is_that_of_four_contexts_except_for_rounding(tmp_path):
    options = {**SYNTHETIC, "limit": 100, "batch_size": 100}
    assert train_together(2, [{**options, "gpus": 2, "out": str(tmp_path / "two")}]).returncode == 0
    train(**options, gpus=4, out=tmp_path / "alone")
    assert_same_except_for_rounding(tmp_path / "two", tmp_path / "alone", steps=1)


# The backward pass of the first layer waits until the first sum has begun. Prints the sizes of what a step sums.
GATED = """
import os, threading
from gluon_mgpu import scratch
from gluon_mgpu.training.models import create_model
from mxnet import autograd, nd
from gluon_mgpu.training.lessons import load
from gluon_mgpu.training.config import Config
from gluon_mgpu.compat import devices
from gluon_mgpu.training import step, workers

begun = threading.Event()

def say(line):
    os.write(1, f"{line}\\n".encode())  # print may write the line's end on its own, after the other worker's line

class Gate(autograd.Function):
    def forward(self, x):
        return x.copy()

    def backward(self, grad):
        say("waited" if begun.wait(60) else "no sum has begun")
        return grad

def lenet(X, params):
    return scratch.lenet(X, [Gate()(params[0]), *params[1:]])

with workers.join("mpi") as group:
    ctx = devices.contexts(1, "cpu")
    model = create_model(load("scratch", lenet=lenet), ctx)
    allreduce, sizes = group.all_reduce, []

    def noted(array):
        if array.size > 1:
            sizes.append(array.size)
            begun.set()
        return allreduce(array)

    group.all_reduce = noted
    step.assemble(model, group)(nd.ones((8, 1, 28, 28)), nd.zeros(8), 0.1)
    nd.waitall()
    if not group.rank:
        say(sizes == [array.size for array in reversed(list(model.arrays().values()))])
        say(os.environ["MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN"])
"""


@pytest.mark.slow
def test_the_last_layers_gradient_is_summed_before_the_first_layers_is_computed():
    done = mpiexec((2, sys.executable, "-c", GATED))
    assert (done.returncode, sorted(done.stdout.split("\n"))) == (0, ["", "1", "True", "waited", "waited"]), done.stderr


# Failures

RAISES = f"""{Path(scratch.__file__).read_text()}
import os
calls, original = [], forward_backward

def forward_backward(*args):
    calls.append(args)
    if len(calls) == 3 and os.environ["PMI_RANK"] in WORKERS:
        raise ValueError("no room")
    return original(*args)
"""


RANK = "int(os.environ['PMI_RANK'])"


@pytest.fixture(scope="module")
def cwd(tmp_path_factory):
    """The current folder of failing runs: lessons that raise an exception at step 3, data, and other data."""
    folder = tmp_path_factory.mktemp("failures")
    for name, ranks in {"one.py": "1", "all.py": "01"}.items():
        (folder / name).write_text(RAISES.replace("WORKERS", repr(ranks)))
    update = "        nd.sgd_update("
    code = (ROOT / "gluon_mgpu/scratch.py").read_text().replace(update, f"        p += {RANK} * 1e-3\n{update}")
    (folder / "apart.py").write_text(f"{code}\nimport os\n")
    state = f"\nimport os\n\nkept = nd.ones(1 + {RANK})\n\n\ndef state(device):\n    return {{'v': kept}}\n"
    (folder / "state.py").write_text(Path(scratch.__file__).read_text() + state)
    data = datasets.load("synthetic", None, 100, 3)
    content = {"train_images": data.train_images, "test_images": data.test_images, "test_labels": data.test_labels}
    (folder / "other").mkdir()
    np.savez(folder / "data.npz", train_labels=data.train_labels, **content)
    np.savez(folder / "other/data.npz", train_labels=data.train_labels[::-1], **content)
    return folder


OWN = command(dataset="own", data_dir="data.npz", limit=100)
FAILURES = {  # the workers that mpiexec starts, the exit status, and the only error
    "a lesson, in one worker": ([(2, *command(impl="one.py"))], 1, "worker 1: .*one.py, line .*no room"),
    "a lesson": ([(2, *command(impl="all.py"))], 1, r"\S*all.py, line .*no room"),
    "other options, in one worker": ([(1, *command()), (1, *command(schedule="cosine"))], 2, "worker 1: --schedule"),
    "an invalid option, in one worker": ([(1, *command()), (1, *command(lr=-1))], 2, "worker 1: .*--lr"),
    "an invalid option": ([(2, *command(lr=-1))], 2, "Invalid .*--lr"),
    "missing data, in one worker": ([(1, *OWN), (1, "-wdir", "/", *OWN)], 2, "worker 1: --data-dir"),
    "other data, in one worker": ([(1, *OWN), (1, "-wdir", "other", *OWN)], 2, "worker 1: .*data"),
    "a state that differs between workers": (
        [(2, *command(impl="state.py"))],
        2,
        "worker 1: .*state.py: state's array 0/v is .* in worker 1, but .* in worker 0",
    ),
}


IN_MAKE_TEST = ("a lesson, in one worker", "other options, in one worker")


@pytest.mark.parametrize(
    "cause", [pytest.param(cause, marks=[pytest.mark.slow] * (cause not in IN_MAKE_TEST)) for cause in FAILURES]
)
def test_a_failure_ends_all_workers_with_its_status_and_one_line(cause, cwd):
    kinds, status, pattern = FAILURES[cause]
    done = mpiexec(*kinds, cwd=cwd)
    errors = [line for line in done.stderr.splitlines() if not line.startswith("gluon_mgpu: ")]
    assert (done.returncode, len(errors)) == (status, 1), done.stderr
    assert re.match(f"error: {pattern}", errors[0]), errors


@pytest.mark.slow
def test_workers_with_different_parameters_are_reported_after_an_epoch(cwd):
    done = mpiexec((2, *command(impl="apart.py")), cwd=cwd)
    assert (done.returncode, len(re.findall("gluon_mgpu: .*epoch 1", done.stderr))) == (0, 1), done.stderr


@pytest.mark.slow
def test_an_exception_in_one_worker_of_a_users_program_ends_all(cwd):
    done = train_together(2, [{**SYNTHETIC, "limit": 256, "impl": "one.py"}], cwd=cwd)
    assert (done.returncode, done.stderr.count("Traceback")) == (1, 1), done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: worker 1: ")


@pytest.mark.slow
def test_with_mpi4py_an_exception_between_two_trainings_ends_all(tmp_path):
    program = PROGRAM + "    if os.environ['PMI_RANK'] == '1':\n        raise ValueError\n"
    (tmp_path / "program.py").write_text(f"import os\n{program}")
    options = json.dumps([{**SYNTHETIC, "limit": 64}] * 2)
    done = mpiexec((2, sys.executable, "-m", "mpi4py", tmp_path / "program.py", options))
    assert done.returncode == 1 and "ValueError" in done.stderr


@pytest.mark.slow
def test_workers_do_not_wait_forever_for_one_that_has_failed_early():
    code = "from gluon_mgpu.support import mpi; mpi.SECONDS_TO_START = 1; mpi.world()"
    done = mpiexec((1, sys.executable, "-c", code), (1, "false"))
    assert done.returncode == signal.SIGALRM


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
    done = runs.finished(sys.executable, "-c", code, kvstore, env={**subprocesses.users_environment(), **variables})
    assert "UsageError: kvstore=" in done.stderr.splitlines()[-1]


def test_one_worker_may_train_without_mpi(monkeypatch):
    monkeypatch.setenv("PMI_RANK", "0")  # as under srun
    monkeypatch.setenv("PMI_SIZE", "1")
    with workers.join("local") as group:
        assert group.size == 1


# Signals, and runs that go on


class Workers:
    """A run of two workers, which would take hours. folder: its folder."""

    def __init__(self, folder):
        self.folder = folder
        self.process = runs.start(runs.mpiexec((2, *command(out=folder, epochs=9999))))
        runs.wait((folder / "checkpoint.npz").exists)
        self.pids = runs.processes(str(folder))

    def end(self):
        """(exit status, standard error) once all have ended."""
        try:
            err = self.process.communicate(timeout=runs.HORIZON)[1]
            runs.wait(lambda: not runs.alive(self.pids.values()))
        finally:
            for pid in runs.alive(self.pids.values()):
                os.kill(pid, signal.SIGKILL)
            self.process.kill()
        return self.process.returncode, err


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_if_one_worker_is_killed_the_others_end(rank, tmp_path):
    run = Workers(tmp_path / "run")
    os.kill(run.pids[rank], signal.SIGKILL)
    assert run.end()[0] == 9
    assert arrays(run.folder)


@pytest.mark.parametrize(
    "signals",
    [[signal.SIGINT], pytest.param([signal.SIGTERM] * 2, marks=pytest.mark.slow)],
    ids=["Ctrl-C", "SIGTERM at worker 1"],
)
def test_a_signal_stops_all_workers_at_the_same_step_with_a_checkpoint(signals, tmp_path):
    run = Workers(tmp_path / "run")
    for which in signals:  # a second one that comes at once is a duplicate
        os.kill(run.process.pid if which == signal.SIGINT else run.pids[1], which)
    status, err = run.end()
    lines = [line for line in err.splitlines() if line.startswith(("interrupted", "error"))]
    assert (status, len(lines)) == (130, 1) and "checkpoint saved" in lines[0], err
    epochs = len((run.folder / "metrics.jsonl").read_text().splitlines()) + 1
    train(resume=run.folder, gpus=2, device="cpu", epochs=epochs)
    train(**{**SYNTHETIC, "limit": 256, "gpus": 2, "out": tmp_path / "whole", "epochs": epochs})
    assert bits(run.folder) == bits(tmp_path / "whole")


@pytest.mark.slow
def test_a_second_ctrl_c_ends_all_workers_even_if_one_hangs(tmp_path):
    run = Workers(tmp_path / "run")
    os.kill(run.pids[1], signal.SIGSTOP)
    for _ in range(2):
        time.sleep(2 * loop.SAME_SIGNAL)  # a signal that comes sooner is a duplicate
        run.process.send_signal(signal.SIGINT)
    run.end()  # with any status: mpiexec ignores a worker whose status it did not receive (MPICH 5.0.2)
    assert arrays(run.folder)


@pytest.mark.slow
def test_each_worker_resumes_with_the_state_that_its_own_lesson_kept(tmp_path):
    path = tmp_path / "feedback.py"
    path.write_text(Path(scratch.__file__).read_text() + runs.FEEDBACK)
    common = {**SYNTHETIC, "limit": 256, "impl": str(path), "epochs": 2}
    names = ("whole", "parts")
    trainings = [{**common, "out": names[0]}, {**common, "out": names[1], "epochs": 1}, {**common, "resume": names[1]}]
    done = train_together(2, trainings, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    whole, parts = (arrays(tmp_path / name) for name in names)
    np.testing.assert_equal(parts, whole)
    assert any((whole[name] != whole[name.replace("/0/", "/1/", 1)]).any() for name in whole if "state/0" in name)


def resume(folder, others, epochs):
    """Continue a run with workers of which only worker 0 has its folder. others: number of other workers."""
    words = [*TRAIN, "--kvstore", "mpi", "--resume", folder.name, "--device", "cpu", "--epochs", epochs]
    return mpiexec((1, *words), (others, "-wdir", "/", *words), cwd=folder.parent)


@pytest.mark.slow
def test_three_workers_continue_a_run_of_two_as_three_contexts_would(two, tmp_path):
    folder, alone = (shutil.copytree(two, tmp_path / name) for name in ("run", "alone"))
    done = resume(folder, 2, 2)
    assert done.returncode == 0 and "workers 3 instead of 2" in done.stderr, done.stderr
    train(resume=alone, gpus=3, device="cpu", epochs=2)
    assert_same_except_for_rounding(folder, alone, steps=4)


@pytest.mark.slow
def test_a_finished_run_that_two_workers_resume_ends_with_status_0(two, tmp_path):
    folder = shutil.copytree(two, tmp_path / "run")
    before = bits(folder)
    for _ in range(2):
        done = resume(folder, 1, 1)
        assert done.returncode == 0, done.stderr
    assert bits(folder) == before


@pytest.mark.skipif(startup.cores() < 2, reason="needs 2 cores")
@pytest.mark.slow
@pytest.mark.parametrize("own_cores", [True, False])
def test_workers_share_the_threads_of_the_cores_that_they_share(own_cores):
    code = f"""
import os
from mpi4py import MPI
if {own_cores}:  # as srun may start them
    os.sched_setaffinity(0, [sorted(os.sched_getaffinity(0))[MPI.COMM_WORLD.rank]])
from gluon_mgpu.compat import startup
from gluon_mgpu.training.workers import join
with join("mpi"):
    assert startup._plan.processes == {1 if own_cores else 2}
"""
    done = runs.finished(*runs.mpiexec((2, sys.executable, "-c", code)))
    assert done.returncode == 0, done.stderr
