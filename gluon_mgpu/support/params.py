"""Types of options and settings: paths, and numbers that are finite."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import click

SMALLEST, LARGEST = 1e-20, 1e20  # MXNet's operators take float32; a schedule makes a learning rate still smaller
LONGEST_NAME = 255  # bytes, on Linux and macOS


class Location(click.Path):
    """A path as text, not empty, whose names are not too long. ~ is the user's home directory."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        path = os.fspath(value)
        if not isinstance(path, str) or "\0" in path:
            self.fail(f"{path!r} is not the text of a path.", param, ctx)
        if not path:
            self.fail("the path is empty.", param, ctx)
        if any(len(os.fsencode(name)) > LONGEST_NAME for name in Path(path).parts):
            self.fail(f"{path!r} contains a name that is too long.", param, ctx)
        return super().convert(os.path.expanduser(path), param, ctx)


class FloatRange(click.FloatRange):
    """A finite number in a range, which MXNet can compute with."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{number} is not finite.", param, ctx)
        if number and not SMALLEST <= abs(number) <= LARGEST:
            self.fail(f"{number} is not between {SMALLEST:g} and {LARGEST:g}, as float32 needs.", param, ctx)
        return number


FOLDER = Location(file_okay=False)
FILE = Location()
