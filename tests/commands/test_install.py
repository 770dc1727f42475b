"""The wheel, installed with pip in an empty environment."""

import os
import sys
import zipfile
from pathlib import Path

import pytest
from own_process import finished

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def run(*command, cwd):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = finished(*command, cwd=cwd, env=environment, timeout=900)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_contains_the_package_and_its_licence_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
    package = {str(path.relative_to(ROOT)) for path in (ROOT / "gluon_mgpu").rglob("*") if path.is_file()}
    package = {name for name in package if "__pycache__" not in name}
    assert "gluon_mgpu/exercises/mistakes.ini" in package
    metadata = {name for name in names if ".dist-info/" in name}
    assert names - metadata == package
    assert any(name.endswith("/LICENSE") for name in metadata)


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
