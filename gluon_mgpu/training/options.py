"""Declares settings: each field of `Settings` carries its type, range, help text and resume rule in one `Option`.

The checks, the command line's options, the groups in --help and the rules for resumed runs follow from it.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MOST = 2**31 - 1  # largest value of an integer setting
# What a resumed run does with a setting. SAME: it keeps the recorded value, and a different value is an error. FREE: it
# keeps the recorded value, unless the caller gives another one. NOT_KEPT: the setting is not recorded.
SAME, FREE, NOT_KEPT = "same", "free", "not kept"


@dataclass(frozen=True)
class Kind:
    """The type of a setting's values.

    advice: describes valid values, for error messages. convert: returns a value in its usual type; raises ValueError or
    TypeError if the value is invalid. read: converts text from the command line to a value. metavar: how --help shows a
    value. words: values to suggest. what: "folder" or "file", if the shell can complete the value.
    """

    advice: str
    convert: Callable[[Any], Any]
    read: Callable[[str], Any] = str
    metavar: str | None = None
    words: tuple[str, ...] = ()
    what: str = ""

    def check(self, value: Any) -> Any:
        """Returns the value in its usual type. Raises ValueError if it is invalid; the message says what is valid."""
        try:
            return self.convert(value)
        except (TypeError, ValueError):
            raise ValueError(f"must be {self.advice}") from None

    def parse(self, text: str) -> Any:
        """Convert text from the command line to a checked value."""
        try:
            return self.check(self.read(text))
        except ValueError:
            raise ValueError(f"must be {self.advice}") from None


def number(of: type, advice: str, valid: Callable[[Any], bool]) -> Kind:
    """An int or a float for which valid() is true. nan is never valid if valid() compares."""

    def convert(value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, (int, of)) or not valid(value):
            raise ValueError
        return of(value)

    return Kind(advice, convert, of, "N" if of is int else "X")


def whole(least: int, most: int = MOST) -> Kind:
    return number(int, f"a whole number from {least} to {most}", lambda n: least <= n <= most)


def numbers(of: Kind, advice: str) -> Kind:
    """A tuple of numbers."""
    return Kind(advice, lambda value: tuple(map(of.check, value)), lambda text: tuple(map(of.parse, text.split(","))))


def choice(*words: str) -> Kind:
    return Kind(f"one of {', '.join(words)}", lambda value: words[words.index(value)], str, "|".join(words), words)


def instance(advice: str, *types: type, valid: Callable[[Any], Any] = lambda value: True, **more: Any) -> Kind:
    """A value of one of these types for which valid() is true, which the code that uses it checks further."""

    def convert(value: Any) -> Any:
        if not isinstance(value, types) or not valid(value):
            raise ValueError
        return value

    return Kind(advice, convert, **more)


def path(what: str, example: str) -> Kind:
    """The path of a folder or file."""
    metavar = "DIR" if what == "folder" else "FILE"
    return instance(f"a {what}, such as {example}", str, os.PathLike, valid=str, metavar=metavar, what=what)


FLAG = instance("True or False", bool)  # if the default is True, the command line also has --no-NAME


@dataclass(frozen=True)
class Option:
    """The declaration of one setting. A default of None means that the setting is off, or chosen by the program.

    group: the heading in --help. flag: the option's name on the command line; "": derived from the field's name.
    """

    group: str
    kind: Kind
    help: str
    on_resume: str = SAME
    flag: str = ""
    metavar: str | None = None


def option(group: str, default: Any, kind: Kind, help: str, **more: Any) -> Any:
    """Declare a field of `Settings`. Arguments: see `Option`."""
    declared = Option(group, kind, help, **{"metavar": kind.metavar, **more})
    return dataclasses.field(default=default, metadata={"option": declared})
