"""Checks paths, writes files completely or not at all, and locks folders."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from gluon_mgpu.support.errors import Error, UsageError, setting

PART = ".part"  # suffix of a file that is being written
SHORT = 40  # characters of a name, which may be as long as the file system allows


def write_whole(path: str | Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file completely or not at all: write(file) fills a temporary file, which then replaces `path`.

    If `path` is a link, the file that it leads to is replaced. Raises Error if writing fails, for example because the
    disk is full; an existing file is then left unchanged.
    """
    target = Path(os.path.realpath(path))
    try:
        if target.exists() and not target.is_file():  # do not replace a folder or a device such as /dev/null
            raise Error(f"{path} is not a regular file; pass a file path")
        if target.exists() and not os.access(target, os.W_OK):
            raise PermissionError(errno.EACCES, "it is read-only")
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            write_in(folder, target.name, write)
        finally:
            os.close(folder)
    except OSError as error:
        raise cannot_write(path, error) from None


def write_in(folder: int, name: str, write: Callable[[BinaryIO], object]) -> None:
    """Write a file in an open folder, completely or not at all: see `write_whole`. A link is replaced, not followed.

    folder: its file descriptor. The new file has the permissions of the one that it replaces. Raises OSError if writing
    fails.
    """
    temporary = f".{name[:SHORT]}.{os.getpid()}{PART}"
    try:
        with suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=folder)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL  # never through a symbolic link
        with open(os.open(temporary, flags, 0o666, dir_fd=folder), "wb") as file:
            with suppress(FileNotFoundError):
                before = os.stat(name, dir_fd=folder, follow_symlinks=False)
                if stat.S_ISREG(before.st_mode):
                    _take_over(file.fileno(), before)
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        os.fsync(folder)  # so that the name survives a power cut
    finally:
        with suppress(OSError):  # the temporary file has replaced the other one, or was never created
            os.unlink(temporary, dir_fd=folder)


def _take_over(file: int, before: os.stat_result) -> None:
    """Give a file the owner and the permissions of another one."""
    with suppress(PermissionError):  # only root can keep another owner
        os.fchown(file, before.st_uid, before.st_gid)
    os.fchmod(file, stat.S_IMODE(before.st_mode))


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


def read(path: str | Path) -> bytes:
    """Read a file. Raises ValueError if it is not a regular file (a pipe would block), OSError if reading fails."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError("not a regular file")
    return Path(path).read_bytes()
