"""`gluon-mgpu run`: run a program or notebook that was written for MXNet 1.x."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click

from gluon_mgpu.commands import common
from gluon_mgpu.compat import startup
from gluon_mgpu.old import contexts, launch, notebook, prepare
from gluon_mgpu.support.errors import UsageError, setting

MOST_PROCESSES = 128  # of workers, and of servers
OPTIONS = (
    common.option(
        "--gpus",
        type=click.IntRange(1, prepare.MOST_GPUS),
        metavar="N",
        help="If there is no GPU, let the program use N CPU contexts as N GPUs. Without this option, "
        "mx.context.num_gpus() returns 0, but the program can use mx.gpu(i) for any i.",
    ),
    common.settings("data_dir"),
)


def preparation(command: Any) -> Any:
    """Add the options that `settings_of` takes."""
    for add in reversed(OPTIONS):
        command = add(command)
    return command


def settings_of(**options: Any) -> prepare.Preparation:
    if options["data_dir"]:  # a notebook runs in its own folder
        options["data_dir"] = os.path.abspath(options["data_dir"])
    return prepare.Preparation(**options)


@common.command(
    context_settings={"allow_interspersed_args": False},
    examples="""
        gluon-mgpu run train.py --epochs 2
        gluon-mgpu run --gpus 4 multiple-gpus.ipynb
        gluon-mgpu run -m pytest tests
        gluon-mgpu run --workers 2 train.py --kv-store dist_sync
    """,
)
@common.option("-m", "is_module", is_flag=True, help="PROGRAM is the name of a module, as in `python -m`.")
@preparation
@common.option(
    "--out", type=common.FILE, metavar="FILE", help="Write the executed notebook to FILE instead of NOTEBOOK."
)
@common.option(
    "--workers",
    type=click.IntRange(1, MOST_PROCESSES),
    metavar="N",
    help="Start N processes of a program that uses kv=dist_sync or dist_async, and MXNet's servers, on this machine.",
)
@common.option(
    "--servers", type=click.IntRange(1, MOST_PROCESSES), metavar="N", help="With --workers: N servers. Default: 1."
)
@click.argument("program", metavar="PROGRAM|NOTEBOOK")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENT]...")
@click.pass_context
def run(
    context: click.Context,
    is_module: bool,
    out: str | None,
    workers: int | None,
    servers: int | None,
    program: str,
    arguments: tuple[str, ...],
    **options: Any,
) -> None:
    """Run an MXNet 1.x program or notebook, unchanged. This sets MXNet up for this machine, restores names that Python
    and NumPy have removed, uses CPU contexts in place of GPU contexts if there is no GPU, and replaces the dead
    downloads of MNIST and Fashion-MNIST. Otherwise, it is the same as `python PROGRAM`."""
    settings = settings_of(**options)
    startup.check_environment()
    if servers and not workers:
        raise UsageError("servers", servers, f"needs {setting('workers')}")
    if program.endswith(".ipynb") and not is_module:
        if workers:
            raise UsageError("workers", workers, "does not work with notebooks; omit it")
        if arguments:
            raise UsageError(None, arguments[0], "a notebook takes no arguments; omit it")
        context.exit(0 if notebook.run(program, out, settings) else 1)
    if out:
        raise UsageError("out", out, "works only with notebooks; omit it")
    if not is_module and (program != "-" or workers) and not os.path.exists(program):
        raise UsageError(None, program, "no such file")
    if os.path.isfile(program) and b"SyncBatchNorm" in Path(program).read_bytes():
        os.environ.setdefault("MXNET_CPU_TEMP_COPY", contexts.SYNC_TEMP_COPIES)
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # such as -W error
    command = [sys.executable, *flags, *(["-m"] if is_module else []), program, *arguments]
    if workers:
        context.exit(launch.launch(command, settings, workers, servers or 1))
    environment = prepare.environment(settings)
    os.execve(sys.executable, command, environment)  # nosec B606  # without a shell
