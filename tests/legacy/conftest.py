import sys
import textwrap

import pytest
from runs import finished

from gluon_mgpu.runtime import subprocesses


@pytest.fixture
def program(tmp_path):
    """program(text, *arguments, options=..., input=..., **environment) writes a program and runs it."""

    def start(text, *arguments, options=(), by_python=False, input=None, **environment):
        path = tmp_path / "old.py"
        path.write_text(textwrap.dedent(text))
        start = [] if by_python else ["-m", "gluon_mgpu", "run", *map(str, options)]
        users = subprocesses.users_environment()
        users.pop("MXNET_CPU_TEMP_COPY", None)  # pytest-xdist's workers inherit what conftest.py sets
        options = {"env": {**users, **environment}, "cwd": tmp_path, "input": input}
        return finished(sys.executable, *start, path, *arguments, **options)

    return start
