"""Extracts the images and labels of a record file, which MXNet's im2rec and recordio write. This needs no MXNet.

A record is MAGIC, a word with its kind (3 bits) and length (29 bits), its content, and zeros up to a multiple of 4
bytes. If MAGIC occurs in the content at such a multiple, the content is split there into several parts.
"""

from __future__ import annotations

import mmap
import os
import shutil
import struct
from pathlib import Path

import numpy as np

from gluon_mgpu.support import files, log
from gluon_mgpu.support.errors import Error, UsageError

MAGIC = struct.pack("<I", 0xCED7230A)
WHOLE, FIRST, MIDDLE, LAST = range(4)  # kinds of parts
HEADER = struct.Struct("<IfQQ")  # number of labels after this header (0: the next number is the only one), label, IDs
SUFFIXES = {b"\xff\xd8\xff": ".jpg", b"\x89PNG\r\n\x1a\n": ".png", b"GIF8": ".gif", b"BM": ".bmp", b"RIFF": ".webp"}


def extract(source: str, folder: str) -> str:
    """Write the images, unchanged, and labels.csv into a folder, which appears only when all is written. Damaged
    records are skipped, and a notice gives their positions. Returns a line that says what was written.

    Raises UsageError if source has no records or the folder is not empty, and Error if records were damaged.
    """
    target = Path(folder).absolute()
    if os.path.lexists(target) and not (target.is_dir() and not any(target.iterdir())):
        raise UsageError(None, folder, "already exists; use another folder")
    part = target.with_name(f".{target.name}.{os.getpid()}{files.PART}")
    try:
        with open(source, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            part.mkdir()
            rows, damaged = _write(source, data, part)
        if not rows:
            raise UsageError(None, source, "contains no records; pass a file that im2rec or MXRecordIO wrote")
        part.replace(target)
    except (OSError, ValueError) as error:  # ValueError: the file is empty
        raise Error(f"cannot convert {source} to {folder} ({getattr(error, 'strerror', None) or error})") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    if damaged:
        raise Error(f"{source}: {damaged} damaged places were skipped; {folder} has the other {rows} records")
    return f"{folder}: images and labels.csv of {rows} records"


def _write(source: str, data: mmap.mmap, folder: Path) -> tuple[int, int]:
    """Returns the number of records, and of damaged places."""
    start = rows = damaged = 0
    bar = log.progress(total=len(data), unit="B", unit_scale=True, desc=os.path.basename(source))
    with bar, open(folder / "labels.csv", "w") as table:
        table.write("file,id,label\n")
        while start < len(data):
            try:
                end, number, labels, image = read(data, start)
            except ValueError as error:
                end, damaged = _find(data, start + 4, len(data), MIDDLE), damaged + 1
                log.say(f"{source}: bytes {start} to {end} are damaged ({error})")
            else:
                suffix = next((suffix for first, suffix in SUFFIXES.items() if image.startswith(first)), ".bin")
                name = f"{rows:07}{suffix}" if image else ""
                if name:
                    (folder / name).write_bytes(image)
                label = " ".join(np.format_float_positional(label, trim="-") for label in labels)
                table.write(f"{name},{number},{label}\n")
                rows += 1
            bar.update(end - start)
            start = end
    return rows, damaged


def _find(data: mmap.mmap | bytes, start: int, end: int, kinds: int = 8) -> int:
    """The first multiple of 4 from start on where MAGIC and a kind below `kinds` are, or `end`."""
    place = data.find(MAGIC, start, end)
    while place >= 0 and (place % 4 or ord(data[place + 7 : place + 8] or b"\xff") >> 5 >= kinds):
        place = data.find(MAGIC, place + 1, end)
    return end if place < 0 else place


def read(data: mmap.mmap | bytes, start: int) -> tuple[int, int, np.ndarray, bytes]:
    """Returns the end, the ID, the labels and the image of the record at start. Raises ValueError if it is damaged."""
    parts, kind, end = list[bytes](), FIRST, start
    while kind in (FIRST, MIDDLE):
        start = end + 8
        if data[end : end + 4] != MAGIC or start > len(data):
            raise ValueError("no part of a record begins where one should")
        [word] = struct.unpack("<I", data[end + 4 : start])
        kind, length = word >> 29, word & (1 << 29) - 1
        end = start + (length + 3) // 4 * 4
        if kind not in ((MIDDLE, LAST) if parts else (WHOLE, FIRST)) or end > len(data):
            raise ValueError("a part of it is missing")
        if any(data[start + length : end]) or _find(data, start, end) < end:
            raise ValueError("its length is wrong")
        parts.append(data[start : start + length])
    content = MAGIC.join(parts)
    count, label, number, _ = HEADER.unpack_from(content.ljust(HEADER.size, b"\xff"))
    image = HEADER.size + 4 * count
    if len(content) < image or not MAGIC.startswith(data[end : end + 4]):  # the file may end here
        raise ValueError("its header is wrong, or no record follows it")
    labels = np.frombuffer(content, "<f4", count, HEADER.size) if count else np.array([label], np.float32)
    return end, number, labels, content[image:]
