"""Small data sets in the files of MNIST and Fashion-MNIST."""

import hashlib

import numpy as np

from gluon_mgpu.data import datasets

NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def files(data):
    """({file: content}, {file: SHA-256}) of a `datasets.Dataset`."""
    arrays = data.train_images[:, 0], data.train_labels, data.test_images[:, 0], data.test_labels
    contents = {name: _idx(array) for name, array in zip(NAMES, arrays)}
    return contents, {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}


def write(folder, data):
    """Write the files of a data set to a new folder. Returns {file: SHA-256}."""
    contents, hashes = files(data)
    put(folder, contents)
    return hashes


def put(folder, contents):
    """Write files, {name: content}, to a folder. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return folder


def hide_data_sets(monkeypatch, folder, hashes):
    """Hide this machine's data sets. folder: replaces all folders searched. hashes: {file: SHA-256}."""
    monkeypatch.setattr(datasets, "SHA256", {"fashion-mnist": hashes, "mnist": hashes})
    monkeypatch.setattr(datasets, "SYSTEM_FOLDER", folder / "system")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.setenv("MXNET_HOME", str(folder / "mxnet"))
    monkeypatch.delenv("GLUON_MGPU_DATA", raising=False)


def _idx(array):
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()
