"""Settings that MXNet reads when it loads. Checks run in separate processes."""

import os

import pytest
from runs import PRODUCTS, program, python, refuses

from gluon_mgpu.compat import startup

CORES = len(os.sched_getaffinity(0))
CONFIGURE = "import gluon_mgpu; gluon_mgpu.configure({})\n"
STOCK = "from gluon_mgpu.compat import startup; startup.use_stock_settings()\nimport mxnet\n"
GOMP = "import ctypes; ctypes.CDLL('libgomp.so.1')\n"
CONVOLUTION = program("""
    from mxnet import autograd, nd
    X, W, b = nd.ones((64, 20, 13, 13)), nd.ones((50, 20, 5, 5)), nd.zeros(50)
    W.attach_grad()
    with autograd.record():
        y = nd.Convolution(X, W, b, kernel=(5, 5), num_filter=50)
    y.backward()
    print(*(f(a).asscalar() for a in (y, W.grad) for f in (nd.min, nd.max)))
""")
ONE_CORE = "import os; print(min(len(os.sched_getaffinity(int(thread))) for thread in os.listdir('/proc/self/task')))"
TWO = (PRODUCTS + ONE_CORE, f"1.0 1.0\n{CORES}\n")  # no setting binds the workers of all contexts to one core
RIGHT = {2: TWO, 1: (CONVOLUTION, f"{20 * 5 * 5}.0 {20 * 5 * 5}.0 {64 * 9 * 9}.0 {64 * 9 * 9}.0\n")}
OF_2_CONTEXTS = ["OMP_NUM_THREADS=2", "OMP_NUM_THREADS=2,2 OMP_NESTED=true OMP_DYNAMIC=true"]
OF_2_CONTEXTS += ["MXNET_CPU_WORKER_NTHREADS=3 OMP_NUM_THREADS=2", "MXNET_ENGINE_TYPE=ThreadedEngine OMP_NUM_THREADS=2"]
OF_2_CONTEXTS += ["MXNET_ENGINE_TYPE=NaiveEngine PYTHONWARNINGS=error PYTHONPATH="]
OF_2_CONTEXTS += ["OMP_PROC_BIND=true GOMP_CPU_AFFINITY=0 MXNET_OMP_MAX_THREADS=4"]
# Without configure, the first of these hangs, and these give wrong results.
OF_1_CONTEXT = [f"OMP_NUM_THREADS=2 OMP_{more}" for more in ("DYNAMIC=true", "THREAD_LIMIT=1", "MAX_ACTIVE_LEVELS=0")]
OF_1_CONTEXT += ["OMP_NUM_THREADS=abc"]
FAST = (OF_2_CONTEXTS[0], OF_1_CONTEXT[0])
ENVIRONMENTS = [
    pytest.param(contexts, text, marks=[pytest.mark.slow] * (text not in FAST))
    for contexts, texts in ((2, OF_2_CONTEXTS), (1, OF_1_CONTEXT))
    for text in texts
]


@pytest.mark.parametrize("contexts, text", ENVIRONMENTS)
def test_contexts_compute_right_and_without_hanging_in_any_environment(contexts, text):
    (code, expected), setting = RIGHT[contexts], dict(part.split("=") for part in text.split())
    done = python(CONFIGURE.format(contexts) + code, **setting)
    assert done.stdout == expected, done.stderr
    for name in setting.keys() & {"OMP_NUM_THREADS", "MXNET_OMP_MAX_THREADS", *startup.BINDING}:
        assert done.stderr.count(f"{name}={setting[name]}") == 1  # a notice says that the setting is ignored


@pytest.mark.slow
@pytest.mark.parametrize("first", [STOCK, GOMP], ids=["stock", "gomp"])
def test_two_contexts_compute_right_also_in_a_process_that_was_not_prepared_for_them(first):
    done = python(first + CONFIGURE.format(2) + PRODUCTS, OMP_NUM_THREADS="2")
    assert done.stdout == "1.0 1.0\n", done.stderr
    assert done.stderr.count("gluon_mgpu.configure(") == (first is STOCK)


@pytest.mark.slow
def test_contexts_with_several_threads_each_are_refused_if_it_is_too_late_to_limit_them():
    done = python(STOCK + CONFIGURE.format(2), OMP_NUM_THREADS="2", MXNET_CPU_WORKER_NTHREADS="2")
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and last.startswith("gluon_mgpu.support.errors.Error: "), last


def test_one_and_then_two_contexts_train_in_one_process_which_says_once_that_they_take_turns():
    code = program("""
        from gluon_mgpu import train
        options = {"dataset": "synthetic", "limit": 60, "batch_size": 30, "epochs": 1, "seed": 1, "device": "cpu"}
        print(*(train(gpus=gpus, **options)[0].train_loss for gpus in (1, 2)))
    """)
    done = python(code + PRODUCTS, OMP_NUM_THREADS="2")
    *_, losses, products = done.stdout.splitlines()
    one, two = map(float, losses.split())
    assert one == pytest.approx(two, rel=1e-6) and products == "1.0 1.0"
    assert done.stderr.count("gluon_mgpu.configure(") == 1


@pytest.mark.parametrize(
    "contexts, processes, setting, expected",
    [
        (2, 1, {}, "1 64 None"),
        pytest.param(None, 1, {}, "1 64 None", marks=pytest.mark.slow),
        (2, 1, {"MXNET_CPU_TEMP_COPY": "96"}, "1 96 None"),
        (1, 1, {}, f"{CORES} None 20000"),
        (1, 1, {"OMP_NUM_THREADS": "2, 1"}, "2, 1 None 20000"),
        (1, 1, {"OMP_NUM_THREADS": "2,"}, f"{CORES} None 20000"),
        (1, 1, {"OMP_NUM_THREADS": "7", "MXNET_CPU_WORKER_NTHREADS": "2"}, "1 None None"),
        (1, 1, {"GOMP_SPINCOUNT": "5"}, f"{CORES} None 5"),
        (1, 1, {"OMP_WAIT_POLICY": "active"}, f"{CORES} None None"),
        (1, 2, {}, f"{max(1, CORES // 2)} None 20000"),
    ],
)
def test_the_settings_suit_the_run_and_the_users_are_kept_if_they_are_safe(contexts, processes, setting, expected):
    code = program(f"""
        import os, gluon_mgpu
        from gluon_mgpu.compat import startup
        startup.plan(processes={processes})
        {f"gluon_mgpu.configure({contexts})" if contexts else "import mxnet"}
        print(*map(os.environ.get, ["OMP_NUM_THREADS", "MXNET_CPU_TEMP_COPY", "GOMP_SPINCOUNT"]))
    """)
    assert python(code, **setting).stdout.strip() == expected


@pytest.mark.parametrize("users", [{}, {"OMP_NUM_THREADS": "2", "OMP_PROC_BIND": "true"}], ids=str)
def test_a_child_process_gets_the_users_environment(users):
    code = program("""
        import os
        from gluon_mgpu.compat import startup
        from gluon_mgpu.support import subprocesses
        users = dict(os.environ)
        for contexts in (1, 2, 1):
            startup.configure(contexts)
        assert os.environ["OMP_NUM_THREADS"] == "1"  # the most contexts count
        assert os.environ != users
        assert subprocesses.users_environment() == users
        os.environ["OMP_NUM_THREADS"] = "7"
        assert subprocesses.users_environment() == {**users, "OMP_NUM_THREADS": "7"}
    """)
    done = python(code, **users)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("OMP_NUM_THREADS") == len(users) // 2  # its own settings are not mistaken for the user's


BAD = ["MXNET_CPU_WORKER_NTHREADS=0", "MXNET_CPU_PRIORITY_NTHREADS=-1", "MXNET_CPU_TEMP_COPY=x", "OMP_STACKSIZE=64K"]


@pytest.mark.parametrize("setting", BAD)
def test_a_variable_with_which_mxnet_hangs_or_crashes_is_refused(setting, monkeypatch):
    name, _, value = setting.partition("=")
    monkeypatch.setenv(name, value)
    assert refuses(name, startup.check_environment).value == value


@pytest.mark.parametrize("name, value", [("DMLC_ROLE", "server"), ("DMLC_ROLE", ""), ("PYTHONOPTIMIZE", "2")])
def test_a_process_in_which_mxnet_would_serve_forever_or_lack_its_docstrings_is_refused(name, value):
    done = python("import gluon_mgpu; gluon_mgpu.configure(1)", **{name: value})
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and "UsageError: " in last and name in last


@pytest.mark.slow
def test_an_interrupt_that_arrives_while_an_array_is_freed_stops_the_program():
    code = program("""
        import gluon_mgpu, signal, time
        from mxnet import nd
        free = nd.NDArray.__del__
        nd.NDArray.__del__ = lambda array: (free(array), signal.raise_signal(signal.SIGINT))
        array = nd.ones(1)
        try:
            del array
            for _ in range(300):  # an interrupt that Python repeats does not end a sleep
                time.sleep(0.1)
            print("ignored")
        except KeyboardInterrupt:
            print("stopped")
    """)
    assert python(code).stdout == "stopped\n"
