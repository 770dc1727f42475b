"""doctor's findings on bare environments, with stand-ins for broken packages, drivers and loaders."""

import gzip
import os
import sys
import venv
from pathlib import Path
from unittest.mock import Mock

import click
import numpy as np
import pytest
import tiny
from runs import ROOT, finished

from gluon_mgpu.commands import doctor
from gluon_mgpu.data import datasets
from gluon_mgpu.support import subprocesses


def run(*arguments, python=sys.executable, **environment):
    """Run `python ARGUMENTS`, and return the finished process."""
    return finished(python, *arguments, env={**subprocesses.users_environment(), **environment})


def examine(**options):
    """Run doctor, which must exit with status 0 if and only if it finds no problem."""
    done = run("-m", "gluon_mgpu", "doctor", **options)
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
    done = run("-m", "gluon_mgpu", "doctor", GLUON_MGPU_DATA="", MXNET_HOME="/nonexistent")
    lines = done.stdout.splitlines()
    assert (done.returncode, lines[-1]) == (0, "can run train --impl scratch --gpus 2")
    assert all(line.startswith("gluon_mgpu: training on 2 CPU contexts") for line in done.stderr.splitlines())
    assert all(line.split()[0] in ("ok", "note") for line in lines[:-1])
    assert f"numpy {np.__version__}" in marked(done, "ok")
    assert any("OMP_NUM_THREADS" in line for line in marked(done, "ok"))
    assert any("running on: [" in line for line in marked(done, "ok"))


def test_doctor_runs_without_numpy_and_mxnet_and_says_what_to_install(bare):
    done = examine(**bare[0])
    assert done.stderr == ""
    numpy, mxnet = marked(done, "problem")
    assert "pip install 'numpy" in numpy and "pip install --no-deps mxnet==1.9.1" in mxnet


def test_a_command_without_the_packages_that_it_needs_fails_with_one_line_that_names_them(bare):
    options, packages = bare
    for program in ([ROOT / "scripts/train.py"], ["-m", "gluon_mgpu", "train"]):
        error = error_of(run(*program, **options))
        assert "pip install" in error
    (packages / "click").unlink()
    for script in (ROOT / "scripts/train.py", ROOT / "scripts/parity.py"):
        assert "click" in error_of(run(script, **options))
        assert "gluon_mgpu" in error_of(run(script, python=options["python"], PYTHONPATH=""))


BROKEN = b"""
try:
    import no_such
except ImportError as error:
    raise ImportError('a page\\nof advice') from error
"""


def test_a_broken_numpy_is_a_problem_with_its_first_cause(bare):
    options, packages = bare
    tiny.put(packages, {"numpy.py": BROKEN, "mxnet.py": b""})
    problem = marked(examine(**options), "problem")[0]
    assert "no_such" in problem and "pip install" in problem
    done, debug = (run(ROOT / "scripts/train.py", *words, **options) for words in ([], ["--debug"]))
    assert "no_such" in error_of(done)
    assert debug.stderr.startswith("Traceback") and debug.stderr.endswith(done.stderr)


@pytest.mark.parametrize(
    "status, mark, words", [(0, "ok", "right"), (1, "note", "no kernel image"), (None, "note", "in time")]
)
def test_each_gpu_is_tried_in_a_process_with_a_time_limit(monkeypatch, status, mark, words):
    monkeypatch.setattr(doctor.cuda, "driver_gpus", lambda: [("A100", 8, 0), ("A10", 8, 6)])
    finished = subprocesses.Finished(status, "right\n", "Traceback\nCUDA: no kernel image is available")
    ran = Mock(return_value=finished)
    monkeypatch.setattr(subprocesses, "run", ran)
    first, second = (finding for finding in doctor.findings() if "GPU " in finding[1])
    assert (first[0], second[0]) == (mark, mark) and words in first[1] and "A10," in second[1]
    assert all(call.kwargs["seconds"] for call in ran.call_args_list)


def test_the_data_set_is_found_or_noted_as_missing_and_a_problem_if_it_is_damaged(tmp_path, monkeypatch):
    files, hashes = tiny.files(datasets.synthetic(30, 10))
    gzipped = {f"{file}.gz": gzip.compress(raw) for file, raw in files.items()}
    tiny.hide_data_sets(monkeypatch, tmp_path, hashes)
    assert doctor._data(None)[0] == "note"
    folder = tiny.put(tmp_path / "system/fashion-mnist", gzipped)
    mark, line = doctor._data(None)
    assert mark == "ok" and str(folder) in line
    assert doctor._data(str(tmp_path))[0] == "problem"  # a given folder without the data
    path = tiny.put(tmp_path / "here/fashion-mnist", gzipped) / "t10k-labels-idx1-ubyte.gz"
    path.write_bytes(gzip.compress(b"damaged"))
    mark, line = doctor._data(tmp_path / "here")
    assert mark == "problem" and str(path) in line
    monkeypatch.setenv("GLUON_MGPU_DATA", "/nonexistent")
    assert doctor._data(None)[0] == "problem"
