"""The lessons that `train` accepts: their settings, and loading them and your changed copies of them.

This module imports no mxnet; `load` does.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from numbers import Real
from types import ModuleType
from typing import Any

from gluon_mgpu.support import errors
from gluon_mgpu.support.errors import UsageError, setting
from gluon_mgpu.training.config import LESSONS, SETTINGS, Config

# The functions that scratch, highlevel and copies of them have, and those by which the two are told apart.
COMMON = ("lenet", "split_and_load", "forward_backward", "train_batch", "evaluate_accuracy")
DISTINCT = {"scratch": ("init_params", "get_params", "allreduce", "sgd"), "highlevel": ("initialize",)}
RETURNING = {*COMMON, "init_params", "get_params"}  # those that must return something


def load(impl: str, fresh: bool = False, **functions: Callable[..., Any]) -> ModuleType:
    """Load a lesson: "scratch", "highlevel", or the path of a file with the functions of one of these.

    fresh: execute the file of one of the package's lessons again, as that of an own lesson always is. functions:
    replacements for some functions of scratch or highlevel, such as allreduce=tree; they apply to a new copy
    of the lesson. Raises UsageError if the file does not exist, or if a function is missing or has other arguments; an
    error in the file's own code is not caught.
    """
    name = path = str(impl)
    if impl in LESSONS:
        original = importlib.import_module(f"gluon_mgpu.{impl}")
        name, path = original.__name__, str(original.__file__)
        if not functions:
            return execute(name, path) if fresh else original
    if not path.endswith(".py") or not os.path.isfile(path):
        raise UsageError("impl", impl, f"must be one of {', '.join(LESSONS)}, or a Python file (.py) that exists")
    lesson = execute(f"{impl} (own {', '.join(functions)})" if functions else name, path)
    for function in functions:
        if not callable(getattr(lesson, function, None)):
            raise UsageError(function, None, f"{impl} has no function with this name")
    vars(lesson).update(functions)
    _check_functions(lesson)
    for function in RETURNING & {*vars(lesson)}:
        setattr(lesson, function, _returning(lesson, function))
    return lesson


def execute(name: str, path: str) -> ModuleType:
    """Execute a file as a new module."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module, before = importlib.util.module_from_spec(spec), sys.modules.get(name)
    errors.user_files.add(str(spec.origin))
    sys.modules[name] = module  # as an import would do; dataclasses need it
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        if before is not None and name.startswith("gluon_mgpu."):  # programs have imported the package's lessons
            sys.modules[name] = before
    return module


def _returning(lesson: ModuleType, name: str) -> Callable[..., Any]:
    """A lesson's function, which raises UsageError if it returns nothing, a list of anything but arrays, or an accuracy
    that is none."""
    function = getattr(lesson, name)

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        result = function(*args, **options)
        if result is None:
            raise UsageError("impl", name_of(lesson), f"{name} returned None; add its return statement")
        if isinstance(result, (list, tuple)) and not all(hasattr(array, "asnumpy") for array in result):
            raise UsageError(
                "impl", name_of(lesson), f"{name} returned {result!r:.60}; it must return a list of arrays"
            )
        if name == "evaluate_accuracy" and not (isinstance(result, Real) and 0 <= float(result) <= 1):
            advice = f"{name} returned {result!r:.60}; it must return a number from 0 to 1"
            raise UsageError("impl", name_of(lesson), advice)
        return result

    return call


def _check_functions(lesson: ModuleType) -> None:
    """Raise UsageError if a lesson's function is missing, or takes other arguments than in this package's lesson."""
    copied = family(lesson)
    for name in COMMON + DISTINCT[copied]:
        parameters = inspect.signature(getattr(load(copied), name)).parameters.values()
        required = [p.name for p in parameters if p.default is p.empty]
        function = getattr(lesson, name, None)
        if not callable(function):
            raise UsageError("impl", name_of(lesson), f"the function {name}({', '.join(required)}) is missing")
        signature = inspect.signature(function)
        try:
            signature.bind(*required)
        except TypeError:
            advice = f"{name}({', '.join(signature.parameters)}) must take ({', '.join(required)})"
            raise UsageError("impl", name_of(lesson), advice) from None


# Which lesson a module is


def name_of(lesson: ModuleType) -> str:
    """The name of a lesson as in --impl: "scratch", "highlevel" or a path."""
    if lesson.__name__.startswith("gluon_mgpu."):
        return lesson.__name__.removeprefix("gluon_mgpu.")
    return str(lesson.__file__) if lesson.__name__ in LESSONS else lesson.__name__


def is_own(lesson: ModuleType) -> bool:
    """Whether this is a user's own lesson, not one of the package's."""
    return name_of(lesson) not in LESSONS


def has_own(function: str, lesson: ModuleType) -> bool:
    """Whether a user's own lesson has changed this function of the package's lesson."""
    sources = set()
    for module in (lesson, load(family(lesson))):
        with suppress(OSError, TypeError):  # it has no such function, or its code is in no file
            sources.add(inspect.getsource(getattr(module, function, None)))  # type: ignore[arg-type]
    return len(sources) > 1


def is_unchanged(lesson: ModuleType) -> bool:
    """Whether this is one of the package's lessons, and a Python program has replaced none of its functions."""
    functions = [value for value in vars(lesson).values() if inspect.isfunction(value)]
    return not is_own(lesson) and all(function.__module__.startswith("gluon_mgpu.") for function in functions)


def family(lesson: ModuleType) -> str:
    """The name of the package's lesson that this is, or is a changed copy of."""
    if not is_own(lesson):
        return name_of(lesson)
    for name, functions in DISTINCT.items():
        if hasattr(lesson, functions[0]):
            return name
    advice = "defines neither init_params, as scratch.py does, nor initialize, as highlevel.py does"
    raise UsageError("impl", name_of(lesson), advice)


# Which settings a lesson has


def unsupported(lesson: ModuleType) -> list[str]:
    """The settings without a meaning in a lesson."""
    its_family = family(lesson)
    return [name for name, declared in SETTINGS.items() if its_family not in declared.lessons]


def check_settings(config: Config, lesson: ModuleType) -> None:
    """Raise UsageError if a setting has no meaning in a lesson."""
    for name in config.changed(unsupported(lesson)):
        advice = f"not supported by {name_of(lesson)}, only by {_lessons_with(name)}"
        raise UsageError(name, getattr(config, name), advice)


def _lessons_with(name: str) -> str:
    return " and ".join(SETTINGS[name].lessons)


def for_training(config: Config, lesson: ModuleType, given: Collection[str]) -> Config:
    """The settings for training with a lesson, even if it is not the resumed run's lesson: settings that may change and
    are not given get their defaults if the lesson does not have them. Raises UsageError if others are not defaults."""
    missing = {*unsupported(lesson)} - {*given}
    config = config.with_defaults([name for name in missing if SETTINGS[name].changeable])
    for name in config.changed(missing):
        used = setting(name, getattr(config, name))
        raise UsageError("impl", name_of(lesson), f"the run used {used}, which only {_lessons_with(name)} can continue")
    return config
