"""`gluon-mgpu launch`: run an MXNet program in several processes on this machine."""

from __future__ import annotations

from typing import Any

import click

from gluon_mgpu.commands import common
from gluon_mgpu.distributed import launch as launcher

PROCESSES = click.IntRange(1, launcher.MAX_PROCESSES)


@common.command(
    context_settings={"allow_interspersed_args": False},
    examples="""
        gluon-mgpu launch --workers 2 --servers 1 -- gluon-mgpu train --impl highlevel --kvstore dist_sync
        gluon-mgpu launch --workers 4 --servers 2 -- gluon-mgpu train --kvstore dist_sync --compress 2bit:0.5
        gluon-mgpu launch --restarts 5 -- gluon-mgpu train --kvstore dist_sync --out runs/first
    """,
)
@common.option("--workers", type=PROCESSES, default=2, metavar="N", help="Number of training processes.")
@common.option("--servers", type=PROCESSES, default=1, metavar="N", help="Number of parameter servers.")
@common.option(
    "--restarts",
    type=click.IntRange(0, launcher.MAX_RESTARTS),
    default=0,
    metavar="N",
    help="If a process fails, restart all processes, at most N times. train --out DIR then continues from its last "
    "checkpoint.",
)
@click.argument("command", nargs=-1, type=click.Path(readable=False), metavar="-- COMMAND...")
@click.pass_context
def launch(context: click.Context, command: tuple[str, ...], **options: Any) -> None:
    """Run an MXNet program in several processes on this machine: a scheduler, MXNet's parameter servers, and workers.
    Worker 0 gets the terminal's input. If a process fails, all other processes are stopped, and one line names the
    failed process."""
    context.exit(launcher.launch(command, **options))
