"""doctor's findings on bare environments, with stand-ins for broken packages, drivers and loaders."""

import gzip
import os
import sys
import venv
from pathlib import Path

import click
import numpy as np
import pytest
import tiny
from runs import finished

from gluon_mgpu.commands import doctor
from gluon_mgpu.runtime import engine
from gluon_mgpu.training import datasets

ROOT = Path(__file__).parents[2]


def run(*arguments, python=sys.executable, **environment):
    """A finished `python ARGUMENTS`."""
    return finished(python, *arguments, env={**engine.users_environment(), **environment})


def examine(**options):
    """A finished doctor, which ends with status 0 exactly if it found no problem."""
    done = run(ROOT / "scripts/doctor.py", **options)
    assert done.returncode == bool(marked(done, "problem"))
    return done


def marked(done, mark):
    """The lines with a mark."""
    return [line[9:] for line in done.stdout.splitlines() if line.split()[0] == mark]


def error_of(done):
    """The error of a command that ended with status 1 and one line."""
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1), done.stderr
    assert done.stderr.startswith("error: ")
    return done.stderr


@pytest.fixture
def bare(tmp_path):
    """(python, packages): a new environment that has only click and this package; `packages` is its PYTHONPATH."""
    venv.create(tmp_path / "bare", symlinks=True)
    packages = tmp_path / "packages"
    packages.mkdir()
    os.symlink(Path(click.__file__).parent, packages / "click")
    os.symlink(ROOT / "gluon_mgpu", packages / "gluon_mgpu")
    return {"python": str(tmp_path / "bare/bin/python"), "PYTHONPATH": str(packages)}, packages


def test_doctor_finds_no_problem_on_a_machine_that_runs_these_tests():
    # DMLC_ROLE: the environment of a server, in which a child process would never end
    done = run("-m", "gluon_mgpu", "doctor", GLUON_MGPU_DATA="", MXNET_HOME="/nonexistent", DMLC_ROLE="server")
    lines = done.stdout.splitlines()
    assert (done.returncode, done.stderr, lines[-1]) == (0, "", "can run train --impl scratch --gpus 2")
    assert all(line.split()[0] in ("ok", "note") for line in lines[:-1])
    assert f"NumPy {np.__version__}" in marked(done, "ok")
    assert "running on: [" in lines[-2]
    assert "\x1b" not in done.stdout


def test_doctor_runs_without_numpy_and_mxnet_and_says_what_to_install(bare):
    done = examine(**bare[0])
    assert done.stderr == ""
    numpy, mxnet = marked(done, "problem")
    assert "pip install 'numpy" in numpy and "pip install --no-deps mxnet==1.9.1" in mxnet
    assert run("-m", "gluon_mgpu", "doctor", **bare[0]).stdout == done.stdout


@pytest.mark.parametrize("command", ["train", "walkthrough", "batch-size"])
def test_other_commands_without_numpy_and_mxnet_fail_with_one_line(bare, command):
    for program in ([ROOT / f"scripts/{command.replace('-', '_')}.py"], ["-m", "gluon_mgpu", command]):
        error = error_of(run(*program, **bare[0]))
        assert "is not installed" in error and "pip install" in error


def test_commands_without_click_or_the_package_fail_with_one_line(bare):
    options, packages = bare
    (packages / "click").unlink()
    for command in ("train", "doctor"):
        script = ROOT / f"scripts/{command}.py"
        assert "click is not installed" in error_of(run(script, **options))
        assert "gluon_mgpu" in error_of(run(script, python=options["python"], PYTHONPATH=""))


BROKEN = {
    "RuntimeError: built for another machine": "raise RuntimeError('built for another machine')",
    "no_such": "try:\n    import no_such\nexcept ImportError as e:\n    raise ImportError('a page\\nof advice') from e",
    "SIGILL": "import os, signal; os.kill(os.getpid(), signal.SIGILL)",
}


@pytest.mark.parametrize("cause", BROKEN)
def test_a_broken_numpy_is_a_problem_with_its_first_cause(bare, cause):
    options, packages = bare
    tiny.put(packages, {"numpy.py": BROKEN[cause].encode()})
    problem = marked(examine(**options), "problem")[0]
    assert cause in problem and "pip install" in problem
    if cause != "SIGILL":
        script = ROOT / "scripts/train.py"
        done = run(script, **options)
        assert cause in error_of(done)
        debug = run(script, "--debug", **options).stderr
        assert debug.startswith("Traceback") and debug.endswith(done.stderr)


def test_the_cores_are_the_ones_that_this_process_may_use(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    for quota, mark, gpus in ((None, "ok", 8), (8, "ok", 8), (3.9, "note", 3), (0.5, "note", 1)):
        monkeypatch.setattr(doctor, "cgroup_cores", lambda quota=quota: quota)
        found, line = doctor._cores()
        assert found == mark and f"--gpus above {gpus} works" in line  # the main job's 2 always work


@pytest.mark.parametrize(
    "own, files, cores",
    [
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/a/b\n", {"a/b/cpu.max": "300000 100000\n", "a/cpu.max": "200000 100000\n"}, 2),
        ("0::/the/host's/path\n", {"cpu.max": "50000 100000\n"}, 0.5),
        ("1:cpu:/a\n", {"cpu/cpu.cfs_quota_us": "250000", "cpu/cpu.cfs_period_us": "100000"}, 2.5),
        ("1:cpu:/\n0::/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
    ],
)
def test_the_quota_of_a_control_group_is_read_in_both_versions(tmp_path, own, files, cores):
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        path = tmp_path / "mount" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert doctor.cgroup_cores(tmp_path / "own", tmp_path / "mount") == cores


def test_every_gpu_is_listed_and_marked_ok_if_the_installed_mxnet_has_kernels_for_it(monkeypatch):
    gpus = [("Tesla K80", 3, 7), ("Tesla M60", 5, 2), ("GeForce RTX 4090", 8, 9), ("NVIDIA H200", 9, 0)]
    for supported, built_with_cuda, marks in (
        (12040, True, ["note", "ok", "ok", "note"]),
        (10020, True, ["note"] * 4),  # too old a driver for CUDA 11
        (12040, False, ["note"] * 4),
    ):
        monkeypatch.setattr(doctor, "_in_child", lambda *_, cuda=supported: {"cuda": cuda, "gpus": gpus})
        found = list(doctor._gpus(built_with_cuda))
        assert [mark for mark, _ in found] == marks
        assert all(gpu[0] in line for gpu, (_, line) in zip(gpus, found))


@pytest.fixture
def data(tmp_path, monkeypatch):
    """No data set on this machine. Returns a function that writes tiny files of both data sets to a folder."""
    files, hashes = tiny.files(datasets.synthetic(30, 10))
    tiny.hide_data_sets(monkeypatch, tmp_path, hashes)
    return lambda folder: tiny.put(folder, {f"{file}.gz": gzip.compress(raw) for file, raw in files.items()})


def test_data_sets_are_listed_with_their_folders_and_a_problem_is_what_the_main_job_misses(data, tmp_path, monkeypatch):
    def found(folder=None):
        """The marks of the two data sets. The third line is the cache."""
        *findings, (cache, _) = doctor._data(folder)
        assert cache == "ok"
        return [mark for mark, _ in findings]

    assert found() == ["note", "note"]
    folder = data(tmp_path / "system/fashion-mnist")
    assert found() == ["ok", "note"] and str(folder) in next(doctor._data(None))[1]
    assert found(str(tmp_path)) == ["problem", "note"]  # a given folder without the data
    for name in ("fashion-mnist", "mnist"):
        (data(tmp_path / "here" / name) / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(b"damaged"))
    assert found(tmp_path / "here") == ["problem", "note"]
    monkeypatch.setenv("GLUON_MGPU_DATA", "/nonexistent")
    assert found() == ["problem", "note"]


def test_a_cache_that_is_not_writable_is_a_problem_if_data_must_be_downloaded(data, tmp_path):
    (tmp_path / "cache").write_text("a file instead of a folder")
    assert list(doctor._data(None))[-1][0] == "problem"
    data(tmp_path / "system/fashion-mnist")
    assert list(doctor._data(None))[-1][0] == "note"
