import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FIND = ROOT / "scripts" / "find-python.sh"


@pytest.fixture(autouse=True)
def uname(tmp_path):
    """Writes a stand-in for uname, where these tests' PATH is."""

    def says(machine):
        program(tmp_path / "uname", f"echo {machine}")

    says("Linux x86_64")
    return says


def program(path, code):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{code}\n")
    path.chmod(0o755)


def find(path, **environment):
    nowhere = {"PATH": str(path), "PYENV_ROOT": "/nonexistent"}
    return subprocess.run(["/bin/sh", str(FIND)], env={**nowhere, **environment}, capture_output=True, text=True)


def test_where_no_python_suits_one_line_says_which_do(tmp_path):
    program(tmp_path / "python3", "exit 1")  # a newer one
    for environment in ({}, {"PYTHON": "python3"}):
        done = find(tmp_path, **environment)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
        assert "3.9, 3.10, 3.11, 3.12 and 3.13" in done.stderr


def test_a_python_that_does_not_start_is_passed_over_for_one_that_suits(tmp_path):
    program(tmp_path / "python3.11", "exit 127")
    os.symlink(sys.executable, tmp_path / "python3.9")
    assert find(tmp_path).stdout == f"{tmp_path}/python3.9\n"


def test_a_python_asked_for_by_its_version_is_found_among_pyenvs(tmp_path):
    pyenv = tmp_path / "versions" / "3.12.1" / "bin"
    pyenv.mkdir(parents=True)
    os.symlink(sys.executable, pyenv / "python")
    assert find(tmp_path, PYENV_ROOT=str(tmp_path), PYTHON="python3.12").stdout == f"{pyenv}/python\n"
    assert find(tmp_path, PYENV_ROOT=str(tmp_path), PYTHON="python3.9").returncode == 1


@pytest.mark.parametrize("machine", ["Linux i686", "Darwin arm64"])
def test_a_machine_that_mxnet_does_not_run_on_is_named_before_a_python_is_sought(tmp_path, uname, machine):
    uname(machine)
    os.symlink(sys.executable, tmp_path / "python3.11")
    done = find(tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert f"this machine is {machine}, " in done.stderr and "x86-64 Linux: use such a one" in done.stderr
    uname("Linux aarch64")  # MXNet has a wheel for it; that this was not tried is said
    done = find(tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}/python3.11\n")
    assert "this machine is Linux aarch64, " in done.stderr


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
def test_where_pip_fails_the_last_line_says_what_a_set_up_needs_and_the_next_one_begins_anew(tmp_path):
    """Without an index pip finds nothing, as without a network."""
    venv = tmp_path / "venv"
    environment = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
    environment = {name: value for name, value in environment.items() if name not in ("MAKEFLAGS", "NUMPY", "PYTHON")}
    done = subprocess.run(
        ["make", "install", f"VENV={venv}", f"PYTHON={sys.executable}"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    ours = [line for line in done.stderr.splitlines() if not line.startswith("make")][-1]
    assert done.returncode == 2 and ours.startswith(f"{venv} is not set up") and "it needs a network" in ours
    assert (venv / "bin" / "python").exists() and not list(venv.glob(".installed*"))


def test_a_python_that_fails_leaves_the_others_their_rows_in_the_table_of_all(tmp_path):
    """With stand-ins for make, which sets up environments, and for the Pythons in these."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    ends = {
        "3.9": "echo '2 passed in 1.00s'",
        "3.10": "echo '1 failed, 1 passed, 3 warnings in 62.00s (0:01:02)'; exit 1",
        "3.12-2.1": "echo ..; kill -SEGV $$",
        "3.13": "echo '2 passed, 1 skipped in 1.00s'",
    }
    for name, suite in ends.items():
        says = f"case $* in *platform*) echo {name[:4]}.1;; *metadata*) echo 2.0;; *pytest*) {suite};; esac"
        program(tmp_path / ".venvs" / name / "bin" / "python", says)
    program(tmp_path / "bin" / "make", "case $* in *3.11*) exit 2;; esac")
    environment = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PYTHONS": "3.9 3.10 3.11 3.12:2.1 3.13"}
    done = subprocess.run([tmp_path / "scripts" / "test-all.sh"], env=environment, capture_output=True, text=True)
    table = [line.split(None, 4) for line in done.stdout.rpartition("\n\n")[2].splitlines()]
    assert done.returncode == 1
    assert [(row[0], row[-1]) for row in table[1:]] == [
        ("3.9.1", "2 passed"),
        ("3.10.1", "1 failed, 1 passed, 3 warnings"),
        ("3.11", "installed"),
        ("3.12.1", "no (139)"),
        ("3.13.1", "2 passed, 1 skipped"),
    ]
    environment["PYTHONS"] = "3.9 3.13"
    assert subprocess.run([tmp_path / "scripts" / "test-all.sh"], env=environment, capture_output=True).returncode == 0
