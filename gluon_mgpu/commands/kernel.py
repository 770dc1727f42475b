"""`gluon-mgpu kernel`: a Jupyter kernel that runs notebooks as `gluon-mgpu run` does."""

from __future__ import annotations

import sys
from typing import Any

import click

from gluon_mgpu.commands import common
from gluon_mgpu.commands.run import preparation, settings_of
from gluon_mgpu.old import notebook


@click.group(cls=common.CommandGroup, examples="gluon-mgpu kernel install --gpus 2")
def kernel() -> None:
    """Install the Jupyter kernel "MXNet (gluon_mgpu)", which runs old MXNet notebooks unchanged."""


@kernel.command(examples="gluon-mgpu kernel install --gpus 2")
@preparation
@common.option("--sys-prefix", is_flag=True, help="Install for this Python environment instead of for the user.")
def install(sys_prefix: bool, **options: Any) -> None:
    """Install the kernel. The options apply to all notebooks that use it."""
    folder = notebook.install_kernel(settings_of(**options), sys.prefix if sys_prefix else None)
    remove = f"`jupyter kernelspec uninstall {notebook.KERNEL}` removes it"
    click.echo(f"installed {folder}: choose the kernel {notebook.TITLE} in Jupyter; {remove}")
