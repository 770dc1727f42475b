import os
import subprocess
import sys
from pathlib import Path

FIND = Path(__file__).parents[1] / "scripts" / "find-python.sh"


def find(path, **environment):
    nowhere = {"PATH": str(path), "PYENV_ROOT": "/nonexistent"}
    return subprocess.run(["/bin/sh", str(FIND)], env={**nowhere, **environment}, capture_output=True, text=True)


def test_where_no_python_suits_one_line_says_which_do(tmp_path):
    too_new = tmp_path / "python3"
    too_new.write_text("#!/bin/sh\nexit 1\n")
    too_new.chmod(0o755)
    for environment in ({}, {"PYTHON": "python3"}):
        done = find(tmp_path, **environment)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
        assert "3.9, 3.10, 3.11, 3.12 and 3.13" in done.stderr


def test_a_python_that_does_not_start_is_passed_over_for_one_that_suits(tmp_path):
    broken = tmp_path / "python3.11"
    broken.write_text("#!/bin/sh\nexit 127\n")
    broken.chmod(0o755)
    os.symlink(sys.executable, tmp_path / "python3.9")
    assert find(tmp_path).stdout == f"{tmp_path}/python3.9\n"


def test_a_python_asked_for_by_its_version_is_found_among_pyenvs(tmp_path):
    pyenv = tmp_path / "versions" / "3.12.1" / "bin"
    pyenv.mkdir(parents=True)
    os.symlink(sys.executable, pyenv / "python")
    assert find(tmp_path, PYENV_ROOT=str(tmp_path), PYTHON="python3.12").stdout == f"{pyenv}/python\n"
    assert find(tmp_path, PYENV_ROOT=str(tmp_path), PYTHON="python3.9").returncode == 1
