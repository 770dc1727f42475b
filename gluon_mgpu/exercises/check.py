"""Runs the hidden cases of an exercise on a learner's code, in this process. `report` starts it for a file."""

from __future__ import annotations

import importlib
import os
import sys
import textwrap
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import mxnet as mx

from gluon_mgpu import exercises
from gluon_mgpu.exercises.report import WIDTH, WRONG, Mistake, report


def check(name: str, code: str, path: str) -> Mistake | None:
    """The first mistake in a learner's code, or None if it is correct."""
    module, wanted, returned = ModuleType(name), exercises.answer_of(name).name, []
    cases = importlib.import_module(f"gluon_mgpu.exercises.checks.{exercises.PAGES[name].replace('-', '_')}")
    mx.random.seed(0)
    try:
        exec(compile(code, path, "exec", dont_inherit=True), module.__dict__)
        if not callable(getattr(module, wanted, None)):
            return Mistake("missing", f"the file defines no function {wanted}")

        def answer(*args: Any) -> Any:
            returned.append(getattr(module, wanted)(*args))
            return returned[-1]

        getattr(cases, name)(answer)
        mx.nd.waitall()  # raises the errors of operators whose results no case has read
    except Mistake as mistake:
        return mistake
    except NotImplementedError:
        return Mistake("unfinished", f"{wanted} is not written yet")
    except (Exception, SystemExit) as error:
        return failure(error, path, wanted, returned)
    return None


def failure(error: BaseException, path: str, wanted: str, returned: list[Any]) -> Mistake:
    """The mistake of an answer that raised an error, or that returned what its check cannot use."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    if isinstance(error, SyntaxError):
        lines = [error.lineno]
    what = traceback.format_exception_only(type(error), error)[-1].strip().splitlines()[-1]
    if lines:
        return Mistake("error", f"line {lines[-1]}: {what}")
    if isinstance(error, mx.MXNetError):
        return Mistake("failed-operator", what)
    value = textwrap.shorten(repr(returned[-1]), WIDTH)
    return Mistake("wrong-type", f"{wanted} returned {value}, which the check cannot use ({what})")


def main(path: str) -> None:
    name = exercises.name_of(path)
    mistake = check(name, Path(path).read_text(), path)
    print(report(path, name, mistake), flush=True)
    os._exit(WRONG if mistake else 0)  # does not wait for what the answer may have left in the engine's queue


if __name__ == "__main__":
    main(sys.argv[1])
