import sys
import textwrap

import pytest
from runs import finished

from gluon_mgpu.support import subprocesses


@pytest.fixture(scope="session")
def stock():
    """The environment variables without this package's settings, which pytest-xdist's workers inherit."""
    users = subprocesses.users_environment()
    users.pop("MXNET_CPU_TEMP_COPY", None)
    return users


@pytest.fixture
def program(tmp_path, stock):
    """program(text, *arguments, options=..., input=..., **environment) writes a program and runs it
    in this environment, because it takes minutes to make another one."""

    def start(text, *arguments, options=(), by_python=False, input=None, **changes):
        path = tmp_path / "old.py"
        path.write_text(textwrap.dedent(text))
        words = [] if by_python else ["-m", "gluon_mgpu", "run", "--here", *map(str, options)]
        return finished(sys.executable, *words, path, *arguments, env={**stock, **changes}, cwd=tmp_path, input=input)

    return start
