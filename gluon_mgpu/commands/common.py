"""Code that the commands share: one-line errors, exit statuses, and options with their groups in --help.

Exit status: 0 on success; 1 if a run failed; 2 if the command was wrong; 130 if interrupted. This module does not need
NumPy, because `gluon_mgpu.commands.doctor` must start even if NumPy is broken.
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
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import click

import gluon_mgpu
from gluon_mgpu.runtime import devices, errors, log
from gluon_mgpu.runtime.errors import Error

# {heading in --help: parameter names of the options under it, in order}; "General options" lists all other options.
GROUPS = {
    "Network and data": "recipe list_recipes impl model dataset limit data_dir images hybridize tune",
    "Training": "sweep batch_size lr scale_lr schedule milestones gamma warmup_epochs momentum weight_decay "
    "max_grad_norm grad_accum_steps epochs seed verbose",
    "Devices": "gpus device shares",
    "Several processes": "kvstore compress workers servers port restarts",
    "Program": "is_module map_gpus strict_numpy",
    "Files": "out resume tensorboard profile export to input",
}
COLUMN = 30  # width of the column of option names in --help


class Command(click.Command):
    """A command with grouped options, and examples at the end of --help.

    On error, it prints one line (after a traceback, if --debug is set) and exits with the matching status. Errors and
    notices name options instead of arguments: `--lr -1` for `lr=-1`. examples: shell commands, one per line. In them,
    `gluon-mgpu train` becomes what the user types, such as `python scripts/train.py`.
    """

    def __init__(self, *args: Any, examples: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(click.Option(["--debug"], is_flag=True, expose_value=False, help="Show tracebacks."))
        self.context_settings.update(help_option_names=["-h", "--help"], show_default=True)
        self.examples = [line.strip() for line in examples.strip().splitlines()]

    def format_epilog(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(context, formatter)
        lines = as_called("\n".join(self.examples), context.find_root().info_name or "")
        with formatter.section("Examples"):
            formatter.write(textwrap.indent(lines, "  ") + "\n")

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, *_: Any, **kwargs: Any) -> NoReturn:
        words = sys.argv[1:] if args is None else list(args)
        program = prog_name or shlex.join(["python", sys.argv[0]])
        kwargs["standalone_mode"] = False
        in_main_thread = threading.current_thread() is threading.main_thread()  # only that thread can set handlers
        if in_main_thread:
            before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # then child processes are stopped too
        try:
            status = super().main(words, program, **kwargs) or 0
        except (Exception, KeyboardInterrupt) as error:
            if "--debug" in words:
                traceback.print_exc()
            status = _report(error, program)
            if log.started():  # a normal exit would wait for MXNet, and MXNet may wait for a lost process
                with suppress(OSError, ValueError):  # standard output may be closed
                    sys.stdout.flush()
                os._exit(status)
        finally:
            if in_main_thread:
                signal.signal(signal.SIGTERM, before)
        sys.exit(status)

    def invoke(self, context: click.Context) -> Any:
        with_options = functools.partial(_with_options, context)
        before = log.rewrite.set(with_options)
        try:
            return super().invoke(context)
        except Error as error:
            error.args = (with_options(str(error)),)
            raise
        except KeyboardInterrupt as error:  # click would print an empty line
            raise click.Abort(with_options(str(error))) from error
        finally:
            log.rewrite.reset(before)

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        options = [param for param in self.get_params(context) if isinstance(param, click.Option)]
        left = {option.name: row for option in options if (row := option.get_help_record(context))}
        groups = {title: [left.pop(name) for name in names.split() if name in left] for title, names in GROUPS.items()}
        groups["General options"] = list(left.values())
        for title, rows in groups.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl([(names.ljust(COLUMN), help) for names, help in rows])


class Group(Command, click.Group):
    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_options(context, formatter)
        self.format_commands(context, formatter)

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        if not args and not context.resilient_parsing:  # click's stream and exit status depend on its version
            click.echo(context.get_help(), err=True)
            context.exit(2)
        return super().parse_args(context, args)

    def resolve_command(self, context: click.Context, args: list[str]) -> Any:
        commands = self.list_commands(context)
        if args[0] not in commands and not context.resilient_parsing:
            context.fail(f"{args[0]}: no such command{_suggest(difflib.get_close_matches(args[0], commands))}")
        return super().resolve_command(context, args)


class Option(click.Option):
    """An option that rejects another option as its value, as in `--profile --epochs 2`."""

    def type_cast_value(self, context: click.Context, value: Any) -> Any:
        values = value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(text, str) and text.startswith("--") for text in values):
            raise click.BadOptionUsage(self.opts[0], f"Option '{self.opts[0]}' requires an argument.", context)
        return super().type_cast_value(context, value)


def _suggest(words: Sequence[str] | None) -> str:
    return f"; did you mean {words[0]}?" if words else ""


def as_called(text: str, program: str) -> str:
    """Rewrite each `gluon-mgpu COMMAND` in text as the user types it. program: such as "python scripts/train.py"."""
    if program == "python -m gluon_mgpu":
        return re.sub(r"gluon-mgpu (?=[a-z])", f"{program} ", text)
    script = re.fullmatch(r"(python (?:.*/)?)\w+\.py", program)
    if not script:
        return text
    return re.sub(r"gluon-mgpu ([a-z][\w-]*)", lambda m: f"{script[1]}{m[1].replace('-', '_')}.py", text)


def _with_options(context: click.Context, text: str) -> str:
    """Replace arguments in a message, such as `lr=0: ...`, with the command's options: `--lr 0: ...`.

    Values from the command line, such as a folder `lr=0`, and text in parentheses, which may quote another error, are
    left unchanged.
    """
    options = {param.name: param.opts[0] for param in context.command.params if isinstance(param, click.Option)}
    if not options:
        return text
    if "gpus" in options:
        options["num_gpus"] = "--gpus"  # `train` calls this argument num_gpus
    given = [v for value in context.params.values() for v in (value if isinstance(value, tuple) else [value])]
    typed = [value for value in given if isinstance(value, str) and "=" in value]
    kept = [re.escape(shown) for value in typed for shown in (value, str(Path(value)))]
    kept.append(r"\((?:[^()]|\([^()]*\))*\)")
    argument = rf"(?<![\w/.-])({'|'.join(map(str, options))})=(True\b)?"
    pattern = "|".join([*kept, argument])
    return re.sub(pattern, lambda m: m[0] if m[1] is None else options[m[1]] + ("" if m[2] else " "), text)


def _usage(error: click.UsageError) -> str:
    """Describe click's error in one line."""
    line = error.format_message()
    if isinstance(error, click.NoSuchOption):
        if isinstance(error.__context__, click.NoSuchOption):  # click reports -epochs as "-epochs", then as "-e"
            error = error.__context__
        line = f"{error.option_name}: no such option{_suggest(error.possibilities)}"
    elif isinstance(error, click.BadParameter) and error.param and not isinstance(error, click.MissingParameter):
        name = error.param.opts[0] if isinstance(error.param, click.Option) else error.param.human_readable_name
        line = f"{name}: {error.message}"
    line = re.sub("not a valid integer( range)?", "not a whole number", line)
    line = re.sub("not a valid float( range)?", "not a number", line)
    more = f" (see {error.ctx.command_path} --help)" if error.ctx else ""
    return re.sub(r"\n\t?", " ", line.removesuffix(".")) + more


def _report(error: BaseException, program: str) -> int:
    """Print one line on standard error, and return the exit status."""
    if isinstance(error, (KeyboardInterrupt, click.Abort)):
        new_line = "\n" if sys.stderr.isatty() else ""  # the terminal shows ^C on this line
        log.say(as_called(str(error), program) or "interrupted", prefix=new_line)
        return 130
    if isinstance(error, click.UsageError):
        if log.speaks():  # one process reports the error, because all have the same command line
            log.error(_usage(error))
        return error.exit_code
    line = str(error) if isinstance(error, Error) else errors.line_of(error)
    log.error(f"{log.who()}{as_called(line, program)}")
    return error.exit_status if isinstance(error, Error) else 1


option = functools.partial(click.option, cls=Option)


def setting(*names: str, **kwargs: Any) -> Any:
    """Create an option for a field of Settings, with the field's default. The last of `names` is the field's name."""
    from gluon_mgpu.training.settings import SGD

    field = names[-1].removeprefix("--").replace("-", "_")
    return option(*names, default=getattr(SGD, field), **kwargs)


def gpus(default: str = "1", help: str = "Number of devices, such as 2, or their indices, such as 0,2.") -> Any:
    return option("--gpus", default=default, metavar="N|I,J,...", help=help)


def out(help: str, default: str | None = None) -> Any:
    return option("--out", type=FOLDER, default=default, metavar="DIR", help=help)


COUNT = click.IntRange(min=1)
POSITIVE = click.FloatRange(min=0, min_open=True)
SEED = click.IntRange(0, 2**31 - 1)
FOLDER = click.Path(file_okay=False)
FILE = click.Path()
IMPLS = click.Choice(gluon_mgpu.IMPLS)
impl = option("--impl", type=IMPLS, default="scratch", help="scratch uses NDArray alone; highlevel uses Gluon.")
limit = option(
    "--limit",
    type=COUNT,
    metavar="N",
    help="Use only the first N training examples and the first N/6 test examples (at least 100).",
)
device = option(
    "--device",
    type=click.Choice(devices.DEVICES),
    default="auto",
    help="auto uses GPUs if there are any, else CPU contexts.",
)
data_dir = option(
    "--data-dir",
    type=FOLDER,
    metavar="DIR",
    help="Folder that contains the data set. Default: GLUON_MGPU_DATA if it is set, else the folders listed in "
    "docs/datasets.md, else a download.",
)
