"""Code that the commands share: one-line errors, exit statuses, and options with their groups in --help.

Exit status: 0 on success; 1 if a run failed; 2 if the command was wrong; 3 if `check` has no sound reference; 130 if
interrupted. This module does not need NumPy, because `gluon_mgpu.commands.doctor` must start even if NumPy is broken.
"""

from __future__ import annotations

import functools
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import click

from gluon_mgpu.support import errors, log, mpi

COLUMN = 30  # width of the column of option names in --help
IN_PYTHON = errors.caller


def _show_tracebacks(context: click.Context, param: click.Parameter, value: bool) -> None:
    errors.caller.tracebacks |= value


class Command(click.Command):
    """A command with grouped options, and examples at the end of --help.

    On error, it prints one line (after a traceback, if --debug is set) and exits with the matching status. Errors and
    notices spell settings as options: `--lr -1` for `lr=-1`. examples: shell commands, one per line. In them,
    `gluon-mgpu train` becomes what the user types, such as `python scripts/train.py`.
    """

    def __init__(self, *args: Any, examples: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        debug: dict[str, Any] = {"is_flag": True, "is_eager": True, "expose_value": False, "callback": _show_tracebacks}
        self.params.append(click.Option(["--debug"], help="Show tracebacks.", **debug))
        self.context_settings.update(help_option_names=["-h", "--help"], show_default=True)
        self.examples = [line.strip() for line in examples.strip().splitlines()]

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, *_: Any, **kwargs: Any) -> NoReturn:
        program = prog_name or shlex.join(["python", sys.argv[0]])
        before, errors.caller = errors.caller, errors.Caller(program=program, tracebacks=False)
        try:
            status = super().main(args, program, **{**kwargs, "standalone_mode": False}) or 0
        except (Exception, KeyboardInterrupt) as error:
            if errors.caller.tracebacks:
                traceback.print_exc()
            _report(error)
        finally:
            errors.caller = before
        sys.exit(status)

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        if errors.caller is not IN_PYTHON:  # only `main` runs the command
            errors.caller.options = {param.name: param.opts[0] for param in self.params if param.name}
        return super().parse_args(context, args)

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except KeyboardInterrupt as error:  # click would print an empty line
            raise click.Abort(*error.args) from error
        except SystemExit as ended:  # by the user's file; status 0 would say that this command has succeeded
            if ended.code:
                raise
            raise errors.Error("the file ended the program with sys.exit() before this command was done") from None

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(context):
            row = param.get_help_record(context)
            if row and isinstance(param, click.Option):
                groups.setdefault(getattr(param, "heading", "General options"), []).append(row)
        for title, rows in groups.items():
            with formatter.section(title):
                formatter.write_dl([(names.ljust(COLUMN), help) for names, help in rows])

    def format_epilog(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(context, formatter)
        with formatter.section("Examples"):
            for line in self.examples:
                first, *commands = line.split("gluon-mgpu ")
                formatter.write(f"  {first}{''.join(map(errors.command, commands))}\n")


class CommandGroup(Command, click.Group):
    command_class = Command

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_options(context, formatter)
        self.format_commands(context, formatter)

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        if not args and not context.resilient_parsing:  # click's stream and exit status depend on its version
            click.echo(context.get_help(), err=True)
            context.exit(2)
        return super().parse_args(context, args)


class Option(click.Option):
    """heading: of the option's group in --help."""

    def __init__(self, *args: Any, heading: str = "Options", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.heading = heading

    def make_metavar(self, *args: Any, **kwargs: Any) -> str:
        of_numbers = {click.types.IntParamType: "N", click.types.FloatParamType: "X"}
        found = [metavar for kind, metavar in of_numbers.items() if isinstance(self.type, kind)]
        return self.metavar or (found[0] if found else super().make_metavar(*args, **kwargs))


def _report(error: BaseException) -> NoReturn:
    """Print one line on standard error, and exit with the matching status."""
    if isinstance(error, (KeyboardInterrupt, click.Abort)):
        if not str(error) and log.rank() is not None:  # the other workers have not stopped at the same step
            mpi.fail("interrupted", 130)
        new_line = "\n" if sys.stderr.isatty() else ""  # the terminal shows ^C on this line
        log.say(str(error) or "interrupted", prefix=new_line)
        sys.exit(130)
    status, line = getattr(error, "exit_status", 1), errors.line_of(error)
    if isinstance(error, click.UsageError):
        see = f" (see {error.ctx.command_path} --help)" if error.ctx else ""
        status, line = error.exit_code, " ".join(error.format_message().rstrip(".").split()) + see
    elif isinstance(error, OSError) and traceback.extract_tb(error.__traceback__)[-1].name == click.echo.__name__:
        line = f"cannot print ({error.strerror})"
    mpi.fail(line, status)


command = functools.partial(click.command, cls=Command)
option = functools.partial(click.option, cls=Option)


def settings(*names: str, **changes: Any) -> Callable[[Any], Any]:
    """Add the options of these settings to a command; without names, of all settings. changes: {name: arguments of
    click.option that differ}."""
    from gluon_mgpu.training.config import SETTINGS, Config

    def decorate(command: Any) -> Any:
        for name in reversed(names or tuple(SETTINGS)):
            default, declared = getattr(Config, name), SETTINGS[name]
            how: dict[str, Any] = {"type": declared.type, "help": declared.help, "metavar": declared.metavar}
            flag = f"--{name.replace('_', '-')}"
            if isinstance(default, bool):
                flag += f"/--no-{flag[2:]}"
                how |= {"is_flag": True, "type": None, "metavar": None}
            how |= {"heading": declared.heading, "default": declared.typed or default}
            command = option(flag, name, **{**how, **changes.get(name, {})})(command)
        return command

    return decorate
