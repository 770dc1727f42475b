"""The type of options and settings that are paths."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

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
