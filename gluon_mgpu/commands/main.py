"""`gluon-mgpu`: the group of all commands. Imports only the module of the command that is called."""

from __future__ import annotations

import difflib
import importlib

import click

from gluon_mgpu import __version__
from gluon_mgpu.commands import common

COMMANDS = "train check exercise evaluate convert run kernel compile doctor".split()


class Commands(common.CommandGroup):
    def list_commands(self, context: click.Context) -> list[str]:
        return COMMANDS

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            near = difflib.get_close_matches(name, COMMANDS)
            if near and not context.resilient_parsing:
                raise click.UsageError(f"No such command {name!r}. Did you mean {near[0]!r}?", context)
            return None
        return getattr(importlib.import_module(f"gluon_mgpu.commands.{name}"), name)


@click.group(
    cls=Commands,
    epilog='For tab completion in bash, run: eval "$(_GLUON_MGPU_COMPLETE=bash_source gluon-mgpu)". For zsh, write '
    "zsh_source.",
    examples="""
        gluon-mgpu doctor
        gluon-mgpu train --impl scratch --gpus 2
        gluon-mgpu train --help
    """,
)
@click.version_option(__version__)
def main() -> None:
    """Data-parallel training with MXNet, from scratch and with Gluon."""
