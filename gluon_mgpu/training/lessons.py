"""The lessons that `train` accepts: their settings, and loading them and your changed copies of them.

This module imports no mxnet; `load` does.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
from collections.abc import Callable, Collection
from types import ModuleType
from typing import Any, NamedTuple

from gluon_mgpu.support.errors import UsageError, setting
from gluon_mgpu.support.programs import execute
from gluon_mgpu.training.config import LESSONS, SETTINGS, Config

# The functions that scratch, highlevel and copies of them have, and those by which the two are told apart.
COMMON = ("lenet", "split_and_load", "forward_backward", "train_batch", "evaluate_accuracy")
DISTINCT = {"scratch": ("init_params", "get_params", "allreduce", "sgd"), "highlevel": ("initialize",)}
PACKAGES = {f"gluon_mgpu.{name}": name for name in LESSONS}  # {module: lesson}


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
    _check_functions(describe(lesson))
    return lesson


def _check_functions(lesson: Lesson) -> None:
    """Raise UsageError if a lesson's function is missing, or takes other arguments than in this package's lesson."""
    original = load(lesson.family)
    for name in COMMON + DISTINCT[lesson.family]:
        parameters = inspect.signature(getattr(original, name)).parameters.values()
        required = [p.name for p in parameters if p.default is p.empty]
        function = getattr(lesson.module, name, None)
        if not callable(function):
            raise UsageError("impl", lesson.name, f"the function {name}({', '.join(required)}) is missing")
        signature = inspect.signature(function)
        try:
            signature.bind(*required)
        except TypeError:
            advice = f"{name}({', '.join(signature.parameters)}) must take ({', '.join(required)})"
            raise UsageError("impl", lesson.name, advice) from None


def name_of(lesson: ModuleType) -> str:
    """The name of a lesson as in --impl: "scratch", "highlevel" or a path."""
    if lesson.__name__ in PACKAGES:
        return PACKAGES[lesson.__name__]
    return str(lesson.__file__) if lesson.__name__ in LESSONS else lesson.__name__


class Lesson(NamedTuple):
    """What there is to know about a lesson. name: as in --impl. family: the package's lesson that it is, or is a copy
    of. is_own: whether it is the user's own. full_name: the name, with the whole path of a file. missing: the settings
    without a meaning in it."""

    module: ModuleType
    name: str
    family: str
    is_own: bool
    full_name: str
    missing: frozenset[str]

    def check_settings(self, config: Config) -> None:
        """Raise UsageError if a setting has no meaning in this lesson, and is not the default."""
        for name in config.changed(sorted(self.missing)):
            raise self._refused(name, getattr(config, name))

    def for_training(self, config: Config, given: Collection[str]) -> Config:
        """The settings for training with this lesson, even if it is not the resumed run's lesson: settings that may
        change and are not given get their defaults if the lesson does not have them. impl is the lesson's full name.

        given: names of the settings that the user passed. Raises UsageError if one of them has no meaning in this
        lesson, or if the run needs one that has none.
        """
        for name in sorted(self.missing.intersection(given)):
            if (name, config.model) != ("model", "lenet"):  # which every lesson trains
                raise self._refused(name, getattr(config, name))
        others = config.changed(sorted(self.missing))
        for name in others:
            if not SETTINGS[name].changeable:
                used, has = setting(name, getattr(config, name)), " and ".join(SETTINGS[name].lessons)
                raise UsageError("impl", self.name, f"the run used {used}, which only {has} can continue")
        if others:
            config = config.with_defaults(others)
        return config if config.impl == self.full_name else dataclasses.replace(config, impl=self.full_name)

    def _refused(self, name: str, value: object) -> UsageError:
        others = " and ".join(SETTINGS[name].lessons)
        return UsageError(name, value, f"not supported by {self.name}, only by {others} and copies of it")


def chosen(config: Config, given: Collection[str], module: ModuleType | None = None) -> tuple[Lesson, Config]:
    """The lesson of a run, and the settings for training with it.

    given: names of the settings that the user passed. module: the lesson; None: load the one that is named in the
    settings. Raises UsageError if a resumed run used a lesson of the user's own, and the user has not passed it.
    """
    is_given = module is not None or "impl" in given
    if not is_given and config.impl not in LESSONS:  # a checkpoint does not choose code to run
        advice = f"the run used your own lesson; pass it with {setting('impl', config.impl)}"
        raise UsageError("resume", config.resume, advice)
    lesson = describe(module or load(config.impl))
    return lesson, lesson.for_training(config, given)


def describe(module: ModuleType) -> Lesson:
    """Find out what there is to know about a lesson. Raises UsageError if it is a copy of neither."""
    name = name_of(module)
    family = name if name in LESSONS else next((f for f, names in DISTINCT.items() if hasattr(module, names[0])), None)
    if family is None:
        advice = "defines neither init_params, as scratch.py does, nor initialize, as highlevel.py does"
        raise UsageError("impl", name, advice)
    missing = frozenset(setting for setting, declared in SETTINGS.items() if family not in declared.lessons)
    full_name = str(getattr(module, "__file__", None) or name) if name.endswith(".py") else name
    return Lesson(module, name, family, name not in LESSONS, full_name, missing)
