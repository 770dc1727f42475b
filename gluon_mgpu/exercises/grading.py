"""Grades an answer. `run_cases` runs the hidden cases in this process, which imports MXNet; `grade` uses a new process,
with limits of time and memory."""

from __future__ import annotations

import configparser
import inspect
import json
import os
import re
import resource
import secrets
import sys
import textwrap
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from gluon_mgpu import exercises
from gluon_mgpu.exercises import Mistake, answers
from gluon_mgpu.exercises.answers import Answer
from gluon_mgpu.support import log, subprocesses
from gluon_mgpu.support.errors import Error

SECONDS = 60  # time limit; grading takes 2 seconds, or longer on a busy machine
LIMITS = {resource.RLIMIT_DATA: 4 << 30, resource.RLIMIT_FSIZE: 1 << 30, resource.RLIMIT_CORE: 0}  # bytes per answer
ROOT = str(Path(__file__).parents[2])  # the folder that contains the package
# The current folder's files, such as a random.py, must not replace modules. Python 3.9 and 3.10 ignore PYTHONSAFEPATH.
START = f"""import sys
sys.path = [*filter(None, sys.path), {ROOT!r}]
from gluon_mgpu.exercises.grading import main
main(*sys.argv[1:3], sys.argv.pop())"""
WIDTH = 100


def run_cases(name: str, code: str, path: str) -> None:
    """Run the hidden cases on a learner's code. Raises the first Mistake."""
    import mxnet as mx

    from gluon_mgpu.exercises import diagnosis

    module, wanted = ModuleType(name), exercises.answer_of(name).name
    call, returned = "", None
    module.__file__ = os.path.abspath(path)
    mx.random.seed(0)

    def answer(*args: Any) -> Any:
        nonlocal call, returned
        call = f"{wanted}({', '.join(map(_shown, args))})"
        try:
            inspect.signature(getattr(module, wanted)).bind(*args)
        except TypeError as error:
            raise Mistake("wrong-arguments", f"{call}\n{error}") from None
        returned = getattr(module, wanted)(*args)
        return returned

    try:
        program = compile(code, path, "exec", dont_inherit=True)
        exec(program, module.__dict__)  # nosec B102  # the user's own file
        if not callable(getattr(module, wanted, None)):
            raise Mistake("missing", f"the file does not define the function {wanted}")
        diagnosis.diagnose(name, answer, _message)
        mx.nd.waitall()  # raises errors from operators whose results no case has read
    except Mistake:
        raise
    except NotImplementedError:
        raise Mistake("unfinished", f"{wanted} is not written yet") from None
    except BaseException as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
        if isinstance(error, SyntaxError) and error.filename == path:
            lines = [error.lineno]
        if lines:
            ended = isinstance(error, (SystemExit, KeyboardInterrupt))
            line = f"line {lines[-1]}{call and f', in the call {call}'}"
            case = f"{line}:\n{_message(error)}{_hint(error)}"
            raise Mistake("ended-early" if ended else _kind(error), case) from None
        if type(error).__name__ == "MXNetError":
            raise Mistake("failed-operator", f"{_message(error)}{_hint(error)}") from None
        if not call or _kind(error) == "memory-limit":
            raise Mistake(_kind(error), _message(error)) from None
        value = textwrap.shorten(repr(returned), WIDTH)
        unusable = f"{wanted} returned {value}, which cannot be used ({_message(error)})"
        raise Mistake("wrong-type", unusable) from None


def _kind(error: BaseException) -> str:
    """The name of an answer's error in mistakes.ini."""
    if isinstance(error, MemoryError) or "to allocate" in str(error):
        return "memory-limit"
    if isinstance(error, SyntaxError):
        return "syntax-error"
    return "name-error" if isinstance(error, NameError) else "error"


def _shown(value: Any) -> str:
    """Describe an argument of the learner's function: arrays by shape, functions by name."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_shown, value))}]"
    if hasattr(value, "asnumpy"):
        return f"array {value.shape}"
    return getattr(value, "__name__", None) or textwrap.shorten(repr(value), 20, placeholder="...")


def _message(error: BaseException) -> str:
    """The most informative line of an error message. Errors in MXNet's C++ code begin with a traceback."""
    vars(error).pop("__notes__", None)  # the last line is then the message, not a note
    lines = traceback.format_exception_only(type(error), error)[-1].strip().splitlines()
    if type(error).__name__ == "MXNetError":
        lines = [line for line in lines if "MXNetError: " in line and "Traceback" not in line] or lines
        lines = lines[::-1]
    return lines[0][:500]


def _hint(error: BaseException) -> str:
    """What to do about an error, from hints.txt, which has lines "## PART OF A MESSAGE", each with a hint below."""
    hints = re.findall(r"^## (.+)\n(.+)", Path(__file__).with_name("hints.txt").read_text(), re.MULTILINE)
    message = traceback.format_exception_only(type(error), error)[-1]
    return "".join(f"\n{hint}" for part, hint in hints if part in message)


def report(label: str, name: str, mistake: Mistake | None) -> str:
    """Explain the result to the learner. label, name: of the `Answer`."""
    if mistake is None:
        return f"{log.printable(label)}: correct"
    texts = configparser.ConfigParser(interpolation=None)
    texts.read(Path(__file__).with_name("mistakes.ini"))
    why = textwrap.fill(texts[name][mistake.name], WIDTH)
    case = "\n".join(f"  {log.printable(line)}" for line in mistake.case.splitlines())
    return f"{log.printable(label)}: not correct yet. Mistake: {mistake.name}\n{case}\n{why}"


def grade(answer: Answer, seconds: float = SECONDS, show: Callable[..., object] = print) -> Mistake | None:
    """Run the hidden cases on an answer, in a new process. Returns its mistake, if any; "not-graded" if no case could
    start, for example because MXNet is not installed.

    seconds: time limit. show: prints the answer's own output.
    """
    if answer.problem:
        return Mistake("no-answer", answer.problem)
    mistake = _in_new_process(answer, seconds, show)
    if not mistake:
        answer.record()
    return mistake


def _in_new_process(answer: Answer, seconds: float, show: Callable[..., object]) -> Mistake | None:
    key = secrets.token_hex()  # the process begins its results with the key; other output is the answer's
    results: list[Mistake | None] = []

    def on_line(line: str) -> None:
        text, found, result = line.partition(key)
        if text:
            show(_without_escapes(text.rstrip("\n")), flush=True)
        with suppress(ValueError, TypeError, LookupError, AttributeError):  # an answer can read the key, and forge this
            if found:
                made = json.loads(result)
                mistake = Mistake(*made) if made else None
                report(answer.label, answer.name, mistake)
                results.append(mistake)

    command = [sys.executable, "-u", "-c", START, answer.path, str(answer.cell or ""), key]
    try:
        finished = subprocesses.run(command, seconds=seconds, on_line=on_line)
    except OSError as error:
        return Mistake("not-graded", f"no process could start ({error.strerror})")
    for line in finished.err.splitlines() if results else ():  # without results, it is not the answer's
        if not line.startswith("gluon_mgpu: "):  # notices have already been printed
            show(_without_escapes(line), file=sys.stderr)
    if finished.status is None:
        return Mistake("time-limit", f"no result after {seconds:g} seconds")
    if results:
        return results[-1]
    try:
        subprocesses.raise_for_status("the process", finished)
    except Error as error:
        return Mistake("not-graded", str(error))
    return Mistake("not-graded", "the process ended before any case")


def _without_escapes(line: str) -> str:
    """A line that an answer has printed: it may contain tabs, but no sequences that control the terminal."""
    return "\t".join(map(log.printable, line.split("\t")))


def main(path: str, cell: str, key: str) -> None:
    """Run the hidden cases, and print the result after the key."""
    from gluon_mgpu.exercises import diagnosis  # noqa: F401  # if MXNet cannot be imported, this fails before any result

    output = os.fdopen(os.dup(1), "w")  # the answer may close or replace sys.stdout

    def send(*mistake: str) -> None:
        print(key + json.dumps(mistake), file=output, flush=True)

    send("ended-early", "the process ended before all cases were tried")  # holds unless a result follows
    for limit, value in LIMITS.items():
        with suppress(ValueError):  # a lower limit is set
            resource.setrlimit(limit, (value, value))
    sys.path.append(str(Path(path).parent.absolute()))  # the last: it may contain a random.py, too
    try:
        [answer] = [answer for answer in answers.in_file(path) if str(answer.cell or "") == cell]
        run_cases(answer.name, answer.code, answer.label)
        send()  # no mistake
    except Mistake as mistake:
        send(mistake.name, mistake.case)
    os._exit(0)  # does not wait for operators that the answer left in the engine's queue
