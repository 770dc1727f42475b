"""Notebooks run with `run` and with the kernel, and keep their outputs, whatever happens."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import runs
import tiny
from parity import examples

from gluon_mgpu.commands import kernel
from gluon_mgpu.data import datasets

pytest.importorskip("nbclient", reason="needs nbclient")
import jupyter_client  # noqa: E402
import nbformat  # noqa: E402

# The original notebooks and real data, if folders beside the checkout have them
BESIDE = Path(__file__).parents[3]
ORIGINALS = next(BESIDE.glob("*/originals/multiple-gpus.ipynb"), None)
MNIST = next(BESIDE.glob("*/*/mnist/train-images-idx3-ubyte.gz"), None)
needs_originals = pytest.mark.skipif(not (ORIGINALS and MNIST), reason="needs the original notebooks")
RUN = [sys.executable, "-m", "gluon_mgpu", "run", "--here"]


@pytest.fixture
def environment(tmp_path, stock):
    return {**stock, "JUPYTER_DATA_DIR": str(tmp_path / "jupyter"), "IPYTHONDIR": str(tmp_path / "ipython")}


@pytest.fixture
def notebook(tmp_path):
    """notebook(*cells) writes a notebook that names a kernel that is not installed, with old outputs."""

    def write(*cells):
        output = nbformat.v4.new_output("stream", text="old\n")
        cells = [nbformat.v4.new_code_cell(cell, outputs=[output]) for cell in cells]
        metadata = {"kernelspec": {"name": "conda_mxnet_p36", "display_name": "gone", "language": "python"}}
        nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=metadata), tmp_path / "old.ipynb")
        return tmp_path / "old.ipynb"

    return write


def outputs(path):
    """What each code cell printed, or the name of its error."""
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    return ["".join(o.get("text", o.get("ename", "")) for o in cell.outputs) for cell in cells]


@pytest.mark.slow
def test_a_notebook_is_executed_and_written_to_another_file(tmp_path, environment, notebook):
    path = notebook("import mxnet as mx", "print(mx.gpu(1))")
    before = path.read_bytes()
    run = runs.finished(*RUN, "--out", tmp_path / "new.ipynb", path, env=environment)
    assert run.returncode == 0 and path.read_bytes() == before, run.stderr
    assert "cpu(2)\n" in outputs(tmp_path / "new.ipynb")[1]


def test_a_cell_that_fails_is_the_last_with_outputs(environment, notebook):
    path = notebook("print(1)", "import gluonbook", "print(3)")
    run = runs.finished(*RUN, path, env=environment)
    assert run.returncode == 1 and "--with gluonbook==" in run.stderr.splitlines()[-1]
    assert outputs(path) == ["1\n", "ModuleNotFoundError", ""]


NEEDS = {
    "Python 2": "%matplotlib inline\nif 1:\n    !ls\n    print 'x %d' % (3)",
    "--with nltk_of_the_time ": "try:\n    import nltk_of_the_time\nexcept ImportError:\n    raise KeyError(1)",
}


@pytest.mark.slow
@pytest.mark.parametrize("says, cell", NEEDS.items(), ids=NEEDS)
def test_a_cell_gets_the_advice_that_a_program_gets(environment, notebook, says, cell):
    run = runs.finished(*RUN, notebook(cell), env=environment)
    assert run.returncode == 1 and says in run.stderr and run.stderr.count("\n") == 1


LOCK_TWICE = """
import ctypes
open("started", "w").close()
mutex = ctypes.create_string_buffer(64)
for _ in range(2):  # the second call never returns, whatever signals arrive
    ctypes.PyDLL(None).pthread_mutex_lock(mutex)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_notebook_even_in_a_long_call(tmp_path, environment, notebook, number):
    path = notebook("import os; print(os.getpid())", LOCK_TWICE, "print(2)")
    process = subprocess.Popen([*RUN, str(path)], env=environment, stderr=subprocess.PIPE, text=True)
    runs.wait((tmp_path / "started").exists)
    process.send_signal(number)
    assert process.communicate(timeout=runs.HORIZON)[1] == "interrupted\n" and process.returncode == 130
    kernel, *later = outputs(path)
    assert later == ["", ""] and not runs.alive([int(kernel)])


@pytest.mark.slow
def test_a_file_that_is_not_a_notebook_is_refused_and_kept(tmp_path):
    path = tmp_path / "old.ipynb"
    path.write_text('{"cells": 3}')
    run = runs.finished(*RUN, path)
    assert run.returncode == 2 and run.stderr.startswith("error: ") and run.stderr.count("\n") == 1
    assert path.read_text() == '{"cells": 3}'


@pytest.mark.slow
def test_the_kernel_prepares_its_process(tmp_path, environment, monkeypatch):
    install = runs.gluon_mgpu("kernel", "install", "--here", "--gpus", 3, env=environment)
    spec = tmp_path / "jupyter" / "kernels" / kernel.KERNEL / "kernel.json"
    assert json.loads(spec.read_text())["display_name"] == kernel.TITLE, install.stderr
    monkeypatch.setenv("JUPYTER_DATA_DIR", environment["JUPYTER_DATA_DIR"])
    with jupyter_client.run_kernel(kernel_name=kernel.KERNEL, env=environment) as client:
        code = "import mxnet as mx; assert mx.context.num_gpus() == 3; mx.nd.ones(2, mx.gpu(2)).wait_to_read()"
        reply = client.execute(code, reply=True, timeout=runs.HORIZON)
        assert reply["content"]["status"] == "ok", reply["content"]


@needs_originals
@pytest.mark.slow
@pytest.mark.parametrize(
    "name, gpus, data, n", [("multiple-gpus", 2, "fashion-mnist", 512), ("multiple-gpus-gluon", 4, "mnist", 4096)]
)
def test_the_original_notebooks_print_the_books_values_in_the_environment_of_their_time(
    tmp_path, environment, name, gpus, data, n
):
    _, images, labels, test_images, test_labels, _ = datasets.load(data, MNIST.parents[1])
    subset = datasets.Dataset(data, images[:n], labels[:n], test_images[: n // 4], test_labels[: n // 4], source="")
    hashes = {data: tiny.write(tmp_path / data, subset)}
    start = f"from gluon_mgpu.data import datasets\ndatasets.SHA256 = {hashes}\n"  # Jupyter runs it first
    tiny.put(tmp_path / "ipython/profile_default/startup", {"start.py": start.encode()})
    path = tmp_path / f"{name}.ipynb"
    path.write_bytes(ORIGINALS.with_name(path.name).read_bytes())
    options = ["--cpu", "--with", "gluonbook==0.8.10", "--gpus", gpus, "--data-dir", tmp_path]
    env = {**environment, "MXNET_HOME": str(tmp_path)}  # FashionMNIST writes into ~/.mxnet
    ended = runs.gluon_mgpu("run", *options, path, env=env, timeout=900)
    assert ended.returncode == 0, ended.stderr
    text = "".join(outputs(path))
    arrays = [array for array, _ in runs.arrays(text)]
    if gpus == 2:
        bias, _, *reduced, batch, half, other_half = arrays
        assert bias.tolist() == examples.COPIED_BIAS
        assert [array.tolist() for array in reduced] == [*examples.ALLREDUCE["before"], *examples.ALLREDUCE["after"]]
        np.testing.assert_array_equal(np.concatenate([half, other_half]), batch)
        assert len(re.findall(r"^epoch \d, time: .* sec, test acc: 0\.\d\d$", text, re.M)) == 8
    else:
        weights, grads = arrays[4:8], arrays[8:12]
        assert all((weight == weights[0]).all() for weight in weights) and len({*map(str, grads)}) == 4
        accuracies = [float(accuracy) for accuracy in re.findall(r"accuracy = (\S+)", text)]
        assert len(accuracies) == 10 and min(accuracies[4::5]) > 0.8, text  # 0.1 before training
