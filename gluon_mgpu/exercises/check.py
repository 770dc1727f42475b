"""Checks an answer. `check` runs in this process, which imports MXNet; `run` uses a new process with a time limit."""

from __future__ import annotations

import configparser
import os
import sys
import textwrap
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from gluon_mgpu import exercises
from gluon_mgpu.exercises import Mistake
from gluon_mgpu.runtime import subprocesses

SECONDS = 60  # time limit; a check takes 2 seconds, or longer on a busy machine
WRONG = 3  # exit status of the new process if it finds a mistake
WIDTH = 100
TORCH = {  # {attribute of a PyTorch tensor that an NDArray x lacks: what to write instead}
    "clone": "x.copy()",
    "copy_": "y.copyto(x)",
    "cuda": "x.as_in_context(c)",
    "device": "x.context",
    "numpy": "x.asnumpy()",
    "to": "x.as_in_context(c)",
    "view": "x.reshape(shape)",
}


def check(name: str, code: str, path: str) -> Mistake | None:
    """The first mistake in a learner's code, or None if the code is correct."""
    import mxnet as mx

    from gluon_mgpu.exercises import checks

    module, wanted, returned = ModuleType(name), exercises.answer_of(name).name, []
    mx.random.seed(0)
    try:
        program = compile(code, path, "exec", dont_inherit=True)
        exec(program, module.__dict__)  # nosec B102  # the user's own file
        if not callable(getattr(module, wanted, None)):
            return Mistake("missing", f"the file does not define the function {wanted}")

        def answer(*args: Any) -> Any:
            returned.append(getattr(module, wanted)(*args))
            return returned[-1]

        getattr(checks, name)(answer)
        mx.nd.waitall()  # raises errors from operators whose results no case has read
    except Mistake as mistake:
        return mistake
    except NotImplementedError:
        return Mistake("unfinished", f"{wanted} is not written yet")
    except (Exception, SystemExit) as error:
        return failure(error, path, wanted, returned)
    return None


def failure(error: BaseException, path: str, wanted: str, returned: list[Any]) -> Mistake:
    """The Mistake for an answer that raised an error or returned a value that the check cannot use."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    if isinstance(error, SyntaxError):
        lines = [error.lineno]
    what = traceback.format_exception_only(type(error), error)[-1].strip().splitlines()[-1]
    if lines:
        missing = what.partition("'NDArray' object has no attribute '")[2].partition("'")[0]
        hint = f"\nPyTorch's x.{missing} is {TORCH[missing]} in MXNet" if missing in TORCH else ""
        return Mistake("error", f"line {lines[-1]}: {what}{hint}")
    if type(error).__name__ == "MXNetError":
        return Mistake("failed-operator", what)
    value = textwrap.shorten(repr(returned[-1]), WIDTH)
    return Mistake("wrong-type", f"{wanted} returned {value}, which the check cannot use ({what})")


def report(path: str, name: str, mistake: Mistake | None) -> str:
    """Format the result of a check for the learner. path, name: the file and its exercise."""
    if mistake is None:
        return f"{path}: correct"
    texts = configparser.ConfigParser(interpolation=None)
    texts.read(Path(__file__).with_name("mistakes.ini"))
    why = textwrap.fill(texts[name][mistake.name], WIDTH)
    return f"{path}: not correct yet. Mistake: {mistake.name}\n{textwrap.indent(mistake.case, '  ')}\n{why}"


def run(path: str, seconds: float = SECONDS) -> bool:
    """Check a file and print the result. Returns whether it is correct.

    The file's own output is printed too. Raises Error if the process crashes. Other exceptions: see
    `exercises.name_of`.
    """
    name = exercises.name_of(path)
    command = [sys.executable, "-u", "-m", "gluon_mgpu.exercises.check", path]
    finished = subprocesses.run(command, seconds=seconds, on_line=lambda line: print(line, end="", flush=True))
    for line in finished.err.splitlines():
        if not line.startswith("gluon_mgpu: "):  # notices have already been printed
            print(line, file=sys.stderr)
    if finished.status is None:
        print(report(path, name, Mistake("time-limit", f"no result after {seconds:g} seconds")))
    elif finished.status != WRONG:
        subprocesses.check(path, finished)
    return finished.status == 0


def main(path: str) -> None:
    name = exercises.name_of(path)
    mistake = check(name, Path(path).read_text(), path)
    print(report(path, name, mistake), flush=True)
    os._exit(WRONG if mistake else 0)  # does not wait for operators that the answer left in the engine's queue


if __name__ == "__main__":
    main(sys.argv[1])
