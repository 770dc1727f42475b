"""Small data sets in the files of MNIST and Fashion-MNIST."""

import hashlib

import numpy as np

NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def files(data):
    """({file: content}, {file: SHA-256}) of a `datasets.Dataset`."""
    arrays = data.train_images[:, 0], data.train_labels, data.test_images[:, 0], data.test_labels
    contents = {name: _idx(array) for name, array in zip(NAMES, arrays)}
    return contents, {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}


def write(folder, data):
    """Write the files of a data set to a new folder. Returns {file: SHA-256}."""
    contents, hashes = files(data)
    folder.mkdir()
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return hashes


def _idx(array):
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()
