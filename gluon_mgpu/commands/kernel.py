"""`gluon-mgpu kernel`: a Jupyter kernel that runs notebooks as `gluon-mgpu run` does."""

from __future__ import annotations

import sys
from typing import Any

import click

from gluon_mgpu.commands import common
from gluon_mgpu.commands.run import preparation, python_and_settings
from gluon_mgpu.old import prepare
from gluon_mgpu.support import subprocesses

KERNEL = "gluon_mgpu"
TITLE = "MXNet (gluon_mgpu)"


@click.group(cls=common.CommandGroup, examples="gluon-mgpu kernel install --gpus 2")
def kernel() -> None:
    """Install the Jupyter kernel "MXNet (gluon_mgpu)", which runs old MXNet notebooks unchanged."""


@kernel.command(examples="gluon-mgpu kernel install --gpus 2")
@preparation
@common.option("--sys-prefix", is_flag=True, help="Install for this Python environment instead of for the user.")
def install(sys_prefix: bool, **options: Any) -> None:
    """Install the kernel. The options apply to all notebooks that use it."""
    python, settings = python_and_settings(**options)
    variables = prepare.variables(settings, python)
    command = [python, "-m", "ipykernel", "install", "--name", KERNEL, "--display-name", TITLE]
    command += ["--prefix", sys.prefix] if sys_prefix else ["--user"]
    for name, value in (("PYTHONPATH", str(prepare.STARTUP)), (prepare.VARIABLE, variables[prepare.VARIABLE])):
        command += ["--env", name, value]
    finished = subprocesses.run(command)
    subprocesses.raise_for_status("ipykernel", finished)
    click.echo(f"{finished.out.strip()}: choose the kernel {TITLE} in Jupyter")
