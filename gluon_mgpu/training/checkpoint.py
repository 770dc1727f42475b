"""Files that are whole or not there: a checkpoint is one .npz archive of arrays and of facts about them, no pickle.

Its last bytes, the archive's comment, are the SHA-256 of all that comes before them.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tempfile
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from gluon_mgpu.runtime.errors import Error

FACTS = "facts.json"
LENET = ("W1", "b1", "W2", "b2", "W3", "b3", "W4", "b4")  # its arrays' names, in the order of the layers
PART = ".part"  # the end of the name of a file that is being written
DIGEST = 64  # bytes of a SHA-256 in hexadecimal


def write_whole(path: str | Path, write: Callable[[BinaryIO], object]) -> None:
    """Put a file in place at once: write(file) fills a binary file beside it, which then takes its name.

    Raises Error where that cannot be, as on a full disk or where no file is; what is there is then as it was.
    """
    path = Path(path)
    if path.exists() and not path.is_file():  # a folder, or a device such as /dev/null, which a file would replace
        raise Error(f"{path} is no file: give the name of one")
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=PART)
        try:
            with os.fdopen(handle, "wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o666 & ~_umask())
            os.replace(temporary, path)
        except BaseException:
            with suppress(FileNotFoundError):  # it has its name already
                os.unlink(temporary)
            raise
    except OSError as error:
        raise Error(f"{path} cannot be written ({error.strerror}): make room, or give another folder") from None


def remove_half_written(path: str | Path) -> None:
    """Remove what writers of this file left beside it that were killed."""
    for left in Path(path).parent.glob(f".{Path(path).name}.*{PART}"):
        left.unlink()


def save(path: str | Path, arrays: dict[str, np.ndarray], facts: dict[str, Any]) -> None:
    """arrays: {name: NumPy array}. facts: what JSON can hold."""
    packed = io.BytesIO()
    held: dict[str, Any] = {**arrays, FACTS: np.frombuffer(json.dumps(facts).encode(), np.uint8)}
    np.savez(packed, **held)
    with zipfile.ZipFile(packed, "a") as archive:
        archive.comment = bytes(DIGEST)
    content = packed.getbuffer()[:-DIGEST]
    digest = hashlib.sha256(content).hexdigest().encode()

    def write(file: BinaryIO) -> None:
        file.write(content)
        file.write(digest)

    write_whole(path, write)


def load(path: str | Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """(arrays, facts) of a checkpoint; raises Error for one that is missing, cut off or altered."""
    try:
        packed = Path(path).read_bytes()
        if hashlib.sha256(packed[:-DIGEST]).hexdigest().encode() != packed[-DIGEST:]:
            raise ValueError("its SHA-256 is not the one it ends with: cut off or altered")
        with np.load(io.BytesIO(packed), allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        return arrays, json.loads(arrays.pop(FACTS).tobytes())
    except FileNotFoundError:
        raise Error(f"{path}: there is no such checkpoint") from None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise Error(f"{path} is no whole checkpoint ({error}): begin the run anew in another folder") from None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
