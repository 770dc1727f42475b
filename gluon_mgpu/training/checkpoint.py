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

from gluon_mgpu.support import files
from gluon_mgpu.support.errors import Error

Arrays = dict[str, np.ndarray]
METADATA = "facts.json"
STATE = "state/"  # an array that the lesson itself keeps is called STATE, then WORKER/DEVICE/NAME
DIGEST = 64  # length of a SHA-256 in hexadecimal


def save(path: str | Path, arrays: Arrays, metadata: dict[str, Any]) -> None:
    """Write a checkpoint. metadata: a dict that JSON can represent."""
    packed = io.BytesIO()
    if "file" in arrays:  # an argument of np.savez
        raise Error(f"{path}: a network's array cannot be called 'file'; give it another name")
    members: dict[str, Any] = {**arrays, METADATA: np.frombuffer(json.dumps(metadata).encode(), np.uint8)}
    np.savez(packed, **members)
    with zipfile.ZipFile(packed, "a") as archive:
        archive.comment = bytes(DIGEST)
    content = packed.getvalue()[:-DIGEST]
    digest = hashlib.sha256(content).hexdigest().encode()
    files.write_whole(path, lambda file: file.write(content + digest))


def load(path: str | Path) -> tuple[Arrays, dict[str, Any]]:
    """Read a checkpoint. Returns (arrays, metadata). Raises Error if the file is missing, damaged or unreadable."""
    try:
        content = files.read(path)
        if hashlib.sha256(content[:-DIGEST]).hexdigest().encode() != content[-DIGEST:]:
            raise ValueError("wrong SHA-256: truncated or altered")
        with np.load(io.BytesIO(content), allow_pickle=False) as archive:
            if any(member.compress_type for member in archive.zip.infolist()):
                raise ValueError("compressed arrays")
            arrays = {name: archive[name] for name in archive.files}
        if any(array.dtype.kind not in "biuf" for array in arrays.values()):
            raise ValueError("contains arrays other than numbers")
        return arrays, json.loads(arrays.pop(METADATA).tobytes())
    except FileNotFoundError:
        raise Error(f"{path} does not exist") from None
    except OSError as error:
        raise Error(f"cannot read {path} ({error.strerror})") from None
    except Exception as error:  # zipfile and NumPy raise many exception types for damaged files
        advice = "start the run again in another folder"
        raise Error(f"{path} is damaged ({str(error) or type(error).__name__}): {advice}") from None
