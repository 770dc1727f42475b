"""`gluon-mgpu run` without GPUs: GPU contexts become CPU contexts, several of them do not hang, and what MXNet does
differently on CPUs, or since its early versions, does not change a program or its numbers."""

import sys
import textwrap
from pathlib import Path

import pytest
import runs

from gluon_mgpu.old import environment

PROGRAMS, NUMBERS = (Path(__file__).with_name(f"old_{name}.py") for name in ("programs", "numbers"))


def test_programs_for_gpus_run_without_gpus(tmp_path, stock):
    done = runs.gluon_mgpu("run", "--here", "--gpus", 4, PROGRAMS, cwd=tmp_path, env={**stock, "PYTEST_ADDOPTS": ""})
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count("mx.gpu(i) is CPU context i + 1") == 1


THREADS = """
    import ctypes, threading
    import mxnet as mx
    def threads(index):  # how many OpenMP threads the engine's thread of a CPU context has
        found, done, none = [], threading.Event(), ctypes.c_void_p()
        def ask(*_):
            found.append(ctypes.CDLL("libgomp.so.1").omp_get_max_threads())
            done.set()
        function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(ask)
        context = ctypes.byref((ctypes.c_int * 2)(1, index))
        mx.base._LIB.MXEnginePushSync(function, none, none, context, none, 0, none, 0, none, 0, b"threads")
        done.wait()
        return found[0]
"""
BUSY = """
    products = [mx.nd.ones((600, 600), ctx) for ctx in (mx.cpu(), mx.gpu(0))]
    for _ in range(10):
        products = [mx.nd.dot(x, x) / 600 for x in products]
    print(*(x.mean().asscalar() for x in products), threads(0), threads(1))
    data = mx.gluon.data.ArrayDataset(mx.nd.ones((2, 2)))
    list(mx.gluon.data.DataLoader(data, 2, num_workers=1))  # forks, so MXNet starts new threads
    print(threads(0), threads(1))
"""


@pytest.mark.parametrize(
    "asked",
    [{}, *(pytest.param({n: "2"}, marks=pytest.mark.slow) for n in ("OMP_NUM_THREADS", "MXNET_OMP_MAX_THREADS"))],
)
def test_the_number_of_threads_is_mxnets_own_unless_the_user_sets_it(program, asked):
    ask = f"{textwrap.dedent(THREADS)}print(threads(0), threads(1), os.environ.get('OMP_NUM_THREADS'))"
    use_stock = "from gluon_mgpu.compat import startup\nstartup.use_stock_settings()\n"
    run, stock = program(f"import os{ask}", **asked), program(f"import os\n{use_stock}{ask}", by_python=True, **asked)
    assert run.stdout == stock.stdout != "", run.stderr + stock.stderr


@pytest.mark.slow
def test_a_single_gpu_uses_all_threads_and_the_host_one_so_that_they_do_not_hang(program):
    run = program(THREADS + BUSY, OMP_NUM_THREADS="2")
    assert run.stdout == "1.0 1.0 1 2\n1 2\n", run.stderr


@pytest.mark.slow
def test_two_gpus_do_not_hang_with_two_threads_and_the_program_may_count_none(program):
    code = f"{runs.PRODUCTS.replace('mx.cpu', 'mx.gpu')}print(mx.context.num_gpus())"
    assert program(code, OMP_NUM_THREADS="2").stdout == "1.0 1.0\n0\n"


@pytest.mark.slow
def test_the_numbers_are_those_of_the_same_environment_without_run(tmp_path, stock):
    options = {"cwd": tmp_path, "timeout": 900, "env": {**stock, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}}
    run = runs.finished(sys.executable, "-m", "gluon_mgpu", "run", "--cpu", NUMBERS, "gpu", **options)
    python = runs.finished(environment.find_or_make(cpu=True), NUMBERS, "cpu", **options)
    assert (run.returncode, python.returncode) == (0, 0), run.stderr + python.stderr
    assert run.stdout == python.stdout and run.stdout.count("== ") == 5


ONE_DEVICE = """
    import hashlib, mxnet as mx, numpy as np
    mx.random.seed(0); np.random.seed(0)
    net = mx.gluon.nn.Sequential()
    net.add(mx.gluon.nn.Dense(256, activation="relu"), mx.gluon.nn.Dense(10))
    net.initialize()
    trainer, loss = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.5}), mx.gluon.loss.L2Loss()
    X, y = mx.nd.array(np.random.rand(256, 784)), mx.nd.array(np.random.rand(256, 10))
    for _ in range(20):
        with mx.autograd.record():
            total = loss(net(X), y)
        total.backward()
        trainer.step(256)
    print(hashlib.md5(net[0].weight.data().asnumpy().tobytes()).hexdigest())
"""


@pytest.mark.slow
def test_on_one_device_every_bit_is_that_of_the_environment_without_run_which_sets_no_threads(tmp_path, stock):
    (tmp_path / "old.py").write_text(textwrap.dedent(ONE_DEVICE))
    options = {"cwd": tmp_path, "timeout": 900, "env": stock}
    run = runs.finished(sys.executable, "-m", "gluon_mgpu", "run", "--cpu", "old.py", **options)
    python = runs.finished(environment.find_or_make(cpu=True), "old.py", **options)
    assert run.stdout == python.stdout != "", run.stderr + python.stderr
