"""Settings that MXNet reads when it loads: each claim is checked in a process of its own."""

import os
import subprocess
import sys
import textwrap

import pytest


def python(code, timeout=120, **environment):
    """Run code in a new process whose environment holds these engine settings and no others."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "MXNET_", "MALLOC_"))}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


TRAIN = """
    from gluon_mgpu import scratch
    scratch.train(2, 64, 0.1, epochs=1, dataset="synthetic", limit=640, device="cpu")
"""
MULTIPLY = """
    import mxnet as mx
    products = [mx.nd.ones((600, 600), mx.cpu(i % 2)) for i in range(2)]
    for _ in range(10):
        products = [mx.nd.dot(x, x) / 600 for x in products]
    print(*(x.mean().asscalar() for x in products))
"""


def test_two_contexts_multiply_side_by_side_without_hanging_where_the_user_set_two_threads():
    code = "import gluon_mgpu; gluon_mgpu.configure(contexts=2)\n" + textwrap.dedent(MULTIPLY)
    done = python(code, timeout=60, OMP_NUM_THREADS="2")  # without configure it hangs
    assert done.stdout == "1.0 1.0\n", done.stderr
    assert done.stderr.count("OMP_NUM_THREADS=2 is overruled: 1") == 1


@pytest.mark.parametrize(
    "setting",
    [
        {"OMP_NUM_THREADS": "2"},
        {"OMP_NUM_THREADS": "2,2", "OMP_NESTED": "true", "OMP_DYNAMIC": "true"},
        {"MXNET_OMP_MAX_THREADS": "4"},
        {"MXNET_CPU_WORKER_NTHREADS": "3", "OMP_NUM_THREADS": "2"},
        {"MXNET_ENGINE_TYPE": "ThreadedEngine", "OMP_NUM_THREADS": "2"},
        {"MXNET_ENGINE_TYPE": "NaiveEngine"},
    ],
    ids=str,
)
def test_training_on_two_contexts_ends_whatever_the_environment_holds(setting):
    done = python(TRAIN, **setting)
    assert done.returncode == 0, done.stderr
    assert "epoch 1, time:" in done.stdout
    for name in set(setting) & {"OMP_NUM_THREADS", "MXNET_OMP_MAX_THREADS"}:
        assert f"{name}={setting[name]} is overruled" in done.stderr


@pytest.mark.parametrize(
    "first",
    [
        "from gluon_mgpu import numpy_names; numpy_names.lend(); import mxnet",
        "import ctypes; ctypes.CDLL('libgomp.so.1')",
    ],
)
def test_training_refuses_in_one_line_where_openmp_was_loaded_with_two_threads_first(first):
    done = python(f"{first}\n" + textwrap.dedent(TRAIN), timeout=60, OMP_NUM_THREADS="2")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert (
        "2 CPU contexts can hang" in last and "gluon_mgpu.configure(contexts=2)" in last and "epoch" not in done.stdout
    )


def test_mxnet_may_be_imported_first_where_its_threads_are_safe():
    first = "from gluon_mgpu import numpy_names; numpy_names.lend(); import mxnet\n"
    done = python(first + textwrap.dedent(TRAIN), OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("CPU contexts will take turns") == 1


LOSS = """
    from gluon_mgpu import scratch
    epochs = scratch.train(1, 64, 0.2, epochs=1, dataset="synthetic", limit=1500, device="cpu", seed=1)
    print(epochs[0].train_loss)
"""


@pytest.fixture(scope="module")
def usual():
    return python(LOSS)


@pytest.mark.parametrize(
    "setting",
    [
        {"OMP_DYNAMIC": "true"},
        {"OMP_THREAD_LIMIT": "1"},
        {"OMP_MAX_ACTIVE_LEVELS": "0"},
        {"OMP_NUM_THREADS": "abc"},
        {"OMP_NUM_THREADS": "2,2"},
        {"OMP_NUM_THREADS": "0"},
        {"OMP_NUM_THREADS": ""},
    ],
    ids=str,
)
def test_one_context_trains_to_the_usual_loss_whatever_the_environment_holds(setting, usual):
    done = python(LOSS, **setting)
    assert done.returncode == 0, done.stderr
    # Another number of threads sums in another order, which is all that may differ.
    assert float(done.stdout.split()[-1]) == pytest.approx(float(usual.stdout.split()[-1]), rel=1e-4)


@pytest.mark.parametrize("setting", [{"OMP_PROC_BIND": "true"}, {"GOMP_CPU_AFFINITY": "0"}], ids=str)
def test_no_setting_binds_the_workers_of_all_contexts_to_one_core(setting):
    code = textwrap.dedent(TRAIN) + textwrap.dedent("""
        import os
        print(min(len(os.sched_getaffinity(int(thread))) for thread in os.listdir("/proc/self/task")))
    """)
    done = python(code, **setting)
    assert int(done.stdout.split()[-1]) == len(os.sched_getaffinity(0)), done.stderr
    assert f"{list(setting)[0]}={list(setting.values())[0]} is overruled" in done.stderr


def test_what_configure_set_itself_is_not_taken_for_the_users():
    code = """
        import os, gluon_mgpu
        for contexts in (1, 2, 1, 2):
            gluon_mgpu.configure(contexts)
        print(os.environ["OMP_NUM_THREADS"])
    """
    done = python(code)
    assert (done.stdout, done.stderr) == ("1\n", "")


SHOW = """
    import os, gluon_mgpu
    gluon_mgpu.configure(contexts={contexts})
    print(os.environ["OMP_NUM_THREADS"], os.environ.get("MXNET_CPU_TEMP_COPY"))
"""


@pytest.mark.parametrize(
    "contexts, setting, shown",
    [
        (2, {}, "1 64"),
        (None, {}, "1 64"),
        (2, {"MXNET_CPU_TEMP_COPY": "96"}, "1 96"),
        (1, {}, f"{len(os.sched_getaffinity(0))} None"),
        (1, {"OMP_NUM_THREADS": "7"}, "7 None"),
        (1, {"OMP_NUM_THREADS": "7", "MXNET_CPU_WORKER_NTHREADS": "2"}, "1 None"),
    ],
)
def test_what_the_user_set_is_kept_where_it_is_safe(contexts, setting, shown):
    assert python(SHOW.format(contexts=contexts), **setting).stdout.strip() == shown


@pytest.mark.parametrize(
    "contexts, setting, spins",
    [
        (1, {}, "20000"),
        (1, {"GOMP_SPINCOUNT": "5"}, "5"),
        (1, {"OMP_WAIT_POLICY": "active"}, "None"),
        (2, {}, "None"),
    ],
)
def test_waiting_openmp_threads_spin_briefly_unless_the_user_says_how(contexts, setting, spins):
    code = f"import os, gluon_mgpu; gluon_mgpu.configure({contexts}); print(os.environ.get('GOMP_SPINCOUNT'))"
    assert python(code, **setting).stdout.strip() == spins


OVERLAP = """
    import json, sys, gluon_mgpu
    gluon_mgpu.configure(2)
    import mxnet as mx
    from mxnet import nd, profiler
    from gluon_mgpu import scratch
    replicas = scratch.Replicas([mx.cpu(0), mx.cpu(1)])
    X, y = nd.random.uniform(shape=(128, 1, 28, 28)), nd.zeros(128)
    replicas.train_batch(X, y, 0.1)
    nd.waitall()
    profiler.set_config(profile_imperative=True, filename=sys.argv[1])
    profiler.set_state("run")
    for _ in range(4):
        replicas.train_batch(X, y, 0.1)
    nd.waitall()
    profiler.set_state("stop")
    profiler.dump()
    spans, began = {0: [], 1: []}, {}
    for event in json.load(open(sys.argv[1]))["traceEvents"]:
        if event.get("name") == "ImperativeBulk":  # the backward pass of one context
            if event["ph"] == "B":
                began[event["pid"]] = event["ts"]
            elif event["ph"] == "E":
                spans[event["pid"]].append((began.pop(event["pid"]), event["ts"]))
    assert len(spans[0]) == len(spans[1]) == 4, spans
    print(sum(max(0, min(b, d) - max(a, c)) for a, b in spans[0] for c, d in spans[1]))
"""


def test_backward_passes_of_two_contexts_overlap_and_do_not_with_stock_temporary_space(tmp_path):
    code = OVERLAP.replace("sys.argv[1]", repr(str(tmp_path / "profile.json")))
    ours, stock = python(code), python(code, MXNET_CPU_TEMP_COPY="4")
    assert int(ours.stdout) > 0, ours.stderr
    assert int(stock.stdout) == 0, stock.stderr


def test_the_allocator_maps_no_array_of_its_own_once_configured():
    mapped = """
        import ctypes, gluon_mgpu
        class Info(ctypes.Structure):  # glibc's struct mallinfo; hblks counts the mapped arrays
            _fields_ = [(name, ctypes.c_int) for name in "arena ordblks smblks hblks a b c d e f".split()]
        libc = ctypes.CDLL(None)
        libc.malloc.restype, libc.malloc.argtypes, libc.mallinfo.restype = ctypes.c_void_p, [ctypes.c_size_t], Info
        def own_mapping():
            before = libc.mallinfo().hblks
            libc.malloc(100 << 20)
            return libc.mallinfo().hblks - before
        first = own_mapping()
        gluon_mgpu.configure(2)
        print(first, own_mapping())
    """
    assert python(mapped).stdout.strip() == "1 0"
    assert python(mapped, MALLOC_MMAP_MAX_="65536").stdout.strip() == "1 1"  # the user's own is kept


def test_a_missing_mxnet_is_one_line():
    code = """
        import importlib.util
        find = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *rest: None if name == "mxnet" else find(name, *rest)
        from gluon_mgpu.commands.main import train
        train(["--gpus", "2"])
    """
    done = python(code)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: MXNet is not installed: run `make install`, or `pip install --no-deps mxnet==1.9.1`\n"


def test_configure_knows_the_number_of_contexts_from_an_earlier_call():
    code = """
        import os, gluon_mgpu
        gluon_mgpu.configure(contexts=1)
        from gluon_mgpu import scratch
        print(os.environ["OMP_NUM_THREADS"])
        scratch.train(2, 64, 0.1, epochs=1, dataset="synthetic", limit=640, device="cpu")
    """
    done = python(code, OMP_NUM_THREADS="2")
    assert done.stdout == "2\n" and done.returncode == 1
    assert "2 CPU contexts can hang" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("users", [{}, {"OMP_NUM_THREADS": "2", "OMP_PROC_BIND": "true"}])
def test_another_process_gets_the_users_environment_and_not_what_configure_made_of_it(users):
    done = python(
        """
        import os
        from gluon_mgpu.runtime import engine
        users = dict(os.environ)
        engine.configure(1)
        engine.configure(2)
        assert os.environ != users
        assert engine.users_environment() == users
        os.environ["OMP_NUM_THREADS"] = "7"
        assert engine.users_environment() == {**users, "OMP_NUM_THREADS": "7"}
        """,
        **users,
    )
    assert done.returncode == 0, done.stderr
