"""Runs programs in their own processes, because MXNet reads its settings only once per process."""

import os
import subprocess
import sys
import textwrap

from gluon_mgpu.training import timeline

SETTINGS = ("OMP_", "GOMP_", "MXNET_", "MALLOC_")


def program(text):
    """Code without its indentation, to which other code can be added."""
    return textwrap.dedent(text).lstrip()


def finished(*words, **options):
    """A program that has ended, with its status and what it printed. options: of subprocess.run."""
    options = {"capture_output": True, "text": True, "timeout": 300, **options}
    return subprocess.run([*map(str, words)], **options)


def command(*words, **options):
    """The same of `gluon-mgpu WORDS`."""
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
    return finished(*words, env={**kept, **environment}, timeout=60)


def output(code, *arguments, **environment):
    """What code prints on standard output in a new process, as `python` runs it. It must end with status 0."""
    done = python(code, *arguments, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


PROFILE = """
import gluon_mgpu
gluon_mgpu.configure(2)
import mxnet as mx
from gluon_mgpu import implementations, partition, scratch
ctx = [mx.cpu(0), mx.cpu(1)]
X, y = mx.nd.random.uniform(shape=(256, 1, 28, 28)), mx.nd.zeros(256)
{setup}
step()
mx.nd.waitall()
mx.profiler.set_config(profile_imperative=True, filename={file!r})
mx.profiler.set_state("run")
for _ in range(4):
    step()
mx.nd.waitall()
mx.profiler.set_state("stop")
mx.profiler.dump()
"""


def overlap(setup, operators, folder, **environment):
    """Microseconds during which both contexts are running one of the operators. setup: code that defines step."""
    file, spans = folder / "profile.json", ([], [])
    output(PROFILE.format(setup=textwrap.dedent(setup), file=str(file)), **environment)
    for begin, end in timeline.operator_spans(timeline.read_profile(file)):
        if begin["name"] in operators:
            spans[begin["pid"]].append((begin["ts"], end["ts"]))
    assert all(spans), spans
    return sum(max(0, min(b, d) - max(a, c)) for a, b in spans[0] for c, d in spans[1])
