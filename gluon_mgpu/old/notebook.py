"""Executes a notebook: `python -m gluon_mgpu.old.notebook NOTEBOOK OUT`, in a process that `prepare` has prepared.

`gluon-mgpu run` starts it in the environment of old programs, which has nbclient and ipykernel.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

from gluon_mgpu.old import explain, prepare, python2
from gluon_mgpu.support import files, log


def main(path: str, out: str) -> int:
    """Execute all cells of a notebook, with its folder as the working directory, and save it with its outputs.

    Execution stops at the first cell that fails; later cells have no outputs. Returns the exit status: 0; 1 if a cell
    failed; 2 if path is not a notebook; 130 after Ctrl-C.
    """
    import nbclient
    import nbformat
    from jupyter_client.kernelspec import KernelSpec
    from nbclient.exceptions import CellExecutionError, DeadKernelError

    try:
        notebook: Any = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
    except Exception as error:  # nbformat raises many exception types for damaged files
        log.error(f"{path}: cannot be read as a notebook ({(str(error) or type(error).__name__).splitlines()[0]})")
        return 2
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for cell in cells:
        cell.update(outputs=[], execution_count=None)
    folder = str(Path(path).absolute().parent)
    client = nbclient.NotebookClient(notebook, timeout=None, resources={"metadata": {"path": folder}})
    # Use this Python, because the notebook may name a kernel that is not installed.
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}", "--log-level=ERROR"]
    manager: Any = client.create_kernel_manager()
    manager._kernel_spec = KernelSpec(argv=argv)
    with log.progress(total=len(cells), unit=" cells", desc=Path(path).name) as bar:
        client.on_cell_executed = lambda **_: bar.update()
        # nbclient's own handlers would wait until the cell ends.
        client.on_notebook_start = lambda **_: _on_signals(signal.default_int_handler)
        try:
            client.execute()
            return 0
        except KeyboardInterrupt:
            _on_signals(signal.SIG_IGN)
            os.killpg(manager.provisioner.pgid, signal.SIGKILL)  # it may be in a long call
            manager.cleanup_connection_file()
            log.say("interrupted", prefix="")
            return 130
        except (CellExecutionError, DeadKernelError, RuntimeError) as error:
            failed = [(cell, output) for cell in cells for output in cell.outputs if output.output_type == "error"]
            log.error(f"{path}: {_reason(path, *failed[-1]) if failed else str(error).splitlines()[0]}")
            return 1
        finally:
            text = nbformat.writes(notebook)
            files.write_whole(out, lambda file: file.write(text.encode()))


def _reason(path: str, cell: Any, error: Any) -> str:
    """Why a cell failed, and what to do, if that is known. error: its output."""
    reason = f"{error.ename}: {error.evalue}"
    code = python2.cell_without_commands(cell.source) if error.ename in ("SyntaxError", "IndentationError") else ""
    settings = prepare.given()
    text = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(error.traceback))  # it also has the errors that led to this one
    messages = [error.evalue, *re.findall(r"(?:^\w*Error: |-> \d+ +(?=assert ))(.+)", text, re.MULTILINE)]
    found = (explain.advice_on(message, code, here=settings.here, start=settings.start) for message in messages)
    advice = next(filter(None, found), "")
    if advice == python2.CONVERT:
        python = shlex.quote(str(Path(path).with_suffix(".py")))
        script = f"`gluon-mgpu run --with nbconvert -m nbconvert --to python {shlex.quote(path)}`"
        advice = f"this is written for Python 2: make a program of it ({script}), and convert that with 2to3"
        advice += f" (`gluon-mgpu run -m lib2to3 -w {python}`)"
    return f"{reason}; {advice}" if advice else reason


def _on_signals(handler: Any) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)


if __name__ == "__main__":
    os._exit(main(*sys.argv[1:]))  # at exit, nbclient would run into the task that was interrupted
