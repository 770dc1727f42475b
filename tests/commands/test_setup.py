"""find-python.sh, with stand-ins for machines and Pythons; what the Makefile rebuilds; the wheel."""

import os
import shutil
import sys

import pytest
from runs import ROOT, finished, write_program


def find(path, machine="Linux x86_64", **environment):
    """Run find-python.sh. path: a folder, in which a stand-in for uname prints the machine."""
    write_program(path / "uname", f"echo {machine}")
    environment = {"PATH": str(path), "PYENV_ROOT": "/nonexistent", **environment}
    return finished("/bin/sh", ROOT / "scripts/find-python.sh", env=environment)


def fails_with_one_line(done):
    return (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)


def test_the_first_suitable_python_is_found_and_one_requested_by_version_also_in_pyenv(tmp_path):
    write_program(tmp_path / "python3.11", "exit 127")  # does not start
    os.symlink(sys.executable, tmp_path / "python3.9")
    assert find(tmp_path).stdout == f"{tmp_path}/python3.9\n"
    pyenv = tmp_path / "versions/3.12.1/bin"
    pyenv.mkdir(parents=True)
    os.symlink(sys.executable, pyenv / "python")
    assert find(tmp_path, PYENV_ROOT=str(tmp_path), PYTHON="python3.12").stdout == f"{pyenv}/python\n"


def test_without_a_suitable_python_one_line_says_which_are(tmp_path):
    write_program(tmp_path / "python3", "exit 1")  # too new
    for environment in ({}, {"PYTHON": "python3"}, {"PYTHON": "python3.9"}):
        done = find(tmp_path, **environment)
        assert fails_with_one_line(done) and "3.9" in done.stderr


def test_a_python_that_was_never_tried_is_used_and_one_line_says_so(tmp_path):
    new = f"""{sys.executable} -c "import sys\nsys.version_info = (3, 99)\n$2" """
    write_program(tmp_path / "python3", f'[ "$1" = --version ] && echo Python 3.99 || {new}')
    done = find(tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}/python3\n")
    assert done.stderr.count("\n") == 1 and "3.99" in done.stderr


@pytest.mark.parametrize("machine", ["Linux i686", "Darwin arm64"])
def test_a_machine_without_a_wheel_of_mxnet_is_refused(tmp_path, machine):
    os.symlink(sys.executable, tmp_path / "python3.11")
    done = find(tmp_path, machine)
    assert fails_with_one_line(done) and machine in done.stderr
    done = find(tmp_path, "Linux aarch64")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{tmp_path}/python3.11\n", "")


OFFLINE = "echo no network >&2; false"


@pytest.mark.parametrize(
    "pip, mxnet, python, works",
    [
        ("true", "true", [], True),
        (OFFLINE, "true", [], True),
        (OFFLINE, "false", [], False),
        (OFFLINE, "true", ["PYTHON=./other"], False),
    ],
)
def test_make_keeps_an_environment_that_cannot_be_updated_and_uses_it_if_it_works(pip, mxnet, python, works, tmp_path):
    for name in ("Makefile", "setup.cfg", "scripts"):
        os.symlink(ROOT / name, tmp_path / name)
    venv, stamp = tmp_path / ".venv", tmp_path / ".venv/.installed"
    write_program(venv / "bin/python", f'case "$*" in *pip*) {pip} ;; *mxnet*) {mxnet} ;; *version*) echo 1 ;; esac')
    write_program(tmp_path / "other", 'case "$*" in "-m venv"*) mkdir .venv; touch .venv/new ;; *) echo 2; esac')
    stamp.touch()
    os.utime(stamp, (1, 1))  # older than setup.cfg
    done = finished("make", "install", *python, cwd=tmp_path, env={**os.environ, "MAKEFLAGS": ""})
    assert (done.returncode == 0) is works, done
    assert {path.name for path in venv.iterdir()} == {"bin", ".installed"} and not (tmp_path / ".venv.old").exists()
    assert (stamp.stat().st_mtime > 1) == (pip == "true")
    assert ("used as it is" in done.stdout) == (works and pip == OFFLINE)


@pytest.mark.slow
def test_the_wheel_has_the_package_and_its_licence_and_nothing_else_and_trains_in_an_empty_folder(tmp_path):
    source, installed, empty = (tmp_path / name for name in ("source", "installed", "empty"))
    omitted = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "runs")
    shutil.copytree(ROOT, source, ignore=omitted)  # because a build writes to the source folder
    (source / "build/lib/gluon_mgpu").mkdir(parents=True)
    (source / "build/lib/gluon_mgpu/stale.py").touch()  # an earlier build left it
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target", installed]
    done = finished(*pip, source, timeout=900)
    assert done.returncode == 0, done.stderr
    names, package = (
        {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        for folder in (installed, source)
    )
    metadata = {name for name in names if ".dist-info/" in name}
    assert names - metadata == {name for name in package if name.startswith("gluon_mgpu/")} | {"bin/gluon-mgpu"}
    assert any(name.endswith("/LICENSE") for name in metadata)

    empty.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    code = "import gluon_mgpu; print(gluon_mgpu.__file__)"
    imported = finished(sys.executable, "-c", code, cwd=empty, env=environment).stdout
    assert imported == f"{installed}/gluon_mgpu/__init__.py\n"
    options = ("--dataset", "synthetic", "--gpus", 2, "--limit", 2048, "--epochs", 1, "--device", "cpu")
    for program in ([installed / "bin/gluon-mgpu"], [sys.executable, "-m", "gluon_mgpu"]):
        first, epoch = finished(*program, "train", *options, cwd=empty, env=environment).stdout.splitlines()
        assert first == "running on: [cpu(0), cpu(1)]" and epoch.startswith("epoch 1, time: ")
    assert list(empty.iterdir()) == []
