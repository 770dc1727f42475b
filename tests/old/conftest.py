import json
import sys
import textwrap
from types import SimpleNamespace

import pytest
from forks import Forks
from runs import finished

from gluon_mgpu.support import subprocesses


def environment():
    users = subprocesses.users_environment()
    users.pop("MXNET_CPU_TEMP_COPY", None)  # pytest-xdist's workers inherit what conftest.py sets
    return users


def write(folder, text):
    path = folder / "old.py"
    path.write_text(textwrap.dedent(text))
    return path


@pytest.fixture
def program(tmp_path):
    """program(text, *arguments, options=..., input=..., **environment) writes a program and runs it
    in this environment, because it takes minutes to make another one."""

    def start(text, *arguments, options=(), by_python=False, input=None, **changes):
        start = [] if by_python else ["-m", "gluon_mgpu", "run", "--here", *map(str, options)]
        options = {"env": {**environment(), **changes}, "cwd": tmp_path, "input": input}
        return finished(sys.executable, *start, write(tmp_path, text), *arguments, **options)

    return start


@pytest.fixture(scope="session")
def prepared():
    with Forks("import mxnet\n", "-m", "gluon_mgpu", "run", "--here", env=environment()) as forks:
        yield forks


@pytest.fixture
def forked(tmp_path, prepared):
    """forked(text) writes a program and runs it as `program` does, but in a fork that has imported mxnet."""

    def start(text):
        status, out, err = prepared.run([sys.executable, write(tmp_path, text)], folder=tmp_path)
        return SimpleNamespace(returncode=status, stdout=out, stderr=err)

    return start


@pytest.fixture(scope="module")
def printed(request, tmp_path_factory):
    """What each of the module's PROGRAMS printed, {name: text}. One process runs all of them, because it takes seconds
    to start."""
    folder = tmp_path_factory.mktemp("programs")
    programs = {name: textwrap.dedent(text) for name, (text, _) in request.module.PROGRAMS.items()}
    (folder / "old.py").write_text(RUN_ALL)
    run = finished(
        sys.executable, "-m", "gluon_mgpu", "run", "--here", "old.py", input=json.dumps(programs), cwd=folder
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


RUN_ALL = """
import contextlib, io, json, sys, traceback
printed = {}
for name, text in json.load(sys.stdin).items():
    with contextlib.redirect_stdout(io.StringIO()) as output:
        try:
            exec(text, {"__name__": "__main__"})
        except Exception:
            traceback.print_exc(file=output)
    printed[name] = output.getvalue()
print(json.dumps(printed))
"""
