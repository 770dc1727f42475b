"""The package away from its checkout: a wheel, pip, an empty environment and an empty folder."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LEFT_OUT = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "runs")


def run(*command, cwd):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True, timeout=900
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, since a build leaves folders behind."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, folder / "source", ignore=LEFT_OUT)
    done = run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", folder, folder / "source", cwd=folder)
    assert done.returncode == 0, done.stderr
    (found,) = folder.glob("*.whl")
    return found


@pytest.mark.slow
def test_the_wheel_holds_the_package_whole_with_its_licence_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
    package = {str(path.relative_to(ROOT)) for path in (ROOT / "gluon_mgpu").rglob("*") if path.is_file()}
    package = {name for name in package if "__pycache__" not in name}
    assert "gluon_mgpu/parity/spread.json" in package
    facts = {name for name in names if ".dist-info/" in name}
    assert names - facts == package
    assert any(name.endswith("/LICENSE") for name in facts)


@pytest.mark.slow
def test_the_wheel_installed_with_pip_trains_from_an_empty_folder(wheel, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    environment = tmp_path / "environment"
    # As in docs/install.md.
    for command in (
        (sys.executable, "-m", "venv", environment),
        (environment / "bin/pip", "install", f"{wheel}[cpu]"),
        (environment / "bin/pip", "install", "--no-deps", "mxnet==1.9.1"),
    ):
        done = run(*command, cwd=empty)
        assert done.returncode == 0, done.stderr
    where = run(environment / "bin/python", "-c", "import gluon_mgpu; print(gluon_mgpu.__file__)", cwd=empty)
    assert where.stdout.startswith(f"{environment}/lib/")
    train = ("train", "--dataset", "synthetic", "--gpus", 2, "--limit", 2048, "--epochs", 1, "--device", "cpu")
    for command in ([environment / "bin/gluon-mgpu"], [environment / "bin/python", "-m", "gluon_mgpu"]):
        done = run(*command, *train, cwd=empty)
        assert done.returncode == 0, done.stderr
        first, epoch = done.stdout.splitlines()
        assert first == "running on: [cpu(0), cpu(1)]"
        assert epoch.startswith("epoch 1, time: ")
    assert list(empty.iterdir()) == []
