"""Notebooks run with `run` and with the kernel, and keep their outputs, whatever happens."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import lenet64
import numpy as np
import pytest
import runs
import tiny
from parity import examples
from runs import arrays

from gluon_mgpu.data import datasets
from gluon_mgpu.old import notebook, prepare
from gluon_mgpu.support.errors import UsageError

pytest.importorskip("nbclient", reason="needs gluon_mgpu[jupyter]")
import jupyter_client  # noqa: E402
import nbformat  # noqa: E402

from gluon_mgpu.support import subprocesses

# The original notebooks and real data, if folders beside the checkout have them
BESIDE = Path(__file__).parents[3]
ORIGINALS = next(BESIDE.glob("*/originals/multiple-gpus.ipynb"), None)
MNIST = next(BESIDE.glob("*/*/mnist/train-images-idx3-ubyte.gz"), None)
CELLS = ["import mxnet as mx, numpy as np", "print(mx.gpu(1), np.zeros(1, np.float).dtype)"]


@pytest.fixture
def environment(tmp_path):
    folders = {"JUPYTER_DATA_DIR": str(tmp_path / "jupyter"), "IPYTHONDIR": str(tmp_path / "ipython")}
    return {**subprocesses.users_environment(), **folders}


@pytest.fixture
def install(environment):
    """install("--gpus", 2) installs the kernel."""
    return lambda *options: command(environment, "kernel", "install", *options).check_returncode()


def write(path, cells):
    cells = [nbformat.v4.new_code_cell(cell) for cell in cells]
    metadata = {"kernelspec": {"name": "conda_mxnet_p36", "display_name": "gone", "language": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=metadata), path)
    return path


def outputs(path):
    """What each code cell printed, or the name of its error."""
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    return ["".join(o.get("text", o.get("ename", "")) for o in cell.outputs) for cell in cells]


def command(environment, *arguments):
    return runs.gluon_mgpu(*arguments, env=environment)


EXECUTE = f"""
import sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, kernel_name={notebook.KERNEL!r}).execute(cwd=sys.argv[2])
nbformat.write(notebook, sys.argv[1])
"""


def execute(path, environment):
    """Execute a notebook with the installed kernel, in place."""
    run = runs.finished(sys.executable, "-c", EXECUTE, path, path.parent, env=environment, timeout=600)
    assert run.returncode == 0, run.stderr


def test_a_notebook_is_executed_and_written_to_another_file(tmp_path, environment):
    path = write(tmp_path / "old.ipynb", CELLS)
    before = path.read_bytes()
    run = command(environment, "run", "--out", tmp_path / "new.ipynb", path)
    assert run.returncode == 0 and path.read_bytes() == before, run.stderr
    assert "cpu(2) float64\n" in outputs(tmp_path / "new.ipynb")[1]


BROKEN = (
    "class Broken:\n    def __repr__(self): raise LookupError('no picture')\nBroken()"  # runs, but cannot be displayed
)


@pytest.mark.parametrize("cell, error", [("raise KeyError('x')", "KeyError"), (BROKEN, "LookupError")])
def test_a_cell_that_fails_is_the_last_and_outputs_are_kept_in_place(tmp_path, environment, cell, error):
    path = write(tmp_path / "old.ipynb", ["print(1)", cell, "print(3)"])
    run = command(environment, "run", path)
    assert run.returncode == 1 and error in run.stderr.splitlines()[-1]
    assert outputs(path) == ["1\n", error, ""]


def test_ctrl_c_ends_with_one_line(tmp_path, environment):
    path = write(tmp_path / "old.ipynb", ["import time; open('started', 'w').close(); time.sleep(60)"])
    command = [sys.executable, "-m", "gluon_mgpu", "run", str(path)]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    runs.wait((tmp_path / "started").exists, 100)
    process.send_signal(signal.SIGINT)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 130 and "Traceback" not in error, error


def test_a_killed_run_leaves_no_kernel(tmp_path, environment):
    start = "import os; open('new', 'w').write(str(os.getpid())); os.rename('new', 'started')"
    busy = "import ctypes; ctypes.PyDLL(None).sleep(60)"  # no other thread of the kernel can run
    path = write(tmp_path / "old.ipynb", [start, busy])
    process = subprocess.Popen([sys.executable, "-m", "gluon_mgpu", "run", str(path)], env=environment)
    runs.wait((tmp_path / "started").exists, 100)
    time.sleep(0.5)
    process.kill()
    process.wait()
    runs.wait(lambda: not runs.alive([(tmp_path / "started").read_text()]), 10)


@pytest.mark.parametrize("content", ["", "{}", '{"cells": 3}', "not JSON"])
def test_a_file_that_is_not_a_notebook_is_refused_and_kept(tmp_path, content):
    path = tmp_path / "old.ipynb"
    path.write_text(content)
    with pytest.raises(UsageError, match="old.ipynb"):
        notebook.run(str(path), None, prepare.Preparation())
    assert path.read_text() == content


def test_a_missing_folder_is_refused_before_anything_runs(tmp_path):
    path = write(tmp_path / "old.ipynb", ["open('started', 'w').close()"])
    with pytest.raises(UsageError):
        notebook.run(str(path), str(tmp_path / "no" / "new.ipynb"), prepare.Preparation())
    assert not (tmp_path / "started").exists()


def test_the_kernel_prepares_its_process_and_after_an_interrupt_the_next_cell_runs(
    tmp_path, environment, install, monkeypatch
):
    install("--gpus", 3)
    spec = tmp_path / "jupyter" / "kernels" / notebook.KERNEL / "kernel.json"
    assert json.loads(spec.read_text())["display_name"] == notebook.TITLE
    monkeypatch.setenv("JUPYTER_DATA_DIR", environment["JUPYTER_DATA_DIR"])
    manager, client = jupyter_client.manager.start_new_kernel(kernel_name=notebook.KERNEL, env=environment)
    try:
        code = f"""if True:
            import mxnet as mx, numpy as np
            assert mx.context.num_gpus() == 3 and np.float is float
            x = [mx.nd.ones((500, 500), mx.gpu(i)) for i in range(2)]
            open({str(tmp_path / "started")!r}, "w").close()
            while True:
                [mx.nd.dot(a, a).wait_to_read() for a in x]
        """
        cell = client.execute(code, stop_on_error=False)  # otherwise, a cell sent right after the error is aborted
        runs.wait((tmp_path / "started").exists, 100)
        manager.interrupt_kernel()
        replies = iter(lambda: client.get_shell_msg(timeout=60), None)
        reply = next(reply for reply in replies if reply["parent_header"]["msg_id"] == cell)
        assert reply["content"]["ename"] == "KeyboardInterrupt"
        reply = client.execute("assert mx.nd.dot(x[1], x[1]).min().asscalar() == 500", reply=True, timeout=60)
        assert reply["content"]["status"] == "ok", reply["content"]
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


@pytest.fixture
def original(tmp_path, environment, install):
    """original(name, gpus, data, n) runs an original notebook with the kernel on n training and n // 4 test examples.

    last: a cell to run after the notebook's own. Returns what the notebook printed.
    """

    def run(name, gpus, data, n, last=""):
        _, images, labels, test_images, test_labels, _ = datasets.load(data, MNIST.parents[1])
        subset = datasets.Dataset(data, images[:n], labels[:n], test_images[: n // 4], test_labels[: n // 4], source="")
        hashes = {data: tiny.write(tmp_path / data, subset)}
        # Jupyter runs this file before the first cell.
        start = tmp_path / "ipython" / "profile_default" / "startup" / "start.py"
        start.parent.mkdir(parents=True)
        start.write_text(f"from gluon_mgpu.data import datasets\ndatasets.SHA256 = {hashes}\n")
        install("--gpus", gpus, "--data-dir", tmp_path)
        path, contents = tmp_path / name, nbformat.read(ORIGINALS.with_name(name), as_version=4)
        contents.cells.append(nbformat.v4.new_code_cell(last))
        nbformat.write(contents, path)
        execute(path, {**environment, "HOME": str(tmp_path)})  # FashionMNIST writes into the home
        return "".join(outputs(path))

    return run


GLUONBOOK = """  # what the original imports from the package of this name
from mxnet.gluon.data import DataLoader
from mxnet.gluon.data.vision import FashionMNIST, transforms

def load_data_fashion_mnist(batch_size):
    data = (FashionMNIST(train=train).transform_first(transforms.ToTensor()) for train in (True, False))
    return [DataLoader(dataset, batch_size) for dataset in data]

def sgd(params, lr, batch_size):
    for param in params:
        param[:] = param - lr * param.grad / batch_size

def evaluate_accuracy(data_iter, net, ctx):
    right = count = 0
    for X, y in data_iter:
        classes = net(X.as_in_context(ctx)).argmax(axis=1).asnumpy()
        right, count = right + (classes == y.asnumpy()).sum(), count + len(y)
    return right / count
"""
needs_originals = pytest.mark.skipif(not (ORIGINALS and MNIST), reason="needs the original notebooks")


STEP = """
import numpy as np
X, y = nd.random.uniform(shape=(20, 1, 28, 28)), nd.arange(20) % 3
gpu_params = [get_params(params, c) for c in ctx]
train_batch(X, y, gpu_params, ctx, lr=20)
np.savez("step", *[array.asnumpy() for arrays in [params, *gpu_params, [X, y]] for array in arrays])
"""


@needs_originals
def test_the_original_from_scratch_prints_the_books_values_and_its_step_is_numpys(original, tmp_path):
    (tmp_path / "gluonbook.py").write_text(GLUONBOOK)
    text = original("multiple-gpus.ipynb", 2, "fashion-mnist", 512, STEP)
    bias, grad, *reduced, batch, half, other_half = arrays(text)
    for array, context in (bias, grad):
        assert (array.tolist(), context) == (examples.COPIED_BIAS, "cpu(1)")
    sums = [*examples.ALLREDUCE["before"], *examples.ALLREDUCE["after"]]
    assert [(array.tolist(), context) for array, context in reduced] == list(zip(sums, ["cpu(1)", "cpu(2)"] * 2))
    for (array, context), device in ((half, 0), (other_half, 1)):
        np.testing.assert_array_equal(array, batch[0][examples.SPLIT["rows"][device]])
        assert context == f"cpu({device + 1})"
    assert len(re.findall(r"^epoch \d, time: .* sec, test acc: 0\.\d\d$", text, re.M)) == 8
    *saved, X, y = np.load(tmp_path / "step.npz").values()
    before, *after = ([p.T if p.ndim == 2 else p for p in saved[i : i + 8]] for i in (0, 8, 16))
    _, grads = lenet64.losses_and_gradients([p.astype(np.float64) for p in before], X, y.astype(int))
    for params in after:  # lr is the batch size, so the sum of the gradients is subtracted
        for old, new, grad in zip(before, params, grads):
            lenet64.assert_close(old - new, grad, lenet64.additions(20))


@needs_originals
def test_the_original_with_gluon_has_equal_replicas_and_learns_with_the_kernel(original):
    text = original("multiple-gpus-gluon.ipynb", 4, "mnist", 4096)
    scores, weights, grads = (arrays(text)[i : i + 4] for i in (0, 4, 8))
    for printed in (scores, weights, grads):
        assert [context for _, context in printed] == [f"cpu({i + 1})" for i in range(4)]
    for (weight, _), (grad, _) in zip(weights[1:], grads[1:]):
        np.testing.assert_array_equal(weight, weights[0][0])
        assert np.abs(grad - grads[0][0]).max() > 0
    accuracies = [float(accuracy) for accuracy in re.findall(r"accuracy = (\S+)", text)]
    assert len(accuracies) == 10 and min(accuracies[4::5]) > 0.8, text  # 0.1 before training
