"""Files that are whole or not there: a checkpoint is one .npz archive of arrays and of facts about them, no pickle."""

import json
import os
import tempfile
import zipfile
from pathlib import Path

import numpy as np

from gluon_mgpu.errors import Error

FACTS = "facts.json"
LENET = ("W1", "b1", "W2", "b2", "W3", "b3", "W4", "b4")  # its arrays' names, in the order of the layers


def write_whole(path, write):
    """Put a file in place at once: write(file) fills a binary file beside it, which then takes its name."""
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def save(path, arrays, facts):
    """arrays: {name: NumPy array}. facts: what JSON can hold. The archive has a CRC-32 of each."""
    packed = {**arrays, FACTS: np.frombuffer(json.dumps(facts).encode(), np.uint8)}
    write_whole(path, lambda file: np.savez(file, **packed))


def load(path):
    """(arrays, facts) of a checkpoint; raises Error for one that is missing, cut off or altered."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        return arrays, json.loads(arrays.pop(FACTS).tobytes())
    except FileNotFoundError:
        raise Error(f"{path}: there is no such checkpoint") from None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise Error(f"{path} is no whole checkpoint ({error}): use another one") from None


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask
