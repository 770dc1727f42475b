"""Writes files completely or not at all. A checkpoint is one .npz archive of arrays and JSON facts, without pickle.

Its last bytes, the archive's comment, are the SHA-256 of everything before them.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from gluon_mgpu.runtime.errors import Error

FACTS = "facts.json"
PART = ".part"  # suffix of a file that is being written
DIGEST = 64  # bytes of a SHA-256 in hexadecimal


def write_whole(path: str | Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file completely or not at all: write(file) fills a temporary file, which then replaces `path`.

    Raises Error if writing fails, for example because the disk is full; an existing file is then left unchanged.
    """
    path = Path(path)
    if path.exists() and not path.is_file():  # a folder, or a device such as /dev/null, which the file would replace
        raise Error(f"{path} is not a regular file; pass a file path")
    temporary = path.parent / f".{path.name}.{os.getpid()}{PART}"
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise Error(f"cannot write {path} ({error.strerror}): free some space, or use another folder") from None
    finally:
        with suppress(OSError):  # the file has replaced `path`, or was never created
            temporary.unlink()


def remove_partial(path: str | Path) -> None:
    """Remove temporary files left by processes that were killed while writing `path`."""
    for left in Path(path).parent.glob(f".{Path(path).name}.*{PART}"):
        left.unlink()


def save(path: str | Path, arrays: dict[str, np.ndarray], facts: dict[str, Any]) -> None:
    """Write a checkpoint. facts: anything that JSON can represent."""
    packed = io.BytesIO()
    members: dict[str, Any] = {**arrays, FACTS: np.frombuffer(json.dumps(facts).encode(), np.uint8)}
    np.savez(packed, **members)
    with zipfile.ZipFile(packed, "a") as archive:
        archive.comment = bytes(DIGEST)
    content = packed.getvalue()[:-DIGEST]
    digest = hashlib.sha256(content).hexdigest().encode()
    write_whole(path, lambda file: file.write(content + digest))


def load(path: str | Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Read a checkpoint. Returns (arrays, facts). Raises Error if the file is missing, truncated or altered."""
    try:
        packed = Path(path).read_bytes()
        if hashlib.sha256(packed[:-DIGEST]).hexdigest().encode() != packed[-DIGEST:]:
            raise ValueError("wrong SHA-256: truncated or altered")
        with np.load(io.BytesIO(packed), allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        return arrays, json.loads(arrays.pop(FACTS).tobytes())
    except FileNotFoundError:
        raise Error(f"{path} does not exist") from None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise Error(f"{path} is damaged ({error}): start the run again in another folder") from None
