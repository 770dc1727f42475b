"""What the commands have in common: errors as one line, exit statuses, options and their groups in --help, examples.

Exit status 0; 1 a run failed; 2 the command was wrong; 130 interrupted. What is imported here needs no NumPy, since
`gluon_mgpu.commands.doctor` must start where that is broken.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
import signal
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NoReturn, TypeVar

import click
from click.shell_completion import CompletionItem

import gluon_mgpu
from gluon_mgpu.distributed import process as place
from gluon_mgpu.runtime import devices, engine
from gluon_mgpu.runtime.errors import Error, UsageError

F = TypeVar("F", bound=Callable[..., Any])  # what click's decorators take, and give back

# Where an option stands in --help: the same heading in every command, in this order; what is in none comes last.
GROUPS = {
    "Network and data": "impl model models hybridize recipe list_recipes dataset limit data_dir images",
    "Training": "batch_size epochs lr scale_lr schedule step_epochs step_factor warmup_epochs momentum weight_decay "
    "clip_norm accumulate seed seeds quick",
    "Devices": "gpus contexts device shares",
    "Several processes": "kvstore compress workers servers port",
    "Measuring": "what rounds steps products size accuracy",
    "Files": "out resume tensorboard profile export",
}

NUMBERS = {"integer": "whole number: give one such as 4", "float": "number: give one such as 0.1"}  # by click's names


class _Ours(click.Command):
    """Ends with one line and the right exit status instead of a traceback, which --debug shows.

    examples: lines for a shell, the last part of --help; those of `gluon-mgpu` stand there as it was called.
    """

    def __init__(self, *args: Any, examples: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = [line.strip() for line in examples.strip().splitlines()]

    def format_epilog(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(context, formatter)
        lines, called = "\n".join(self.examples), context.find_root().info_name or ""
        if called.endswith(".py"):  # python scripts/train.py
            folder = re.sub(r"\w+\.py$", "", called)
            lines = re.sub(r"gluon-mgpu ([\w-]+)", lambda m: f"{folder}{m[1].replace('-', '_')}.py", lines)
        with formatter.section("Examples"):
            formatter.write(textwrap.indent(lines, "  ") + "\n")

    def main(self, *args: Any, **kwargs: Any) -> NoReturn:
        main_thread = threading.current_thread() is threading.main_thread()
        if main_thread:  # SIGTERM ends a command, and what it started, as Ctrl-C does
            before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        kwargs["prog_name"] = kwargs.get("prog_name") or shlex.join(["python", sys.argv[0]])
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


class Command(_Ours):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(click.Option(["--debug"], is_flag=True, expose_value=False, help="Show tracebacks."))

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except UsageError as error:  # Settings names its fields, as from Python: "lr -1.0: ..."
            options = {param.name: param.opts[0] for param in self.params if isinstance(param, click.Option)}
            field = re.match(r"(\w+) \S+: ", str(error))
            if field and field[1] in options:
                error.args = (re.sub(r"^\w+|\w+_\w+", lambda word: options.get(word[0], word[0]), str(error)),)
            raise

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        headings = {name: heading for heading, names in GROUPS.items() for name in names.split()}
        groups: dict[str, list[tuple[str, str]]] = {heading: [] for heading in (*GROUPS, "Other options")}
        for param in self.get_params(context):
            record = param.get_help_record(context)
            if record and isinstance(param, click.Option):
                groups[headings.get(param.name or "", "Other options")].append(record)
        width = max(len(names) for rows in groups.values() for names, _ in rows)
        for heading, rows in groups.items():
            if rows:
                with formatter.section(heading):
                    formatter.write_dl([(f"{names:{min(width, 30)}}", help) for names, help in rows])


class Group(_Ours, click.Group):
    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        if not args and not context.resilient_parsing:  # click's versions differ in where to, and in the status
            click.echo(context.get_help(), err=True)
            context.exit(2)
        return super().parse_args(context, args)

    def resolve_command(self, context: click.Context, args: list[str]) -> Any:
        if args[0] not in self.commands and not context.resilient_parsing:
            context.fail(f"{args[0]}: no such command{nearest(args[0], self.commands)}")
        return super().resolve_command(context, args)


class Choice(click.Choice):
    """One of some words. An error names the nearest."""

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> Any:
        if value not in self.choices:
            words = ", ".join(self.choices)
            self.fail(f"{value}: choose one of {words}{nearest(value, self.choices)}", param, context)
        return super().convert(value, param, context)


class Folder(click.Path):
    """A shell completes it as a folder. Whether it is one, its reader says."""

    def shell_complete(self, context: click.Context, param: click.Parameter, begun: str) -> list[CompletionItem]:
        return [CompletionItem(begun, type="dir")]


def nearest(word: str, words: Iterable[str]) -> str:
    """The end of a line about a wrong word: which of the right ones may be meant, or nothing where none is near."""
    near = difflib.get_close_matches(word.lower(), words, n=1, cutoff=0.65)
    return f"; did you mean {near[0]}?" if near else ""


def _usage(error: click.UsageError) -> str:
    """What click found wrong with a command, in one line."""
    help = f" ({error.ctx.command_path} --help shows more)" if error.ctx else ""
    if isinstance(error, click.NoSuchOption) and error.ctx:
        first = error.__context__  # of -epochs, where `error` is of its -e
        wrong = first.option_name if isinstance(first, click.NoSuchOption) else error.option_name
        options = [param for param in error.ctx.command.get_params(error.ctx) if isinstance(param, click.Option)]
        names = [name for option in options for name in (*option.opts, *option.secondary_opts)]
        line = f"{wrong}: no such option{nearest(wrong, names)}"
    elif isinstance(error, click.MissingParameter):
        line = error.format_message()
    elif isinstance(error, click.BadParameter) and error.param and error.ctx:
        name = error.param.get_error_hint(error.ctx).replace("'", "")
        line = f"{name} {error.message}"
        for kind, wanted in NUMBERS.items():
            line = re.sub(f"is not a valid {kind}( range)?", f"is no {wanted}", line)
    else:
        line = error.format_message()
    return " ".join(line.removesuffix(".").splitlines()) + help


def _report(error: BaseException) -> int:
    """One line on standard error; returns the exit status."""
    if isinstance(error, click.exceptions.Exit):
        return error.exit_code
    if isinstance(error, OSError) and isinstance(error.__context__, KeyboardInterrupt):
        return 130  # click, too, wanted to tell whoever is gone
    if isinstance(error, (KeyboardInterrupt, click.Abort)):
        place.say("interrupted", prefix="")
        return 130
    if isinstance(error, click.UsageError):
        if place.speaks():  # all processes of a run have the same command
            click.echo(f"error: {_usage(error)}", err=True)
        return error.exit_code
    if isinstance(error, Error):
        click.echo(f"error: {place.who()}{error}", err=True)
        return error.exit_status
    click.echo(f"error: {place.who()}{engine.line_of(error)}", err=True)
    return 1


def setting(
    *names: str, kind: Any, help: str, values: str = "", metavar: str | None = None, flag: bool = False
) -> Callable[[F], F]:
    """An option for a field of Settings, with its default. Settings checks the value; `values` says in --help what it
    may be, as click writes ranges."""
    from gluon_mgpu.training.settings import SGD

    default = getattr(SGD, names[0][2:].replace("-", "_"))
    shown = [f"default: {default}"] if default not in (None, ()) and default is not False else []
    shown += [values] if values else []
    options: dict[str, Any] = {"is_flag": True} if flag else {"type": kind, "metavar": metavar}
    return click.option(*names, default=default, help=f"{help}  [{'; '.join(shown)}]" if shown else help, **options)


def gpus(default: str = "1", help: str = "How many devices (2), or which (0,2).") -> Callable[[F], F]:
    return click.option("--gpus", default=default, show_default=True, metavar="N|I,J,...", help=help)


FOLDER = Folder(readable=False)
FILE = click.Path(readable=False)
IMPLS = Choice(gluon_mgpu.IMPLS)
impl = click.option("--impl", type=IMPLS, default="scratch", show_default=True, help="NDArray alone, or Gluon.")
device = click.option(
    "--device",
    type=Choice(devices.DEVICES),
    default="auto",
    show_default=True,
    help="auto: GPUs where there are any, else as many CPU contexts.",
)
data_dir = click.option(
    "--data-dir",
    type=FOLDER,
    metavar="DIR",
    help="Where the data is; else GLUON_MGPU_DATA, the usual folders, a download.",
)
