"""Notebooks run with `run` and with the kernel, and keep their outputs, whatever happens."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from gluon_mgpu.legacy import notebook

pytest.importorskip("nbclient", reason="needs gluon_mgpu[jupyter]")
import nbformat  # noqa: E402

CELLS = ["import mxnet as mx, numpy as np", "print(mx.gpu(1), np.zeros(1, np.float).dtype)"]


@pytest.fixture
def environment(tmp_path):
    return {**os.environ, "JUPYTER_DATA_DIR": str(tmp_path / "jupyter"), "IPYTHONDIR": str(tmp_path / "ipython")}


def write(path, cells):
    cells = [nbformat.v4.new_code_cell(cell) for cell in cells]
    metadata = {"kernelspec": {"name": "conda_mxnet_p36", "display_name": "gone", "language": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=metadata), path)
    return path


def outputs(path):
    cells = nbformat.read(path, as_version=4).cells
    return ["".join(o.get("text", o.get("ename", "")) for o in cell.outputs) for cell in cells]


def command(environment, *arguments):
    arguments = [sys.executable, "-m", "gluon_mgpu", *map(str, arguments)]
    return subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=100)


def test_a_notebook_is_executed_in_place_or_written_to_another_file(tmp_path, environment):
    path = write(tmp_path / "old.ipynb", CELLS)
    before = path.read_bytes()
    run = command(environment, "run", "--out", tmp_path / "new.ipynb", path)
    assert run.returncode == 0 and path.read_bytes() == before, run.stderr
    run = command(environment, "run", path)
    assert run.returncode == 0, run.stderr
    for name in ("new.ipynb", "old.ipynb"):
        assert "cpu(1) float64\n" in outputs(tmp_path / name)[1]


def test_a_cell_that_fails_is_the_last_and_its_output_is_kept(tmp_path, environment):
    path = write(tmp_path / "old.ipynb", ["print(1)", "raise KeyError('x')", "print(3)"])
    run = command(environment, "run", path)
    assert run.returncode == 1 and "KeyError" in run.stderr.splitlines()[-1]
    assert outputs(path) == ["1\n", "KeyError", ""]


def test_ctrl_c_ends_with_one_line(tmp_path, environment):
    path = write(tmp_path / "old.ipynb", ["import time; open('started', 'w').close(); time.sleep(60)"])
    command = [sys.executable, "-m", "gluon_mgpu", "run", str(path)]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "started").exists():
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 130 and "Traceback" not in error, error


def test_a_folder_that_does_not_exist_is_refused_before_anything_runs(tmp_path, environment):
    path = write(tmp_path / "old.ipynb", ["open('started', 'w').close()"])
    assert command(environment, "run", "--out", tmp_path / "no" / "new.ipynb", path).returncode == 2
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize("content", ["", "{}", '{"cells": 3}', "not JSON"])
def test_a_file_that_is_not_a_notebook_is_refused_and_left_unchanged(tmp_path, environment, content):
    path = tmp_path / "old.ipynb"
    path.write_text(content)
    run = command(environment, "run", path)
    assert run.returncode == 2 and str(path) in run.stderr and len(run.stderr.splitlines()) == 1
    assert path.read_text() == content


def test_the_kernel_runs_notebooks_and_can_be_removed(tmp_path, environment):
    run = command(environment, "kernel", "install", "--gpus", 3)
    assert run.returncode == 0, run.stderr
    folder = tmp_path / "jupyter" / "kernels" / notebook.KERNEL
    assert json.loads((folder / "kernel.json").read_text())["display_name"] == notebook.TITLE
    path = write(tmp_path / "old.ipynb", [*CELLS, "print(mx.context.num_gpus())"])
    code = f"""
        import nbclient, nbformat
        notebook = nbformat.read({str(path)!r}, as_version=4)
        nbclient.NotebookClient(notebook, kernel_name={notebook.KERNEL!r}).execute()
        nbformat.write(notebook, {str(path)!r})
    """
    code = "\n".join(line.strip() for line in code.splitlines())
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    assert "cpu(1) float64\n" in outputs(path)[1] and outputs(path)[2] == "3\n"
    assert command(environment, "kernel", "uninstall").returncode == 0 and not folder.exists()
    assert command(environment, "kernel", "uninstall").returncode == 2
