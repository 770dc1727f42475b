"""Writes and reads checkpoints: each is one .npz archive of arrays and JSON metadata, without pickle.

A checkpoint ends with the SHA-256 of everything before it, stored as the archive's comment.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from gluon_mgpu.runtime import files
from gluon_mgpu.runtime.errors import Error

FACTS = "facts.json"
LONGEST_HEADER = 1000  # limit on the size of an array's header, in bytes; np.save writes about 120
DIGEST = 64  # length of a SHA-256 in hexadecimal


def save(path: str | Path, arrays: dict[str, np.ndarray], facts: dict[str, Any]) -> None:
    """Write a checkpoint. facts: the metadata, a dict that JSON can represent."""
    packed = io.BytesIO()
    members: dict[str, Any] = {**arrays, FACTS: np.frombuffer(json.dumps(facts).encode(), np.uint8)}
    np.savez(packed, **members)
    with zipfile.ZipFile(packed, "a") as archive:
        archive.comment = bytes(DIGEST)
    content = packed.getvalue()[:-DIGEST]
    digest = hashlib.sha256(content).hexdigest().encode()
    files.write_whole(path, lambda file: file.write(content + digest))


def load(path: str | Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Read a checkpoint. Returns (arrays, facts). Raises Error if the file is missing or damaged, or cannot be read.

    Memory use is proportional to the size of the file, whatever the file claims to contain.
    """
    try:
        packed = files.read(path)
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
