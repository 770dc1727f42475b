"""launch.py starts all processes of a run, and ends all of them together."""

import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest
import runs

PROMISED = 30  # seconds within which all processes must exit, whatever happens to one of them
ALL = ["scheduler", "server0", "worker0", "worker1"]
SOONER = runs.sooner()

# The program that a test's processes run instead of MXNet: it writes facts about itself to a file, then runs BODY.
STAND_IN = """
import json, os, signal, subprocess, sys, time
sys.path.insert(0, "ROOT")
folder, role = sys.argv[1], os.environ["DMLC_ROLE"]
me, got = role + os.environ.get("DMLC_TASK_ID", ""), []

def tell(name, what=True):
    with open(f"{folder}/{name}.new", "w") as file:
        json.dump(what, file)
    os.rename(f"{folder}/{name}.new", f"{folder}/{name}")

def note(which, _):
    got.append(which)
    tell(f"{me}.signals", got)

def until(condition):
    while not condition():
        time.sleep(0.02)

def told(name):
    return os.path.exists(f"{folder}/{name}")

tell(me, {"pid": os.getpid(), "session": os.getsid(0), "environment": dict(os.environ)})
BODY
"""


class Run:
    """launch.py with stand-ins that run `body`."""

    def __init__(self, folder):
        self.folder, self.process = folder, None

    def start(self, body, *options, launcher=runs.LAUNCH, stdin=subprocess.DEVNULL, **environment):
        program = self.folder / "stand_in.py"
        program.write_text(STAND_IN.replace("BODY", textwrap.dedent(body)).replace("ROOT", str(runs.ROOT)))
        line = [*launcher, *options, "--", sys.executable, "-S", program, self.folder]
        self.process = runs.start(line, environment, stdin=stdin)
        return self

    def told(self, name):
        path = self.folder / name
        return json.loads(path.read_text()) if path.exists() else None

    def wait_for(self, *names):
        runs.wait(lambda: all(self.told(name) for name in names), PROMISED)
        return {name: self.told(name) for name in names}

    def end(self, typed=None):
        """Exit status, standard output, lines of standard error."""
        out, err = self.process.communicate(typed, timeout=PROMISED)
        return self.process.returncode, out, err.splitlines()

    def interrupt(self, which=signal.SIGINT):
        """Send a signal to the launcher, once all processes are ready to record signals."""
        self.wait_for(*(f"{name}.ready" for name in ALL))
        self.process.send_signal(which)

    def left(self):
        """The processes that still run."""
        names = [name for name in (*ALL, "grandchild") if self.told(name)]
        return [name for name in names if runs.alive([self.told(name)["pid"]])]


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path)
    yield run
    if run.process and run.process.poll() is None:
        run.process.kill()  # its processes end with it: a test below shows that
        run.process.communicate()


def test_every_process_gets_the_environment_of_its_role(run):
    variables = {"PORT": "9777", "DMLC_USE_KUBERNETES": "1", "DMLC_TASK_ID": "7", "A_USERS_OWN": "x"}
    run.start("", "--workers", "3", "--servers", "2", **variables)
    assert run.end() == (0, "", [])
    names = ["scheduler", "server0", "server1", "worker0", "worker1", "worker2"]
    told = run.wait_for(*names)
    expected = {"DMLC_NODE_HOST": "127.0.0.1", "DMLC_NUM_WORKER": "3", "DMLC_NUM_SERVER": "2", "A_USERS_OWN": "x"}
    for name in names:
        environment = told[name]["environment"]
        assert expected.items() <= environment.items()
        assert environment["DMLC_ROLE"] + environment.get("DMLC_TASK_ID", "") == name
        assert not {"PORT", "DMLC_USE_KUBERNETES"} & environment.keys()
    assert len({told[name]["environment"]["DMLC_PS_ROOT_PORT"] for name in names}) == 1
    assert len({told[name]["session"] for name in names} | {os.getsid(0)}) == 7


def test_only_workers_have_standard_output_and_the_first_has_standard_input(run):
    says = 'os.write(sys.stdout.fileno(), f"{me} {sys.stdin.read()}\\n".encode())'
    status, out, err = run.start(says, stdin=subprocess.PIPE).end("typed")
    assert (status, sorted(out.splitlines())) == (0, ["worker0 typed", "worker1 "])
    assert sorted(err) == ["scheduler ", "server0 "]


STUBBORN = """
if me == "worker0":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    tell("grandchild", {"pid": child.pid})
if me == "server0":
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(60)
"""


@pytest.mark.parametrize("name", ["scheduler", "server0", "worker1"])
def test_if_one_process_is_killed_one_line_names_it_and_all_end_even_stopped_and_stubborn_ones(run, name):
    run.start(STUBBORN, launcher=SOONER)
    pid = run.wait_for("grandchild", *ALL)[name]["pid"]
    os.kill(pid, signal.SIGKILL)
    shown = name.replace("0", " 0").replace("1", " 1")
    status, out, (error,) = run.end()
    assert (status, out) == (1, "") and all(part in error for part in (shown, str(pid), "SIGKILL"))
    assert not run.left()


def test_of_the_errors_that_the_processes_report_the_first_is_the_only_line(run):
    reports = """
    from gluon_mgpu.runtime import log
    until(lambda: me == "worker1" or told("failed"))
    log.error(f"{me} has a reason")
    tell("failed")
    time.sleep(0.2)
    os._exit(2)
    """
    assert run.start(reports, launcher=SOONER).end() == (2, "", ["error: worker1 has a reason"])


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
@pytest.mark.parametrize("user, error", [(0, "mine"), (65534, "worker 1 (process ")])
def test_an_error_that_another_user_of_the_machine_sends_is_ignored(run, user, error):
    run.start("until(lambda: told('sent'))\nif me == 'worker1': sys.exit(3)", launcher=SOONER)
    environment = run.wait_for(*ALL)["worker1"]["environment"]
    code = f"import os, sys; sys.path.insert(0, {str(runs.ROOT)!r}); from gluon_mgpu.runtime import log; "
    line = [sys.executable, "-S", "-c", f"{code}os.setuid({user}); log.error('mine')"]
    sent = subprocess.run(line, env=environment, capture_output=True, text=True)
    assert (sent.returncode, sent.stdout, sent.stderr) == (0, "", "" if user == 0 else "error: mine\n")
    (run.folder / "sent").write_text("true")
    status, _, (said,) = run.end()
    assert status == 1 and said.startswith(f"error: {error}")


FAILS = """
n = len([name for name in os.listdir(folder) if name.startswith("start")])
if me == "worker1":
    tell(f"start{n}", os.environ.get("GLUON_MGPU_RESTARTED"))
    until(lambda: all(map(told, ["scheduler", "server0", "worker0"])))
    FAILURE
time.sleep(60)
"""


def starts(run):
    return [run.told(name.name) for name in sorted(run.folder.glob("start*"))]


@pytest.mark.parametrize("status, times", [(1, 3), (2, 1), (130, 1)])
def test_a_failure_is_restarted_so_often_and_a_wrong_command_and_an_interrupt_are_not(run, status, times):
    run.start(FAILS.replace("FAILURE", f"sys.exit({status})"), "--restarts", "2", launcher=SOONER)
    assert run.end()[0] == status and starts(run) == [None, "1", "1"][:times] and not run.left()


def test_ctrl_c_ends_a_run_instead_of_restarting_it(run):
    failure = "sys.exit(1) if n == 0 else time.sleep(60)"
    run.start(FAILS.replace("FAILURE", failure), "--restarts", "5", launcher=runs.sooner(delay=60))
    runs.wait(lambda: starts(run) and not run.left(), PROMISED)
    run.process.send_signal(signal.SIGINT)
    assert run.end()[0] in (1, 130) and not run.left()  # 1: if the signal came before the launcher waited


@pytest.mark.parametrize("name, status, launchers", [("worker0", 2, 2), ("worker1", 3, 1), ("server0", 2, 1)])
def test_the_exit_status_is_that_of_the_worker_that_failed_first(run, name, status, launchers):
    first = f'if me == "{name}": tell("failed"); os._exit({status})\n'
    then = f'until(lambda: told("failed")); time.sleep(0.5); sys.exit(1 if {status} == 2 else 2)'
    found, _, (line,) = run.start(first + then, launcher=SOONER).end()
    assert found == launchers
    assert line.startswith(f"error: {name[:-1]} {name[-1]} ") and line.endswith(f"status {status}")


@pytest.mark.parametrize("does, status", [("time.sleep(60)", 0), ("time.sleep(0.5); sys.exit(1)", 1)])
def test_a_server_that_does_not_end_or_fails_after_the_workers_is_named_and_ended(run, does, status):
    found, _, (line,) = run.start(f'if me == "server0": {does}', launcher=SOONER).end()
    assert found == status and line.startswith("error: server 0 ") == bool(status)
    assert "server 0 (process " in line and not run.left()


NOTES = """
for which in (signal.SIGINT, signal.SIGTERM):
    signal.signal(which, note)
tell(f"{me}.ready")
"""
ONCE = {name: [signal.SIGINT if "worker" in name else signal.SIGTERM] for name in ALL}


def signals_by_name(run):
    return {name: run.told(f"{name}.signals") for name in ALL}


@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_reaches_each_worker_once_and_the_other_processes_end_after_them(run, which):
    ends = 'until(lambda: got)\nif role == "worker": time.sleep(0.5); sys.exit(130)'
    run.start(NOTES + ends).interrupt(which)
    assert run.end() == (130, "", [])
    assert signals_by_name(run) == ONCE and not run.left()


def test_a_second_ctrl_c_ends_all_at_once(run):
    run.start(NOTES + "time.sleep(60)").interrupt()
    run.wait_for("worker0.signals", "worker1.signals")
    run.process.send_signal(signal.SIGINT)
    assert run.end() == (130, "", [])
    assert signals_by_name(run) == {**ONCE, "scheduler": None, "server0": None} and not run.left()


def test_workers_that_ignore_ctrl_c_are_named_and_ended(run):
    run.start(NOTES + 'until(lambda: got)\nif me == "worker1": time.sleep(60)', launcher=SOONER).interrupt()
    status, _, (line,) = run.end()
    assert status == 130 and "worker 1 (process " in line and not run.left()


def test_if_the_launcher_is_killed_its_processes_end(run):
    run.start(NOTES + "time.sleep(60)").interrupt(signal.SIGKILL)
    runs.wait(lambda: not run.left(), PROMISED)


SUMS = """
import gluon_mgpu
gluon_mgpu.configure(contexts=1)
import os
import mxnet as mx

store, total = mx.kv.create("dist_sync"), mx.nd.zeros(3)
store.init("x", total)
for step in range(3):
    store.push("x", mx.nd.array([1, 10, 100]) * (int(os.environ["DMLC_TASK_ID"]) + 1 + step))
    store.pull("x", out=total)
    os.write(1, f"{step} {store.num_workers} {total.asnumpy().tolist()}\\n".encode())
"""


def test_any_mxnet_program_can_be_launched_and_its_store_sums_over_the_workers():
    status, out, err = runs.run("dist_sync", 2, program=[sys.executable, "-c", SUMS])
    assert (status, err) == (0, "")
    expected = [f"{step} 2 {[float((3 + 2 * step) * unit) for unit in (1, 10, 100)]}" for step in range(3)]
    assert sorted(out.splitlines()) == sorted(2 * expected)
