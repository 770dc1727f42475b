"""Small data sets in the format of MNIST's files."""

import hashlib

import numpy as np

from gluon_mgpu.training import datasets


def write(folder, name, arrays):
    """Write the four files of data set `name`. Returns {file: SHA-256}, as in `datasets.SHA256`.

    arrays: training images and labels, test images and labels; uint8, (n, 28, 28) and (n,).
    """
    folder.mkdir(parents=True)
    hashes = {}
    for file, array in zip(datasets.SHA256[name], arrays):
        header = np.array([0x800 + array.ndim, *array.shape], ">u4")  # 8: uint8
        content = header.tobytes() + array.tobytes()
        (folder / file).write_bytes(content)
        hashes[file] = hashlib.sha256(content).hexdigest()
    return hashes
