"""The type hints, for those who check their own programs with mypy: of the package as it is installed."""

import re
import shutil
import site
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROGRAM = """\
import gluon_mgpu
from gluon_mgpu import highlevel, scratch
from gluon_mgpu.runtime import devices
from gluon_mgpu.training import datasets, loop
from gluon_mgpu.training.settings import Settings

gluon_mgpu.configure(contexts=2)
gluon_mgpu.configure(contexts="2")  # wrong
ctx = devices.contexts([0, 1], "cpu")
devices.contexts(0.5)  # wrong
data = datasets.load("synthetic", limit=512)
data.images  # wrong
for replicas in (scratch.Replicas(ctx), highlevel.Replicas(ctx, Settings(model="resnet18", shares=(80, 20)))):
    for X, y in loop.batches(data.train_images, data.train_labels, 256):
        replicas.train_batch(X, y, lr=0.2)
scratch.Replicas("cpu(0)")  # wrong
highlevel.Replicas("cpu(0)")  # wrong
highlevel.initialize(highlevel.lenet(), "cpu(0)")  # wrong
Settings(momentum=None)  # wrong
history = scratch.train(2, 256, 0.2, out="runs/first", epochs=1, momentum=0.9)
accuracies: list[float] = [epoch.test_accuracy for epoch in history]
accuracies = history  # wrong
scratch.train(2, "256", 0.2)  # wrong
highlevel.train([0, 1], 256, 0.2, hybridize="yes")  # wrong
loop.run(scratch.Replicas, ctx, Settings(), config={})  # wrong
"""


def test_mypy_refuses_each_wrong_use_of_the_installed_package_and_no_right_one(tmp_path):
    source, other = tmp_path / "source", tmp_path / "other"
    shutil.copytree(ROOT / "gluon_mgpu", source / "gluon_mgpu", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    # An environment with the libraries of this one, and with what a wheel of the package holds.
    venv.create(other)
    (there,) = other.glob("lib/python*/site-packages")
    (there / "libraries.pth").write_text("\n".join(site.getsitepackages()))
    build = [sys.executable, "-c", "import setuptools; setuptools.setup()", "-q", "build_py", "--build-lib", there]
    subprocess.run(build, cwd=source, check=True)
    (tmp_path / "program.py").write_text(PROGRAM)
    asked = ["--config-file=", "--python-executable", other / "bin/python", "program.py"]
    done = subprocess.run([sys.executable, "-m", "mypy", *asked], cwd=tmp_path, capture_output=True, text=True)
    refused = [int(number) for number in re.findall(r"^program.py:(\d+): error: ", done.stdout, re.MULTILINE)]
    wrong = [number for number, line in enumerate(PROGRAM.splitlines(), 1) if line.endswith("# wrong")]
    assert refused == wrong, done.stdout + done.stderr
