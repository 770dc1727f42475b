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


@pytest.mark.parametrize("content", ["", '{"cells": 3}'])
@pytest.mark.slow
def test_a_file_that_is_not_a_notebook_is_refused_and_kept(tmp_path, content):
    path = tmp_path / "old.ipynb"
    path.write_text(content)
    run = runs.finished(*RUN, path)
    assert run.returncode == 2 and run.stderr.startswith("error: ") and run.stderr.count("\n") == 1
    assert path.read_text() == content


@pytest.mark.slow
def test_the_kernel_prepares_its_process_and_after_an_interrupt_the_next_cell_runs(tmp_path, environment, monkeypatch):
    install = runs.gluon_mgpu("kernel", "install", "--here", "--gpus", 3, env=environment)
    spec = tmp_path / "jupyter" / "kernels" / kernel.KERNEL / "kernel.json"
    assert json.loads(spec.read_text())["display_name"] == kernel.TITLE, install.stderr
    monkeypatch.setenv("JUPYTER_DATA_DIR", environment["JUPYTER_DATA_DIR"])
    manager, client = jupyter_client.manager.start_new_kernel(kernel_name=kernel.KERNEL, env=environment)
    try:
        code = f"""if True:
            import mxnet as mx
            assert mx.context.num_gpus() == 3
            x = [mx.nd.ones((500, 500), mx.gpu(i)) for i in range(2)]
            open({str(tmp_path / "started")!r}, "w").close()
            while True:
                [mx.nd.dot(a, a).wait_to_read() for a in x]
        """
        cell = client.execute(code, stop_on_error=False)  # otherwise, a cell sent right after the error is aborted
        runs.wait((tmp_path / "started").exists)
        manager.interrupt_kernel()
        replies = iter(lambda: client.get_shell_msg(timeout=runs.HORIZON), None)
        reply = next(reply for reply in replies if reply["parent_header"]["msg_id"] == cell)
        assert reply["content"]["ename"] == "KeyboardInterrupt"
        code = "assert mx.nd.dot(x[1], x[1]).min().asscalar() == 500"
        reply = client.execute(code, reply=True, timeout=runs.HORIZON)
        assert reply["content"]["status"] == "ok", reply["content"]
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


@pytest.fixture
def original(tmp_path, environment):
    """original(name, gpus, data, n) runs an original notebook, in the environment of its time, on n training and n // 4
    test examples. Returns what it printed."""

    def run(name, gpus, data, n):
        _, images, labels, test_images, test_labels, _ = datasets.load(data, MNIST.parents[1])
        subset = datasets.Dataset(data, images[:n], labels[:n], test_images[: n // 4], test_labels[: n // 4], source="")
        hashes = {data: tiny.write(tmp_path / data, subset)}
        # Jupyter runs this file before the first cell.
        start = f"from gluon_mgpu.data import datasets\ndatasets.SHA256 = {hashes}\n"
        tiny.put(tmp_path / "ipython/profile_default/startup", {"start.py": start.encode()})
        tiny.put(tmp_path, {name: ORIGINALS.with_name(name).read_bytes()})
        options = ["--cpu", "--with", "gluonbook==0.8.10", "--gpus", gpus, "--data-dir", tmp_path]
        env = {**environment, "MXNET_HOME": str(tmp_path)}  # FashionMNIST writes into ~/.mxnet
        ended = runs.gluon_mgpu("run", *options, tmp_path / name, env=env, timeout=900)
        assert ended.returncode == 0, ended.stderr
        return "".join(outputs(tmp_path / name))

    return run


@needs_originals
@pytest.mark.slow
def test_the_original_from_scratch_prints_the_books_values(original):
    text = original("multiple-gpus.ipynb", 2, "fashion-mnist", 512)
    bias, grad, *reduced, batch, half, other_half = runs.arrays(text)
    for array, context in (bias, grad):
        assert (array.tolist(), context) == (examples.COPIED_BIAS, "cpu(1)")
    sums = [*examples.ALLREDUCE["before"], *examples.ALLREDUCE["after"]]
    assert [(array.tolist(), context) for array, context in reduced] == list(zip(sums, ["cpu(1)", "cpu(2)"] * 2))
    for (array, context), device in ((half, 0), (other_half, 1)):
        np.testing.assert_array_equal(array, batch[0][examples.SPLIT["rows"][device]])
        assert context == f"cpu({device + 1})"
    assert len(re.findall(r"^epoch \d, time: .* sec, test acc: 0\.\d\d$", text, re.M)) == 8


@needs_originals
@pytest.mark.slow
def test_the_original_with_gluon_has_equal_replicas_and_learns(original):
    text = original("multiple-gpus-gluon.ipynb", 4, "mnist", 4096)
    scores, weights, grads = (runs.arrays(text)[i : i + 4] for i in (0, 4, 8))
    for printed in (scores, weights, grads):
        assert [context for _, context in printed] == [f"cpu({i + 1})" for i in range(4)]
    for (weight, _), (grad, _) in zip(weights[1:], grads[1:]):
        np.testing.assert_array_equal(weight, weights[0][0])
        assert np.abs(grad - grads[0][0]).max() > 0
    accuracies = [float(accuracy) for accuracy in re.findall(r"accuracy = (\S+)", text)]
    assert len(accuracies) == 10 and min(accuracies[4::5]) > 0.8, text  # 0.1 before training
