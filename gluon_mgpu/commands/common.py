"""Code that the commands share: one-line errors, exit statuses, and options with their groups in --help.

Exit status: 0 on success; 1 if a run failed; 2 if the command was wrong; 130 if interrupted. This module does not need
NumPy, because `gluon_mgpu.commands.doctor` must start even if NumPy is broken.
"""

from __future__ import annotations

import difflib
import functools
import os
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import click
from click.shell_completion import CompletionItem

from gluon_mgpu.runtime import errors, log
from gluon_mgpu.runtime.errors import Error

# Headings in --help for options that are not settings: {heading: parameter names}; "General options" lists the rest.
GROUPS = {
    "Network and data": "recipe list_recipes images",
    "Training": "sweep",
    "Several processes": "workers servers port restarts",
    "Program": "is_module map_gpus strict_numpy",
    "Devices": "gpus",
    "Files": "export to input out",
}
HEADINGS = ["Network and data", "Training", "Devices", "Several processes", "Program", "Files", "General options"]
COLUMN = 30  # width of the column of option names in --help


class Command(click.Command):
    """A command with grouped options, and examples at the end of --help.

    On error, it prints one line (after a traceback, if --debug is set) and exits with the matching status. Errors and
    notices spell settings as options: `--lr -1` for `lr=-1`. examples: shell commands, one per line. In them,
    `gluon-mgpu train` becomes what the user types, such as `python scripts/train.py`.
    """

    def __init__(self, *args: Any, examples: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(click.Option(["--debug"], is_flag=True, expose_value=False, help="Show tracebacks."))
        self.context_settings.update(help_option_names=["-h", "--help"], show_default=True)
        self.examples = [line.strip() for line in examples.strip().splitlines()]

    def format_epilog(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(context, formatter)
        with formatter.section("Examples"):
            for line in self.examples:
                first, *commands = line.split("gluon-mgpu ")
                formatter.write(f"  {first}{''.join(map(errors.command, commands))}\n")

    def make_context(self, info_name: str | None, args: list[str], *more: Any, **extra: Any) -> click.Context:
        flags = {param.name or "": param.opts[0] for param in self.params if isinstance(param, click.Option)}
        root = extra["parent"].find_root().info_name if extra.get("parent") else info_name
        token = errors.spelling.set(CommandLine(flags, root or ""))
        try:
            context = super().make_context(info_name, args, *more, **extra)
        except BaseException:
            errors.spelling.reset(token)
            raise
        context.call_on_close(lambda: errors.spelling.reset(token))
        return context

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
            status = _report(error)
            if log.started():  # a normal exit would wait for MXNet, and MXNet may wait for a lost process
                with suppress(OSError, ValueError):  # standard output may be closed
                    sys.stdout.flush()
                os._exit(status)
        finally:
            if in_main_thread:
                signal.signal(signal.SIGTERM, before)
        sys.exit(status)

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except KeyboardInterrupt as error:  # click would print an empty line
            raise click.Abort(*error.args) from error

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        group_of = {name: title for title, names in GROUPS.items() for name in names.split()}
        groups: dict[str, list[tuple[str, str]]] = {title: [] for title in HEADINGS}
        for param in self.get_params(context):
            row = param.get_help_record(context)
            if row and isinstance(param, click.Option):
                group = getattr(param, "group", None) or group_of.get(param.name or "", "General options")
                groups[group].append(row)
        for title in HEADINGS:
            if rows := groups[title]:
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
    """An option that rejects another option as its value, as in `--profile --epochs 2`. group: its heading in
    --help."""

    def __init__(self, *args: Any, group: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group

    def type_cast_value(self, context: click.Context, value: Any) -> Any:
        values = value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(text, str) and text.startswith("--") for text in values):
            raise click.BadOptionUsage(self.opts[0], f"Option '{self.opts[0]}' requires an argument.", context)
        return super().type_cast_value(context, value)


class Value(click.ParamType):
    """The value of a setting, converted and checked as its declaration says."""

    def __init__(self, name: str, kind: Any) -> None:
        self.name, self.kind = name, kind

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> Any:
        if not isinstance(value, str):  # a default
            return value
        try:
            return self.kind.parse(value)
        except ValueError as error:
            raise errors.UsageError(self.name, value, str(error)) from None

    def shell_complete(self, context: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        what = getattr(self.kind, "what", None)
        if what:
            return [CompletionItem(incomplete, type="dir" if what == "folder" else "file")]
        words = getattr(self.kind, "words", ())
        return [CompletionItem(word) for word in words if word.startswith(incomplete)]


class CommandLine(errors.Spelling):
    """Spells settings as options of this command, and commands as the user has typed this one.

    flags: {setting: option}. program: the program's name, such as "python scripts/train.py" or "gluon-mgpu".
    """

    def __init__(self, flags: dict[str, str], program: str) -> None:
        self.flags, self.program = flags, program

    def setting(self, name: str, value: object) -> str:
        if name not in self.flags:
            return super().setting(name, value)
        flag = self.flags[name]
        if value is False:
            return flag.replace("--", "--no-", 1)
        return flag if value is None or value is True else f"{flag} {errors.shown(value)}"

    def command(self, words: str) -> str:
        if not self.program.endswith(".py"):
            return f"{self.program} {words}"
        folder, slash, _ = self.program.rpartition("/")
        name, space, rest = words.partition(" ")
        return f"{folder + slash if slash else 'python '}{name.replace('-', '_')}.py{space}{rest}"


def _suggest(words: Sequence[str] | None) -> str:
    return f"; did you mean {words[0]}?" if words else ""


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
    more = f" (see {error.ctx.command_path} --help)" if error.ctx else ""
    return " ".join(line.removesuffix(".").split()) + more


def _report(error: BaseException) -> int:
    """Print one line on standard error, and return the exit status."""
    if isinstance(error, (KeyboardInterrupt, click.Abort)):
        new_line = "\n" if sys.stderr.isatty() else ""  # the terminal shows ^C on this line
        log.say(str(error) or "interrupted", prefix=new_line)
        return 130
    if isinstance(error, click.UsageError):
        if log.speaks():  # one process reports the error, because all have the same command line
            log.error(_usage(error))
        return error.exit_code
    line = str(error) if isinstance(error, Error) else errors.line_of(error)
    log.error(f"{log.who()}{line}")
    return error.exit_status if isinstance(error, Error) else 1


option = functools.partial(click.option, cls=Option)


def settings(*names: str, **changes: Any) -> Callable[[Any], Any]:
    """Add the options of these settings to a command. changes: {name: arguments of click.option that differ}."""
    from gluon_mgpu.training.settings import DEFAULTS, OPTIONS, flag

    def decorate(command: Any) -> Any:
        for name in reversed(names):
            declared, default = OPTIONS[name], DEFAULTS[name]
            how: dict[str, Any] = {"default": default, "help": declared.help, "group": declared.group}
            if isinstance(default, bool):
                option_name = f"{flag(name)}/--no-{flag(name)[2:]}" if default else flag(name)
                how |= {} if default else {"is_flag": True}
            else:
                option_name = flag(name)
                how |= {"type": Value(name, declared.kind), "metavar": declared.metavar}
            command = option(option_name, name, **{**how, **changes.get(name, {})})(command)
        return command

    return decorate


FOLDER = click.Path(file_okay=False)
FILE = click.Path()
