"""Runs programs in their own processes, because MXNet reads its settings only once per process."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from gluon_mgpu.support import subprocesses
from gluon_mgpu.support.errors import UsageError

SETTINGS = ("OMP_", "GOMP_", "MXNET_", "MALLOC_")


def program(text):
    """Code without its indentation, to which other code can be added."""
    return textwrap.dedent(text).lstrip()


# Two contexts, which can hang if OpenMP has two threads; prints "1.0 1.0".
PRODUCTS = program("""
    import mxnet as mx
    products = [mx.nd.ones((600, 600), mx.cpu(i)) for i in range(2)]
    for _ in range(10):
        products = [mx.nd.dot(x, x) / 600 for x in products]
    print(*(x.mean().asscalar() for x in products))
""")

# Appended to scratch.py: rounds gradients before they are added, and keeps what each device has not sent yet.
FEEDBACK = """

copy_params, add = get_params, allreduce
rests = {}


def get_params(params, ctx):
    rests[ctx] = {p.shape: nd.zeros_like(p).as_in_context(ctx) for p in params}
    return copy_params(params, ctx)


def allreduce(data):
    for grad in data:
        rest = rests[grad.context][grad.shape]
        rest += grad
        grad[:] = nd.round(16 * rest) / 16
        rest -= grad
    add(data)


def state(device):
    return {str(shape): rest for shape, rest in [*rests.values()][device].items()}
"""


def finished(*words, **options):
    """Run a program to its end. Returns its status and what it printed. options: passed to subprocess.run."""
    options = {"capture_output": True, "text": True, "timeout": 300, **options}
    return subprocess.run([*map(str, words)], **options)


def gluon_mgpu(*words, **options):
    """`gluon-mgpu WORDS`, finished."""
    return finished(sys.executable, "-m", "gluon_mgpu", *words, **options)


def write_program(path, code):
    """Write an executable shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{code}\n")
    path.chmod(0o755)


def python(code, *arguments, **environment):
    """Run code in a new process, which has these settings of the engine and no others."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(SETTINGS)}
    words = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    return finished(*words, env={**kept, **environment})


def output(code, *arguments, **environment):
    """Run code in a new process, as `python` does, and return its standard output. It must end with status 0."""
    done = python(code, *arguments, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


PROFILE = """
import json
import sys
import gluon_mgpu
gluon_mgpu.configure(2)
import mxnet as mx
from gluon_mgpu import partition, scratch
sys.path.append(sys.argv[1])
from bench import timeline
ctx = [mx.cpu(0), mx.cpu(1)]
X, y = mx.nd.random.uniform(shape=(256, 1, 28, 28)), mx.nd.zeros(256)
{setup}
step()
with timeline.recorded() as spans:
    for _ in range(4):
        step()
print(json.dumps(spans))
"""


def overlap(setup, operators):
    """Microseconds during which both contexts are running one of the operators. setup: code that defines step."""
    recorded = json.loads(output(PROFILE.format(setup=textwrap.dedent(setup)), str(ROOT / "scripts")))
    spans = [[span[2:] for span in recorded if span[0] == context and span[1] in operators] for context in (0, 1)]
    assert all(spans), spans
    return sum(max(0, min(b, d) - max(a, c)) for a, b in spans[0] for c, d in spans[1])


# What programs and commands print


def call(capture, command, *words, program="gluon-mgpu"):
    """(exit status, standard output, standard error) of a command, called in this process."""
    with pytest.raises(SystemExit) as ended:
        command.main([*map(str, words)], prog_name=program)
    return (ended.value.code, *capture.readouterr())


def error(capture, command, *words, status=2):
    """The error of a command that fails: one line on standard error, and nothing on standard output."""
    found, out, err = call(capture, command, *words)
    assert (found, out, err.count("\n")) == (status, "", 1), err
    assert err.startswith("error: ")
    return err.removeprefix("error: ")


def refuses(name, function, *arguments, **options):
    """The UsageError with which a function refuses arguments: one line, which names the setting `name`."""
    with pytest.raises(UsageError) as caught:
        function(*arguments, **options)
    line = str(caught.value)
    assert caught.value.name == name and "\n" not in line and len(line) < 1000
    return caught.value


def arrays(text):
    """[(array, context)] of the NDArrays printed in a text."""
    found = []
    for numbers, shape, context in re.findall(r"(^\[[^<]*)<NDArray ([\dx]+) @(\w+\(\d+\))>", text, re.M):
        values = np.array(re.sub(r"[\[\]]", " ", numbers).split(), float)
        found.append((values.reshape([int(n) for n in shape.split("x")]), context))
    return found


# Runs with several workers

ROOT = Path(__file__).parents[1]
TRAIN = [sys.executable, str(ROOT / "scripts/train.py")]
MPIEXEC = str(Path(sys.executable).with_name("mpiexec"))
FILES = ("cmdline", "environ")  # in /proc/PID
HORIZON = 240  # seconds, on a busy machine
needs_mpi = pytest.mark.skipif(not importlib.util.find_spec("mpi4py"), reason="mpi4py is missing: make dev")


def mpiexec(*kinds):
    """The command line of mpiexec. kinds: (number of workers, *command) for each kind of worker."""
    words = []
    for count, *command in kinds:
        words += [":", "-n", count, *command]
    return [MPIEXEC, *map(str, words[1:])]


class Run(subprocess.Popen):
    """If its `with` block fails, the run ends."""

    def __exit__(self, kind, error, traceback):
        if error:
            self.kill()
        super().__exit__(kind, error, traceback)


def start(line, environment=None, stdin=None):
    """The run as a Popen."""
    environment = {**subprocesses.users_environment(), "PYTHONUNBUFFERED": "1", **(environment or {})}
    streams = {"stdin": stdin, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return Run(line, env=environment, cwd=ROOT, start_new_session=True, **streams)


def processes(mark):
    """{rank: pid} of the workers of a run. mark: one of their arguments."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            arguments, variables = ((folder / name).read_text(errors="replace").split("\0") for name in FILES)
        except OSError:
            continue
        ranks = [variable.partition("=")[2] for variable in variables if variable.startswith("PMI_RANK=")]
        if mark in arguments and ranks and alive([folder.name]):
            found[int(ranks[0])] = int(folder.name)
    return found


def alive(pids):
    """The processes that have not ended."""
    found = []
    for pid in pids:
        with suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX":
                found.append(pid)
    return found


def wait(done, seconds=HORIZON):
    """Wait until done(). Raises AssertionError if that takes more than `seconds` seconds."""
    until = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < until, f"not within {seconds} s"
        time.sleep(0.05)
