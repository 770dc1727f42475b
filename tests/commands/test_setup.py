"""find-python.sh, with stand-ins for machines and Pythons; what the Makefile rebuilds; Slurm's script; the wheel."""

import os
import shutil
import sys
import zipfile

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
        assert fails_with_one_line(done) and "3.9 to 3.13" in done.stderr


@pytest.mark.parametrize("machine", ["Linux i686", "Darwin arm64"])
def test_a_machine_without_a_wheel_of_mxnet_is_refused(tmp_path, machine):
    os.symlink(sys.executable, tmp_path / "python3.11")
    done = find(tmp_path, machine)
    assert fails_with_one_line(done) and machine in done.stderr
    done = find(tmp_path, "Linux aarch64")  # MXNet has a wheel for it, but it is not tested
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}/python3.11\n") and "aarch64" in done.stderr


def test_a_changed_dependency_rebuilds_the_environment_and_a_changed_lint_rule_does_not(tmp_path):
    for name in ("Makefile", "setup.cfg", "pyproject.toml", "scripts/find-python.sh"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
        os.utime(tmp_path / name, (1, 1))
    stamp = tmp_path / ".venv/.installed"
    stamp.parent.mkdir()
    stamp.touch()
    os.utime(stamp, (2, 2))

    def up_to_date():
        return finished("make", "--question", ".venv/.installed", cwd=tmp_path).returncode == 0

    os.utime(tmp_path / "pyproject.toml", (3, 3))
    assert up_to_date()
    os.utime(tmp_path / "setup.cfg", (3, 3))
    assert not up_to_date()


def test_the_script_for_slurm_starts_a_run_and_continues_it_if_there_is_a_checkpoint(tmp_path):
    write_program(tmp_path / "srun", 'echo "$@"')  # a stand-in that prints its arguments
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").touch()
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_CPUS_ON_NODE": "4"}

    def options():
        done = finished("bash", ROOT / "docs/cluster/slurm.sh", cwd=tmp_path, env=environment)
        return done.stdout.partition("train.py ")[2].split()

    assert options() == ["--kvstore", "mpi", "--impl", "highlevel", "--out", "runs/cluster"]
    (tmp_path / "runs/cluster").mkdir(parents=True)
    (tmp_path / "runs/cluster/checkpoint.npz").touch()
    assert options() == ["--kvstore", "mpi", "--resume", "runs/cluster"]


def run(*command, cwd):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = finished(*command, cwd=cwd, env=environment, timeout=900)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_wheel_contains_the_package_and_its_licence_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
    package = {str(path.relative_to(ROOT)) for path in (ROOT / "gluon_mgpu").rglob("*") if path.is_file()}
    package = {name for name in package if "__pycache__" not in name}
    assert "gluon_mgpu/exercises/mistakes.ini" in package
    metadata = {name for name in names if ".dist-info/" in name}
    assert names - metadata == package
    assert any(name.endswith("/LICENSE") for name in metadata)


@pytest.mark.slow
def test_the_installed_wheel_trains_in_an_empty_folder(wheel, tmp_path):
    empty, environment = tmp_path / "empty", tmp_path / "environment"
    empty.mkdir()
    run(sys.executable, "-m", "venv", environment, cwd=empty)  # as in docs/install.md
    run(environment / "bin/pip", "install", f"{wheel}[cpu]", cwd=empty)
    run(environment / "bin/pip", "install", "--no-deps", "mxnet==1.9.1", cwd=empty)
    package = run(environment / "bin/python", "-c", "import gluon_mgpu; print(gluon_mgpu.__file__)", cwd=empty)
    assert package.startswith(f"{environment}/lib/")
    options = ("--dataset", "synthetic", "--gpus", 2, "--limit", 2048, "--epochs", 1, "--device", "cpu")
    for program in ([environment / "bin/gluon-mgpu"], [environment / "bin/python", "-m", "gluon_mgpu"]):
        first, epoch = run(*program, "train", *options, cwd=empty).splitlines()
        assert first == "running on: [cpu(0), cpu(1)]"
        assert epoch.startswith("epoch 1, time: ")
    assert list(empty.iterdir()) == []
