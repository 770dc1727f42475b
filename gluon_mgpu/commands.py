"""What the commands have in common: errors as one line, exit statuses, options.

Exit status 0; 1 a run failed; 2 the command was wrong; 130 interrupted. What is imported here needs no NumPy, since
`gluon_mgpu.doctor` must start where that is broken.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn, TypeVar

import click

import gluon_mgpu
from gluon_mgpu import devices, engine
from gluon_mgpu.distributed import place
from gluon_mgpu.errors import Error

F = TypeVar("F", bound=Callable[..., Any])  # what click's decorators take, and give back


class OneLineErrors(click.Command):
    """Ends with one line and the right exit status instead of a traceback, which --debug shows."""

    def main(self, *args: Any, **kwargs: Any) -> NoReturn:
        main_thread = threading.current_thread() is threading.main_thread()
        if main_thread:  # SIGTERM ends a command, and what it started, as Ctrl-C does
            before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        debug = "--debug" in (kwargs.get("args") or (args and args[0]) or sys.argv[1:])
        try:
            status = super().main(*args, **{**kwargs, "standalone_mode": False}) or 0  # that of context.exit
        except (Exception, KeyboardInterrupt) as error:
            status = 1
            try:
                if debug:
                    traceback.print_exc()
                status = _report(error)
            finally:
                if place.started():  # operators that wait for another process may never end, and Python waits for them
                    with suppress(OSError, ValueError, AttributeError):  # a standard output that is gone
                        sys.stdout.flush()
                    os._exit(status)
        finally:
            if main_thread:
                signal.signal(signal.SIGTERM, before)
        sys.exit(status)


class Command(OneLineErrors):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(click.Option(["--debug"], is_flag=True, expose_value=False, help="Show tracebacks."))


class Group(OneLineErrors, click.Group):
    pass


def _report(error: BaseException) -> int:
    """One line on standard error; returns the exit status."""
    if isinstance(error, click.exceptions.Exit):
        return error.exit_code
    if isinstance(error, (KeyboardInterrupt, click.Abort)):
        place.say("interrupted", prefix="")
        return 130
    if isinstance(error, click.ClickException):
        if place.speaks():  # all processes of a run have the same command
            error.show()
        return error.exit_code
    if isinstance(error, Error):
        click.echo(f"error: {place.who()}{error}", err=True)
        return error.exit_status
    click.echo(f"error: {place.who()}{engine.line_of(error)}", err=True)
    return 1


def setting(
    *names: str, kind: Any, help: str | None = None, metavar: str | None = None, flag: bool = False
) -> Callable[[F], F]:
    """An option for a field of Settings, with its default; Settings checks the value."""
    from gluon_mgpu.settings import SGD

    default = getattr(SGD, names[0][2:].replace("-", "_"))
    shown = default not in (None, False, ())
    options: dict[str, Any] = {"is_flag": True} if flag else {"type": kind, "metavar": metavar}
    return click.option(*names, default=default, show_default=shown, help=help, **options)


def gpus(default: str = "1", help: str = "How many devices, or which.") -> Callable[[F], F]:
    return click.option("--gpus", default=default, show_default=True, metavar="N|I,J,...", help=help)


IMPLS = click.Choice(gluon_mgpu.IMPLS)
impl = click.option("--impl", type=IMPLS, default="scratch", show_default=True, help="NDArray alone, or Gluon.")
device = click.option(
    "--device",
    type=click.Choice(devices.DEVICES),
    default="auto",
    show_default=True,
    help="auto: GPUs where there are any, else as many CPU contexts.",
)
data_dir = click.option(
    "--data-dir",
    type=click.Path(),
    metavar="DIR",
    help="Where the data is; else GLUON_MGPU_DATA, the usual folders, a download.",
)
