"""Declares settings: each field of `Settings` carries its type, range, help text and resume rule in one `Option`.

The checks, the command line's options, the groups in --help and the rules for resumed runs follow from it.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MOST = 2**31 - 1  # largest value of an integer setting
# What a resumed run does with a setting. SAME: it keeps the recorded value, and a different value is an error. FREE: it
# keeps the recorded value, unless the caller gives another one. NOT_KEPT: the setting is not recorded.
SAME, FREE, NOT_KEPT = "same", "free", "not kept"


class Kind:
    """The type of a setting's values. Each method raises ValueError for an invalid value; its message says why."""

    @property
    def metavar(self) -> str | None:
        """How --help shows a value."""
        return None

    def check(self, value: Any) -> Any:
        """Check a value, and return it in its usual type."""
        raise NotImplementedError

    def parse(self, text: str) -> Any:
        """Convert text from the command line to a checked value."""
        return self.check(text)


@dataclass(frozen=True)
class Number(Kind):
    """A number of type `type` from least to most. above, below: bounds that are not allowed themselves. example: a
    value to suggest."""

    type: type = float
    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    example: str = ""

    @property
    def metavar(self) -> str:
        return "N" if self.type is int else "X"

    def check(self, value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, (int, self.type)):
            raise ValueError(f"must be {self._name}")
        number: Any = value
        lower = (self.least is None or number >= self.least) and (self.above is None or number > self.above)
        upper = (self.most is None or number <= self.most) and (self.below is None or number < self.below)
        if not (lower and upper):  # nan is rejected too, because every comparison with nan is false
            raise ValueError(f"must be {self.range}{self.example and f', such as {self.example}'}")
        return self.type(value)

    def parse(self, text: str) -> Any:
        try:
            number = self.type(text)
        except ValueError:
            raise ValueError(f"must be {self._name}") from None
        return self.check(number)

    @property
    def _name(self) -> str:
        return "a whole number" if self.type is int else "a number"

    @property
    def range(self) -> str:
        if self.least is not None and self.most is not None:
            return f"from {self.least:.10g} to {self.most:.10g}"
        lower = [f"at least {self.least:g}"] if self.least is not None else []
        lower += [f"above {self.above:g}"] if self.above is not None else []
        upper = [f"less than {self.below:g}"] if self.below is not None else []
        return " and ".join(lower + upper)


@dataclass(frozen=True)
class Choice(Kind):
    """One of `words`."""

    words: tuple[str, ...]

    @property
    def metavar(self) -> str:
        return "|".join(self.words)

    def check(self, value: Any) -> Any:
        if value not in self.words:
            raise ValueError(f"must be one of {', '.join(self.words)}")
        return value


class Flag(Kind):
    """True or False. If the default is True, the command line also has --no-NAME."""

    def check(self, value: Any) -> Any:
        if not isinstance(value, bool):
            raise ValueError("must be True or False")
        return value


class TuneFlag(Flag):
    """A Flag, or the block and the piece that a run of version 0.2.0 has recorded: see `tuning.tuned`."""

    def check(self, value: Any) -> Any:
        pair = isinstance(value, (list, tuple)) and [type(number) for number in value] == [int, int]
        if pair and value[0] in (1, 16) and 0 <= value[1] <= 65536:
            return tuple(value)
        return super().check(value)


@dataclass(frozen=True)
class Numbers(Kind):
    """A tuple of numbers, or one of `words`. advice: describes valid values."""

    of: Number
    advice: str
    words: tuple[str, ...] = ()

    def check(self, value: Any) -> Any:
        if isinstance(value, str) and value in self.words:
            return value
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise ValueError(f"must be {self.advice}")
        try:
            return tuple(self.of.check(number) for number in value)
        except ValueError:
            raise ValueError(f"must be {self.advice}") from None

    def parse(self, text: str) -> Any:
        if text in self.words:
            return text
        try:
            return tuple(self.of.parse(part) for part in text.split(","))
        except ValueError:
            raise ValueError(f"must be {self.advice}") from None


@dataclass(frozen=True)
class Text(Kind):
    """Any text, checked by the code that uses it. words: values to suggest."""

    words: tuple[str, ...] = ()

    def check(self, value: Any) -> Any:
        if not isinstance(value, str):
            raise ValueError("must be text")
        return value


class Indices(Kind):
    """A count or a list of indices, checked by `devices.parse`."""

    def check(self, value: Any) -> Any:
        if not isinstance(value, (str, int, list, tuple)):
            raise ValueError("must be a number or a list of indices")
        return value


@dataclass(frozen=True)
class PathName(Kind):
    """A path. what: "folder" or "file"."""

    what: str = "file"
    example: str = "runs/first"

    @property
    def metavar(self) -> str:
        return "DIR" if self.what == "folder" else "FILE"

    def check(self, value: Any) -> Any:
        if not isinstance(value, (str, os.PathLike)) or not str(value):
            raise ValueError(f"must be a {self.what}, such as {self.example}")
        return value


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
