"""Prints notices, errors and progress bars on standard error, and formats tables.

If several processes train together, only worker 0 prints notices and progress bars.
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

# Variables that mpiexec or srun sets in each worker
RANKS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")


def rank() -> int | None:
    """This process's number among the workers that mpiexec or srun has started; None: it was started alone."""
    return _first(RANKS)


def size() -> int | None:
    """The number of workers that mpiexec or srun has started, if it says so."""
    return _first(SIZES)


def _first(variables: Sequence[str]) -> int | None:
    texts = [os.environ[name] for name in variables if name in os.environ]
    return int(texts[0]) if texts and texts[0].isdecimal() else None


def printable(line: str) -> str:
    """Escape line breaks and control characters, which a file or another process may have put into a message."""
    escaped = ("Cc", "Cf", "Cs", "Zl", "Zp")  # control and format characters, surrogates, line separators
    return "".join(c.encode("unicode_escape").decode() if unicodedata.category(c) in escaped else c for c in line)


def plural(count: int, noun: str) -> str:
    return noun if count == 1 else f"{noun}s"


def say(line: str, prefix: str = "gluon_mgpu: ") -> None:
    """Print a notice on standard error, except in workers other than worker 0."""
    if not rank():
        _print(f"{prefix}{printable(line)}")


def error(line: str) -> None:
    """Print "error: LINE" on standard error."""
    _print(f"error: {printable(line)}")


def _print(line: str) -> None:
    with suppress(OSError, ValueError):  # the reader may be gone
        print(line, file=sys.stderr, flush=True)


def progress(**options: Any) -> tqdm:
    """Create a progress bar, shown on a terminal or in Jupyter, but only by worker 0. options: passed to tqdm."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # without ipywidgets, tqdm warns that it falls back to text
        from tqdm.auto import tqdm

    hidden = bool(rank()) or not (sys.stderr.isatty() or "ipykernel" in sys.modules)
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
