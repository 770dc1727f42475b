"""Runs Jupyter notebooks in processes that `prepare` has prepared, and installs a kernel that runs in such a process.

This module needs gluon_mgpu[jupyter].
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from gluon_mgpu.old import launch, prepare
from gluon_mgpu.support import files, log
from gluon_mgpu.support.errors import Error, UsageError

KERNEL = "gluon_mgpu"
TITLE = "MXNet (gluon_mgpu)"
ARGV = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]


def run(path: str, out: str | None, settings: prepare.Preparation) -> bool:
    """Execute all cells of a notebook, with its folder as the working directory, and save it with its outputs.

    Execution stops at the first cell that fails. Returns whether all cells succeeded.

    path: the notebook. out: the file to write; None: overwrite path. Raises UsageError if path is not a notebook or
    the folder of out is not writable, and Error if Jupyter's packages are missing or the kernel exits.
    """
    _require("nbclient", "ipykernel")
    import nbclient
    import nbformat
    from jupyter_client.kernelspec import KernelSpec
    from nbclient.exceptions import CellExecutionError, DeadKernelError

    target = Path(out or path).absolute()
    if not target.parent.is_dir() or not os.access(target.parent, os.W_OK):
        raise UsageError("out", target, f"cannot write to the folder {target.parent}; use another folder")
    try:
        notebook: Any = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
    except Exception as error:  # nbformat raises many exception types for damaged files
        reason = getattr(error, "strerror", None) or str(error).strip().splitlines()[0]
        raise UsageError(None, path, f"cannot be read as a notebook ({reason})") from None
    client = nbclient.NotebookClient(
        notebook,
        timeout=None,  # a cell may train for hours
        extra_arguments=["--log-level=ERROR"],  # recent versions of ipykernel warn about every kernel
        resources={"metadata": {"path": str(Path(path).absolute().parent)}},
    )
    # Use this Python, because the notebook may name a kernel that is not installed here.
    client.create_kernel_manager()._kernel_spec = KernelSpec(argv=ARGV)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    failed: list[Any] = []
    client.on_cell_error = lambda cell, **_: failed.append(cell)
    with log.progress(total=len(cells), unit=" cells", desc=Path(path).name) as bar:
        client.on_cell_executed = lambda **_: bar.update()
        client.on_notebook_start = lambda **_: _pass_on_interrupts(client)
        try:
            client.execute(env=prepare.environment(settings), preexec_fn=launch.end_with_parent)
        except CellExecutionError as error:
            if error.ename == "KeyboardInterrupt":
                raise KeyboardInterrupt from None
            # The exception itself says NoneType if the cell ran, but its result cannot be displayed.
            shown: Any = next((output for output in failed[-1].outputs if output.output_type == "error"), error)
            log.say(f"{path}: a cell failed ({shown.ename}: {shown.evalue})")
            return False
        except (DeadKernelError, RuntimeError) as error:
            raise Error(f"{path}: {str(error).splitlines()[0]}") from None
        finally:
            text = nbformat.writes(notebook)
            files.write_whole(target, lambda file: file.write(text.encode()))
    return True


def _pass_on_interrupts(client: Any) -> None:
    """Make Ctrl-C interrupt the cell. By default, nbclient would stop the kernel, and outputs would be lost."""
    loop = asyncio.get_running_loop()
    for which in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(which, lambda: asyncio.ensure_future(client.km.interrupt_kernel()))


def install_kernel(settings: prepare.Preparation, prefix: str | None = None) -> str:
    """Install a Jupyter kernel that runs this Python in a process that `prepare` has prepared. Returns the kernel's
    folder.

    prefix: an environment's folder, such as sys.prefix; None: the user's folder.
    """
    _require("jupyter_client", "ipykernel")
    from jupyter_client.kernelspec import KernelSpecManager

    settings_of_kernel = prepare.environment(settings)[prepare.VARIABLE]
    spec = {
        "argv": ARGV,
        "display_name": TITLE,
        "language": "python",
        "env": {"PYTHONPATH": str(prepare.STARTUP), prepare.VARIABLE: settings_of_kernel},
        "metadata": {"debugger": True},
    }
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "kernel.json").write_text(json.dumps(spec, indent=1))
        try:
            return str(KernelSpecManager().install_kernel_spec(folder, KERNEL, user=prefix is None, prefix=prefix))
        except OSError as error:
            raise Error(f"cannot install the kernel in {error.filename} ({error.strerror})") from None


def _require(*packages: str) -> None:
    absent = [package for package in packages if importlib.util.find_spec(package) is None]
    if absent:
        raise Error(f"missing packages: {', '.join(absent)}; run `pip install 'gluon_mgpu[jupyter]'`")
