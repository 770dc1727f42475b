"""The type hints reject incorrect uses of the package in a user's program, and accept correct ones."""

import os
import re
import sys
from pathlib import Path

from own_process import finished

ROOT = Path(__file__).parents[2]
PROGRAM = """\
import gluon_mgpu
from gluon_mgpu import highlevel, implementations, scratch
from gluon_mgpu.runtime import devices
from gluon_mgpu.training import batches, datasets
from gluon_mgpu.training.settings import Settings

gluon_mgpu.configure(contexts=2)
gluon_mgpu.configure(contexts="2")  # wrong
ctx = devices.contexts([0, 1], "cpu")
data = datasets.load("synthetic", limit=512)
settings = Settings(model="resnet18", shares=(80, 20))
for replicas in (implementations.replicas("scratch", ctx), implementations.replicas("highlevel", ctx, settings)):
    for X, y in batches.batches(data.train_images, data.train_labels, 256):
        replicas.train_batch(X, y, lr=0.2)
scratch.allreduce(2)  # wrong
highlevel.initialize(highlevel.lenet(), "cpu(0)")  # wrong
Settings(momentum=None)  # wrong
history = implementations.train("scratch", 2, 256, 0.2, out="runs/first", epochs=1, momentum=0.9)
accuracies: list[float] = [epoch.test_accuracy for epoch in history]
implementations.train("scratch", 2, "256", 0.2)  # wrong
implementations.train("scratch", momentun=0.9)  # wrong
"""


def test_mypy_refuses_each_wrong_line_and_no_other(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    mypy = [sys.executable, "-m", "mypy", "--config-file=", "--follow-imports=silent"]
    done = finished(*mypy, "program.py", cwd=tmp_path, env={**os.environ, "MYPYPATH": str(ROOT)})
    refused = [int(number) for number in re.findall(r"^program.py:(\d+): error: ", done.stdout, re.MULTILINE)]
    wrong = [number for number, line in enumerate(PROGRAM.splitlines(), 1) if line.endswith("# wrong")]
    assert refused == wrong, done.stdout + done.stderr
