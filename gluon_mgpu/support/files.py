"""Checks paths, writes files completely or not at all, and locks folders."""

from __future__ import annotations

import errno
import gzip
import os
import stat
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from gluon_mgpu.support.errors import Error, UsageError, setting

PART = ".part"  # suffix of a file that is being written


def write_whole(path: str | Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file completely or not at all: write(file) fills a temporary file, which then replaces `path`.

    The new file has the permissions of the one that it replaces. If `path` is a link, the file that it leads to is
    replaced. Raises Error if writing fails, for example because the disk is full; an existing file is then left
    unchanged.
    """
    target = Path(os.path.realpath(path))
    temporary = target.parent / f".{target.name}.{os.getpid()}{PART}"
    try:
        before = target.stat() if target.exists() else None
        if before and not stat.S_ISREG(before.st_mode):  # do not replace a folder or a device such as /dev/null
            raise Error(f"{path} is not a regular file; pass a file path")
        if before and not os.access(target, os.W_OK):
            raise PermissionError(errno.EACCES, "it is read-only")
        temporary.unlink(missing_ok=True)
        with open(temporary, "xb") as file:  # never through a symbolic link
            if before:
                with suppress(PermissionError):  # only root can keep another owner
                    os.fchown(file.fileno(), before.st_uid, before.st_gid)
                os.fchmod(file.fileno(), stat.S_IMODE(before.st_mode))
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
        _sync(target.parent)
    except OSError as error:
        raise cannot_write(path, error) from None
    finally:
        with suppress(OSError):  # the temporary file has replaced `target`, or was never created
            temporary.unlink()


def _sync(folder: Path) -> None:
    """Make sure that the names of a folder's files survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cannot_write(path: str | Path, error: OSError) -> Error:
    advice = "free some space, or use" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "use"
    return Error(f"cannot write {path} ({error.strerror}): {advice} another folder")


def lock(folder: str | Path, name: str) -> int:
    """Lock a folder, without a lock file, until the returned file descriptor is closed or the process exits.

    name: the setting that gives the folder, such as "out", for error messages. Raises UsageError if another process
    holds the lock, Error if the folder cannot be locked.
    """
    import fcntl  # does not exist on Windows, where data sets work, but not training

    descriptor = None
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return descriptor
    except OSError as error:
        if descriptor is not None:
            os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise UsageError(name, folder, "another process is writing to this folder; wait until it exits") from None
        raise Error(f"{setting(name, folder)}: cannot lock the folder ({error.strerror}); use another folder") from None


def read_decompressed(path: str | Path, limit: int) -> bytes:
    """Read a file, and decompress it if it is a gzip file. limit: number of bytes to read at most.

    Raises Error if it cannot be read.
    """
    try:
        with open(path, "rb") as file:
            is_compressed = file.peek(2)[:2] == b"\x1f\x8b"
            return (gzip.GzipFile(fileobj=file) if is_compressed else file).read(limit)
    except (OSError, EOFError, zlib.error) as error:  # a bad gzip file raises an OSError without strerror
        raise Error(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error}); replace it") from error


def read(path: str | Path) -> bytes:
    """Read a file. Raises ValueError if it is not a regular file (a pipe would block), OSError if reading fails."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError("not a regular file")
    return Path(path).read_bytes()
