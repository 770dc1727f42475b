"""The environment of old programs is complete or absent, is made by one process, and keeps what the user adds apart.

A stand-in for Python makes environments at once; one slow test makes a real one.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from runs import finished, wait, write_program
from runs import gluon_mgpu as command

from gluon_mgpu.old import environment, packages
from gluon_mgpu.support import subprocesses
from gluon_mgpu.support.errors import Error

# `python3.8 -c` prints its version. `python3.8 -m venv ... FOLDER` copies this script; so `FOLDER/bin/python -m pip` is
# this script, too. It writes what it is asked to install, and waits or fails if it is told to.
PYTHON = """
case "$*" in
    *"-m venv"*) for folder; do :; done; mkdir -p "$folder/bin" "$folder/lib/python3.8/site-packages"
        cp "$0" "$folder/bin/python" ;;
    *"-m pip"*) echo "$*" >> "$TEST_FOLDER/pip"
        while [ -e "$TEST_FOLDER/wait" ]; do sleep 0.05; done
        if [ -e "$TEST_FOLDER/fail" ]; then echo "ERROR: no such wheel" >&2; exit 1; fi ;;
    *"version_info"*) echo 3.8 ;;
    *) while [ "$1" = -B ]; do shift; done  # pytest may have been started with it
        echo "ran $*" ;;
esac
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a stand-in for Python 3.8, an empty cache, and a space in its name."""
    folder = tmp_path / "a folder"
    write_program(folder / "bin" / "python3.8", PYTHON)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.setenv("PYENV_ROOT", str(folder))
    monkeypatch.setenv("TEST_FOLDER", str(folder))
    (folder / "old.py").touch()
    return folder


def start(folder):
    words = [sys.executable, "-m", "gluon_mgpu", "run", "old.py"]
    return subprocess.Popen(words, cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def installs(folder):
    return (folder / "pip").read_text().splitlines() if (folder / "pip").exists() else []


def test_it_is_made_once_and_has_what_the_table_says(folder):
    runs = [finished(sys.executable, "-m", "gluon_mgpu", "run", "old.py", "x", cwd=folder) for _ in range(2)]
    assert [run.stdout for run in runs] == ["ran old.py x\n"] * 2, runs
    assert " MB" in runs[0].stderr and runs[1].stderr == ""
    [pip] = installs(folder)
    assert set(packages.PINS["3.8"].split()) <= set(pip.split())


def test_two_processes_make_it_once(folder):
    (folder / "wait").touch()
    processes = [start(folder) for _ in range(2)]
    wait(lambda: installs(folder))
    (folder / "wait").unlink()
    assert [process.communicate(timeout=100)[0] for process in processes] == ["ran old.py\n"] * 2
    assert len(installs(folder)) == 1


@pytest.mark.parametrize(
    "end", ["failure", pytest.param("Ctrl-C", marks=pytest.mark.slow), pytest.param("SIGKILL", marks=pytest.mark.slow)]
)
def test_after_a_failure_it_is_made_anew(folder, end):
    (folder / ("fail" if end == "failure" else "wait")).touch()
    process = start(folder)
    wait(lambda: installs(folder))
    if end != "failure":
        process.send_signal(signal.SIGINT if end == "Ctrl-C" else signal.SIGKILL)
    error = process.communicate(timeout=100)[1].splitlines()[-1]
    assert end != "failure" or "no such wheel" in error
    assert process.returncode == {"failure": 1, "Ctrl-C": 130, "SIGKILL": -9}[end]
    assert end == "SIGKILL" or not list(environment.folder().glob("*"))
    for name in ("fail", "wait"):
        (folder / name).unlink(missing_ok=True)
    assert start(folder).communicate(timeout=100)[0] == "ran old.py\n"


def test_other_pins_and_added_packages_have_their_own_and_removal_removes_all(folder, monkeypatch):
    wanted, added = environment.Wanted(), environment.Wanted(extra=("gluoncv==0.10.5",))
    (folder / "list.txt").write_text("mxboard\n")
    from_file = environment.Wanted(file=str(folder / "list.txt"))
    before, *pythons = map(environment.find_or_make, (wanted, added, from_file, added))
    assert len({before, *pythons}) == 3 and len(installs(folder)) == 3
    assert "numpy==" not in installs(folder)[1]  # what the first environment has is not installed again
    monkeypatch.setitem(packages.PINS, "3.8", "numpy==1.19.4 pandas==1.1.5")
    assert environment.find_or_make(wanted) != before
    os.unlink(before)  # as if the Python that it links to had been removed
    assert [" MB: " in line for line in environment.described()] == [True] * 4
    assert command("run", "--environment", "show").stdout.count("\n") == 4
    assert command("run", "--environment", "remove").stdout == "no environments\n"


def test_without_a_python_or_a_writable_cache_the_error_says_what_to_do(folder, monkeypatch):
    (folder / "bin" / "python3.8").unlink()
    with pytest.raises(Error, match="uv"):
        environment.find_or_make(environment.Wanted(python="3.8"))
    write_program(folder / "bin" / "uv", "echo 'error: no connection' >&2; exit 2")
    with pytest.raises(Error, match="no connection"):
        environment.find_or_make(environment.Wanted(python="3.8"))
    (folder / "cache").write_text("a file")
    write_program(folder / "bin" / "python3.8", PYTHON)
    with pytest.raises(Error, match="XDG_CACHE_HOME"):
        environment.find_or_make(environment.Wanted())


def test_beside_cuda_it_has_cuda_unless_the_user_says_cpu(monkeypatch):
    monkeypatch.setattr(packages.cuda, "wheels", lambda: {"mxnet-cu112": "1.9.1"})
    assert {"mxnet-cu112==1.9.1", "nvidia-cudnn-cu11<9"} <= {*packages.required("3.8", cpu=False)}
    assert not any("cu11" in name for name in packages.required("3.8", cpu=True))


@pytest.mark.slow
def test_a_real_one_runs_without_the_package_index_from_a_folder_of_wheels(tmp_path):
    """The wheels that a real environment needs are enough for another one. Both run the program."""
    python = environment.find_or_make(environment.Wanted(cpu=True))
    frozen = finished(python, "-I", "-m", "pip", "list", "--format=freeze").stdout.split()
    download = [python, "-I", "-m", "pip", "download", "--no-deps", "--dest", tmp_path / "wheels", *frozen]
    assert finished(*download, timeout=1800).returncode == 0
    (tmp_path / "old.py").write_text("import numpy, mxnet as mx; print(numpy.float, mx.gpu(0))")
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "wheels"), "PIP_CONFIG_FILE": os.devnull}
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    env = {**subprocesses.users_environment(), **offline, **cache}
    run = command("run", "--cpu", tmp_path / "old.py", env=env, timeout=1800)
    assert run.stdout == "<class 'float'> cpu(1)\n", run.stderr
    assert Path(tmp_path / "cache" / "gluon_mgpu" / "environments").is_dir()
