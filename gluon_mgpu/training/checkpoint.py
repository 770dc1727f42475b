"""Packs and reads checkpoints: each is one .npz archive of arrays and JSON metadata, without pickle.

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


def packed(arrays: Arrays, metadata: dict[str, Any]) -> bytes:
    """The content of a checkpoint. metadata: a dict that JSON can represent."""
    archived = io.BytesIO()
    if reserved := {"file", METADATA} & arrays.keys():  # "file" is an argument of np.savez
        raise Error(f"a network's array cannot be called {min(reserved)!r}; give it another name")
    members: dict[str, Any] = {**arrays, METADATA: np.frombuffer(json.dumps(metadata).encode(), np.uint8)}
    np.savez(archived, **members)
    with zipfile.ZipFile(archived, "a") as archive:
        archive.comment = bytes(DIGEST)
    content = archived.getvalue()[:-DIGEST]
    return content + hashlib.sha256(content).hexdigest().encode()


def load(path: str | Path) -> tuple[Arrays, dict[str, Any]]:
    """Read a checkpoint. Returns (arrays, metadata). Raises Error if the file is missing, damaged or unreadable."""
    try:
        content = files.read(path)
        if hashlib.sha256(content[:-DIGEST]).hexdigest().encode() != content[-DIGEST:]:
            raise ValueError("wrong SHA-256: truncated or altered")
        with np.load(io.BytesIO(content), allow_pickle=False) as archive:
            if any(member.compress_type for member in archive.zip.infolist()):
                raise ValueError("compressed arrays")
            # By the members' whole names, because NumPy takes the array "a" for "a.npy", too
            arrays = {name: archive[f"{name}.npy"] for name in archive.files}
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
