"""What the commands share: one-line errors, exit statuses, and options with their groups in --help.

Exit status: 0; 1 if a run failed; 2 if the command was wrong; 130 if interrupted. Nothing here needs NumPy, because
`gluon_mgpu.commands.doctor` must start if NumPy is broken.
"""

from __future__ import annotations

import difflib
import functools
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

import gluon_mgpu
from gluon_mgpu.runtime import devices, engine, log
from gluon_mgpu.runtime.errors import Error

F = TypeVar("F", bound=Callable[..., Any])  # a function that click's decorators take and return

# The options under each heading of --help, by parameter name; "Other options" has the rest.
GROUPS = {
    "Network and data": "impl model hybridize tune recipe list_recipes dataset limit data_dir images",
    "Training": "batch_size epochs lr scale_lr schedule milestones gamma warmup_epochs momentum weight_decay "
    "max_grad_norm grad_accum_steps seed seeds quick",
    "Devices": "gpus device shares",
    "Several processes": "kvstore compress workers servers port",
    "Files": "out resume tensorboard profile export",
}
PLAIN = {
    r"is not a valid integer( range)?": "is not a whole number",
    r"is not a valid float( range)?": "is not a number",
}


class _Base(click.Command):
    """Ends with one line and the right exit status instead of a traceback, which --debug shows.

    examples: shell commands, one per line, shown at the end of --help. `gluon-mgpu train` becomes
    `python scripts/train.py` if that is how the user called this command.
    """

    def __init__(self, *args: Any, examples: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.context_settings = {"help_option_names": ["-h", "--help"], **self.context_settings}
        self.examples = [line.strip() for line in examples.strip().splitlines()]

    def format_epilog(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(context, formatter)
        lines = as_called("\n".join(self.examples), context.find_root().info_name or "")
        with formatter.section("Examples"):
            formatter.write(textwrap.indent(lines, "  ") + "\n")

    def main(self, *args: Any, **kwargs: Any) -> NoReturn:
        program = kwargs["prog_name"] = kwargs.get("prog_name") or shlex.join(["python", sys.argv[0]])
        debug = "--debug" in (kwargs.get("args") or (args and args[0]) or sys.argv[1:])
        main_thread = threading.current_thread() is threading.main_thread()
        if main_thread:  # SIGTERM ends a command and its child processes, as Ctrl-C does
            before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            status = super().main(*args, **{**kwargs, "standalone_mode": False}) or 0
        except (Exception, KeyboardInterrupt) as error:
            status = 1
            try:
                if debug:
                    traceback.print_exc()
                status = _report(error, program)
            finally:
                if log.started():
                    _exit_without_waiting(status)
        finally:
            if main_thread:
                signal.signal(signal.SIGTERM, before)
        sys.exit(status)


class Command(_Base):
    """A command whose options are in groups. For an error that names an argument, `lr=-1: ...`, it names the option."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(click.Option(["--debug"], is_flag=True, expose_value=False, help="Show tracebacks."))

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except Error as error:
            options = {param.name or "": param for param in self.params if isinstance(param, click.Option)}
            if "gpus" in options:
                options["num_gpus"] = options["gpus"]  # as `train` calls it
            error.args = (_with_options(str(error), options),)
            raise
        except KeyboardInterrupt as error:  # click would print an empty line
            raise click.Abort(*error.args) from error

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        heading_of = {name: heading for heading, names in GROUPS.items() for name in names.split()}
        groups: dict[str, list[tuple[str, str]]] = {heading: [] for heading in (*GROUPS, "Other options")}
        for param in self.get_params(context):
            record = param.get_help_record(context)
            if record and isinstance(param, click.Option):
                groups[heading_of.get(param.name or "", "Other options")].append(record)
        width = min(30, max(len(names) for rows in groups.values() for names, _ in rows))  # the same in every group
        for heading, rows in groups.items():
            if rows:
                with formatter.section(heading):
                    formatter.write_dl([(names.ljust(width), help) for names, help in rows])


class Group(_Base, click.Group):
    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        if not args and not context.resilient_parsing:  # versions of click differ in the stream and the exit status
            click.echo(context.get_help(), err=True)
            context.exit(2)
        return super().parse_args(context, args)

    def resolve_command(self, context: click.Context, args: list[str]) -> Any:
        commands = self.list_commands(context)
        if args[0] not in commands and not context.resilient_parsing:
            context.fail(f"{args[0]}: no such command{nearest(args[0], commands)}")
        return super().resolve_command(context, args)


class Option(click.Option):
    """An option that does not take the next option for its value, as `--profile --epochs 2` would."""

    def type_cast_value(self, context: click.Context, value: Any) -> Any:
        values = value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(text, str) and text.startswith("--") for text in values):
            raise click.BadOptionUsage(self.opts[0], f"Option '{self.opts[0]}' requires an argument.", context)
        return super().type_cast_value(context, value)


class Choice(click.Choice):
    """One of several words. The error for any other word suggests the nearest."""

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> Any:
        try:
            return super().convert(value, param, context)
        except click.BadParameter as error:
            self.fail(error.message.rstrip(".") + nearest(str(value), self.choices), param, context)


def nearest(word: str, words: Iterable[str]) -> str:
    """The end of an error message about a wrong word: a suggestion, or nothing if no word is similar."""
    similar = difflib.get_close_matches(word.lower(), words, n=1, cutoff=0.65)
    return f"; did you mean {similar[0]}?" if similar else ""


def as_called(text: str, program: str) -> str:
    """`text` with each `gluon-mgpu COMMAND` as the user types it. program: "gluon-mgpu", "python scripts/train.py"."""
    script = re.fullmatch(r"(python (?:.*/)?)\w+\.py", program)
    if not script:
        return text
    return re.sub(r"gluon-mgpu ([a-z][\w-]*)", lambda m: f"{script[1]}{m[1].replace('-', '_')}.py", text)


def _with_options(text: str, options: dict[str, click.Option]) -> str:
    """An error message that begins with `argument=value: ` with the options in place of all arguments."""

    def of_argument(match: re.Match[str]) -> str:
        name, value = match.groups()
        option = options.get(name)
        if option is None:
            return match[0]
        if option.is_flag and value in ("True", "False"):
            return (option.opts if value == "True" else option.secondary_opts or option.opts)[0]
        return f"{option.opts[0]} {value}"

    first = re.match(r"(\w+)=", text)
    if not first or first[1] not in options:
        return text
    text = re.sub(r"(?<![\w/.-])(\w+)=(True|False|)", of_argument, text)
    wrong, colon, advice = text.partition(": ")
    renamed = {name: option.opts[0] for name, option in options.items() if option.opts[0] != f"--{name}"}
    advice = re.sub(r"(?<![\w/.-])\w+(?![\w/-])", lambda match: renamed.get(match[0], match[0]), advice)
    return wrong + colon + advice


def _usage(error: click.UsageError) -> str:
    """One line for what click found wrong with a command."""
    line = error.format_message()
    if isinstance(error, click.NoSuchOption) and error.ctx:
        first = error.__context__  # -epochs is an error for "-epochs", then for "-e"
        wrong = first.option_name if isinstance(first, click.NoSuchOption) else error.option_name
        options = [param for param in error.ctx.command.get_params(error.ctx) if isinstance(param, click.Option)]
        names = [name for option in options for name in (*option.opts, *option.secondary_opts)]
        line = f"{wrong}: no such option{nearest(wrong, names)}"
    elif isinstance(error, click.BadParameter) and error.param and not isinstance(error, click.MissingParameter):
        name = error.param.opts[0] if isinstance(error.param, click.Option) else error.param.human_readable_name
        line = f"{name}: {error.message}"
    for clicks_words, plain in PLAIN.items():
        line = re.sub(clicks_words, plain, line)
    more = f" ({error.ctx.command_path} --help shows more)" if error.ctx else ""
    return " ".join(line.removesuffix(".").splitlines()) + more


def _report(error: BaseException, program: str) -> int:
    """Print one line on standard error, and return the exit status."""
    if isinstance(error, click.exceptions.Exit):
        return error.exit_code
    if isinstance(error, (KeyboardInterrupt, click.Abort)):
        new_line = "\n" if sys.stderr.isatty() else ""  # the terminal shows ^C
        log.say(as_called(str(error), program) or "interrupted", prefix=new_line)
        return 130
    if isinstance(error, click.UsageError):
        if log.speaks():  # every process of a run has the same command
            log.error(_usage(error))
        return error.exit_code
    status, line = (error.exit_status, str(error)) if isinstance(error, Error) else (1, engine.line_of(error))
    log.error(f"{log.who()}{as_called(line, program)}")
    return status


def _exit_without_waiting(status: int) -> NoReturn:
    """Python would wait for MXNet's operators, which may wait for another process of the run that has ended."""
    with suppress(OSError, ValueError, AttributeError):  # standard output may be closed
        sys.stdout.flush()
    os._exit(status)


option = functools.partial(click.option, cls=Option)


def setting(*names: str, **kwargs: Any) -> Callable[[F], F]:
    """An option for a field of Settings, with its default. The last name, or the first one, is the field's."""
    from gluon_mgpu.training.settings import SGD

    field = names[-1].removeprefix("--").replace("-", "_")
    return option(*names, default=getattr(SGD, field), show_default=True, **kwargs)


def gpus(default: str = "1", help: str = "How many devices (2), or which ones (0,2).") -> Callable[[F], F]:
    return option("--gpus", default=default, show_default=True, metavar="N|I,J,...", help=help)


FOLDER = click.Path(file_okay=False)
FILE = click.Path()
IMPLS = Choice(gluon_mgpu.IMPLS)
SEED = click.IntRange(0, 2**31 - 1)
impl = option("--impl", type=IMPLS, default="scratch", show_default=True, help="From NDArray alone, or with Gluon.")
device = option(
    "--device",
    type=Choice(devices.DEVICES),
    default="auto",
    show_default=True,
    help="auto: GPUs if there are any, else CPU contexts.",
)
data_dir = option(
    "--data-dir",
    type=FOLDER,
    metavar="DIR",
    help="The folder with the data; default GLUON_MGPU_DATA, else the usual folders, else a download.",
)
