"""Prints notices, errors and progress bars on standard error, and formats tables.

If several processes train together, only one of them prints notices and progress bars.
"""

from __future__ import annotations

import itertools
import os
import sys
import unicodedata
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tqdm import tqdm

LAUNCHER = "GLUON_MGPU_LAUNCHER"  # environment variable: path of the pipe from which launch.py reads errors

# `distributed.process.identify` changes these.
name = ""  # this process's name in a run of several processes, such as "worker 1"
speaks = True  # whether this process prints notices and progress bars


def printable(line: str) -> str:
    """Escape line breaks and control characters, which a file or another process may have put into a message."""
    escaped = ("Cc", "Cf", "Cs", "Zl", "Zp")  # control and format characters, surrogates, line separators
    return "".join(c.encode("unicode_escape").decode() if unicodedata.category(c) in escaped else c for c in line)


def say(line: str, prefix: str = "gluon_mgpu: ", in_any_process: bool = False) -> None:
    """Print a notice on standard error if this process is the one that prints, or if `in_any_process`."""
    if speaks or in_any_process:
        with suppress(OSError, ValueError):  # the reader may be gone
            print(f"{prefix}{printable(line)}", file=sys.stderr, flush=True)


def error(line: str) -> None:
    """Print "error: LINE". Under launch.py, send the line to the launcher, which prints one error per run."""
    with suppress(OSError), open(os.environ.get(LAUNCHER, ""), "r+b", buffering=0) as launcher:
        launcher.write(f"{printable(line)}\n".encode())
        return
    with suppress(OSError, ValueError):  # the reader may be gone
        print(f"error: {printable(line)}", file=sys.stderr, flush=True)


def progress(**options: Any) -> tqdm:
    """Create a progress bar, shown on a terminal or in Jupyter if this process prints. options: passed to tqdm."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # without ipywidgets, tqdm warns that it falls back to text
        from tqdm.auto import tqdm

    hidden = not speaks or not (sys.stderr.isatty() or "ipykernel" in sys.modules)
    if hidden:  # disable=False would override the user's TQDM_DISABLE
        options["disable"] = True
    return tqdm(leave=False, **options)


def table(rows: Iterable[Sequence[object]], align: str = ">") -> list[str]:
    """Format rows of cells as lines. The first row is usually the header. Rows may have different lengths.

    align: alignment of all columns except the first, "<" or ">". The first column is aligned left.
    """
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in itertools.zip_longest(*cells, fillvalue="")]
    aligns = "<" + align * len(widths)
    return ["  ".join(f"{c:{a}{w}}" for c, a, w in zip(row, aligns, widths)).rstrip() for row in cells]
