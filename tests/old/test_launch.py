"""`gluon-mgpu run --workers N`: an old program that uses kv=dist_sync runs as several processes, which end together."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from runs import alive, finished, wait

from gluon_mgpu.support import subprocesses

RUN = [sys.executable, "-m", "gluon_mgpu", "run"]
SUM = """
    import os, sys, time
    import mxnet as mx
    kv = mx.kv.create("dist_sync")
    kv.init("sum", mx.nd.zeros(2))
    kv.push("sum", mx.nd.ones(2) * (kv.rank + 1))
    out = mx.nd.zeros(2)
    kv.pull("sum", out)
    out.wait_to_read()
"""

# A program that does not import mxnet, whose servers also never end.
WITHOUT_MXNET = """
    import os, sys, time
    if os.environ["DMLC_ROLE"] != "worker":
        time.sleep(600)
"""


@pytest.fixture
def launch(tmp_path):
    """launch(text, *options, wait=...) runs a program; with wait=False, it returns the launcher while that runs. No
    process may be left at the end of the test."""
    started = []

    def start(text, *options, wait=True, **environment):
        path = tmp_path / "old.py"
        path.write_text(textwrap.dedent(text))
        one_write = {"PYTHONUNBUFFERED": ""}  # for each line, so that the workers' lines do not mix
        env = {**subprocesses.users_environment(), **one_write, "LAUNCH_TEST": str(tmp_path), **environment}
        words = [*RUN, "--workers", "2", *options, path]
        if wait:
            return finished(*words, env=env, cwd=tmp_path, timeout=60)
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen([*map(str, words)], env=env, cwd=tmp_path, **streams))
        return started[-1]

    yield start
    for launcher in started:
        launcher.terminate()
        launcher.communicate(timeout=60)
    assert not processes(tmp_path)


def processes(folder):
    """{process ID: role} of the processes of a test that are alive."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = dict(text.partition("=")[::2] for text in path.read_text(errors="replace").split("\0"))
        except OSError:
            continue
        if variables.get("LAUNCH_TEST") == str(folder) and alive([path.parent.name]):
            found[int(path.parent.name)] = variables.get("DMLC_ROLE", "launcher")
    return found


def test_workers_add_up_their_arrays_and_print_one_notice(launch):
    run = launch(f"{SUM}\n    print(out.asnumpy() + mx.nd.zeros(1, mx.gpu(0)).asnumpy())", "--servers", "2")
    assert (run.returncode, run.stdout) == (0, "[3. 3.]\n" * 2)
    assert run.stderr.count("\n") == 1 and "mx.gpu(i) is CPU context i + 1" in run.stderr


@pytest.mark.parametrize(
    "start, failure, status",
    [
        (SUM, "raise KeyError('x')", 1),
        (SUM, "sys.exit(7)", 7),
        (WITHOUT_MXNET, "os.kill(os.getpid(), 9)", 137),
    ],
    ids=["exception", "exit", "signal"],
)
def test_a_worker_that_fails_ends_the_rest_with_its_status(launch, start, failure, status):
    wait = "kv._barrier()" if start == SUM else "time.sleep(60)"
    run = launch(f"{start}\n    if os.environ['DMLC_TASK_ID'] == '1':\n        {failure}\n    {wait}")
    assert run.returncode == status
    assert run.stderr.splitlines()[-1].startswith("error: a worker ")
    assert ("KeyError: 'x'" in run.stderr) == (status == 1)


WAITS = """
    import subprocess
    subprocess.Popen(["sleep", "60"])
    try:
        print("ready", flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        open("saved-" + os.environ["DMLC_TASK_ID"], "w")
        raise
"""


@pytest.mark.parametrize("role", ["server", "scheduler"])
def test_a_killed_process_ends_the_rest(launch, tmp_path, role):
    launcher = launch(WITHOUT_MXNET + WAITS, wait=False)
    assert [launcher.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    [pid] = [pid for pid, kind in processes(tmp_path).items() if kind == role]
    os.kill(pid, signal.SIGKILL)
    assert launcher.wait(20) == 128 + signal.SIGKILL and not processes(tmp_path)
    assert launcher.stderr.read().splitlines()[-1].startswith(f"error: a {role} ")


@pytest.mark.parametrize(
    "start, which", [(SUM, signal.SIGINT), (WITHOUT_MXNET, signal.SIGTERM)], ids=["Ctrl-C", "SIGTERM"]
)
def test_after_ctrl_c_or_sigterm_workers_may_save_and_then_everything_ends(launch, tmp_path, start, which):
    launcher = launch(start + WAITS, wait=False)
    assert [launcher.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    launcher.send_signal(which)
    assert launcher.wait(20) == 128 + which and not processes(tmp_path)
    assert {path.name for path in tmp_path.glob("saved-*")} == {"saved-0", "saved-1"}


def test_nothing_that_the_launcher_started_outlives_it(launch, tmp_path):
    launcher = launch(WITHOUT_MXNET + WAITS.replace('subprocess.Popen(["sleep", "60"])', ""), wait=False)
    assert [launcher.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    assert sorted(processes(tmp_path).values()) == ["launcher", "scheduler", "server", "worker", "worker"]
    launcher.kill()
    wait(lambda: not processes(tmp_path), 10)


def test_an_optimizer_that_the_server_cannot_import_is_an_error(launch):
    run = launch("""
        import mxnet as mx
        class Half(mx.optimizer.SGD): pass
        kv = mx.kv.create("dist_sync")
        kv.set_optimizer(Half(learning_rate=0.5))
        kv.init(0, mx.nd.ones(2))
        kv.push(0, mx.nd.ones(2))
        mx.nd.waitall()
    """)
    assert run.returncode == 1 and "optimizer" in run.stderr and "Half" in run.stderr


def test_workers_receive_arguments_and_modules_run_as_with_python_m(launch, tmp_path):
    (tmp_path / "module.py").write_text("import os, sys; os.environ['DMLC_ROLE'] == 'worker' and print(sys.argv[1:])")
    run = finished(*RUN, "--workers", "2", "-m", "module", "--epochs", "2", cwd=tmp_path)
    assert (run.returncode, run.stdout) == (0, "['--epochs', '2']\n" * 2)


@pytest.mark.parametrize("words", [["--workers", "2", "a.ipynb"], ["--workers", "2", "-"], ["--workers", "0", "a.py"]])
def test_what_workers_cannot_run_is_refused(words):
    run = finished(*RUN, *words)
    assert run.returncode == 2 and run.stderr.count("\n") == 1 and run.stderr.startswith("error: ")
