"""Writes files completely or not at all. A checkpoint is one .npz archive of arrays and JSON metadata, without pickle.

A checkpoint ends with the SHA-256 of everything before it, stored as the archive's comment.
"""

from __future__ import annotations

import fcntl
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

from gluon_mgpu.runtime.errors import Error, UsageError

FACTS = "facts.json"
PART = ".part"  # suffix of a file that is being written
LONGEST_HEADER = 1000  # limit on the size of an array's header, in bytes; np.save writes about 120
DIGEST = 64  # length of a SHA-256 in hexadecimal


def write_whole(path: str | Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file completely or not at all: write(file) fills a temporary file, which then replaces `path`.

    Raises Error if writing fails, for example because the disk is full; an existing file is then left unchanged.
    """
    path = Path(path)
    temporary = path.parent / f".{path.name}.{os.getpid()}{PART}"
    try:
        if path.exists() and not path.is_file():  # do not replace a folder or a device such as /dev/null
            raise Error(f"{path} is not a regular file; pass a file path")
        temporary.unlink(missing_ok=True)
        with open(temporary, "xb") as file:  # never through a symbolic link
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise Error(f"cannot write {path} ({error.strerror}): free some space, or use another folder") from None
    finally:
        with suppress(OSError):  # the temporary file has replaced `path`, or was never created
            temporary.unlink()


def remove_partial(path: str | Path) -> None:
    """Remove temporary files left by processes that were killed while writing `path`."""
    for left in Path(path).parent.glob(f".{Path(path).name}.*{PART}"):
        with suppress(OSError):  # if the folder is not writable, the next attempt to write a file raises an error
            left.unlink()


def lock(folder: str | Path, option: str) -> int:
    """Lock a folder, without a lock file, until the returned file descriptor is closed or the process exits.

    option: the caller's argument for the folder, such as "out=runs/first", for error messages. Raises UsageError if
    another process holds the lock, Error if the folder cannot be locked.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise
    except BlockingIOError:
        raise UsageError(f"{option}: another process is writing to this folder; wait until it exits") from None
    except OSError as error:
        raise Error(f"{option}: cannot lock the folder ({error.strerror}); use another folder") from None
    return descriptor


def save(path: str | Path, arrays: dict[str, np.ndarray], facts: dict[str, Any]) -> None:
    """Write a checkpoint. facts: the metadata, a dict that JSON can represent."""
    packed = io.BytesIO()
    members: dict[str, Any] = {**arrays, FACTS: np.frombuffer(json.dumps(facts).encode(), np.uint8)}
    np.savez(packed, **members)
    with zipfile.ZipFile(packed, "a") as archive:
        archive.comment = bytes(DIGEST)
    content = packed.getvalue()[:-DIGEST]
    digest = hashlib.sha256(content).hexdigest().encode()
    write_whole(path, lambda file: file.write(content + digest))


def read(path: str | Path) -> bytes:
    """Read a file. Raises ValueError if it is not a regular file (a pipe would block), OSError if reading fails."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError("not a regular file")
    return Path(path).read_bytes()


def load(path: str | Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Read a checkpoint. Returns (arrays, facts). Raises Error if the file is missing or damaged, or cannot be read.

    Memory use is proportional to the size of the file, whatever the file claims to contain.
    """
    try:
        packed = read(path)
        if hashlib.sha256(packed[:-DIGEST]).hexdigest().encode() != packed[-DIGEST:]:
            raise ValueError("wrong SHA-256: truncated or altered")
        with zipfile.ZipFile(io.BytesIO(packed)) as archive:
            members = archive.infolist()
            if any(m.compress_type for m in members) or sum(m.file_size for m in members) > len(packed):
                raise ValueError("the sizes of its arrays exceed the file size")
            arrays = {member.filename.removesuffix(".npy"): _array(archive.read(member)) for member in members}
        return arrays, json.loads(arrays.pop(FACTS).tobytes())
    except FileNotFoundError:
        raise Error(f"{path} does not exist") from None
    except OSError as error:
        raise Error(f"cannot read {path} ({error.strerror})") from None
    except MemoryError:
        raise
    except Exception as error:  # zipfile and NumPy raise many exception types for damaged files
        raise Error(f"{path} is damaged ({error}): start the run again in another folder") from None


def _array(content: bytes) -> np.ndarray:
    """Parse a .npy file. np.load would allocate whatever size the header claims, and parse a header of any length."""
    file = io.BytesIO(content)
    if np.lib.format.read_magic(file) != (1, 0) or int.from_bytes(content[8:10], "little") > LONGEST_HEADER:
        raise ValueError("unknown array format")
    shape, by_columns, dtype = np.lib.format.read_array_header_1_0(file)
    if dtype.kind not in "biuf":
        raise ValueError(f"contains {dtype}, not numbers")
    return np.ndarray(shape, dtype, file.read(), order="F" if by_columns else "C").copy()
