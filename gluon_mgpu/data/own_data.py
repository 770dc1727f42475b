"""Reads your own images and labels from a .npz file, and checks them."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gluon_mgpu.support import log
from gluon_mgpu.support.errors import Error, UsageError

PARTS = ("train_images", "train_labels", "test_images", "test_labels")
KERAS = ("x_train", "y_train", "x_test", "y_test")  # the names in Keras's mnist.npz
NEEDED = f"one .npz file, with {', '.join(PARTS)}"

if TYPE_CHECKING:  # Python 3.8, which old programs use, has no such type
    Parts = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # in the order of PARTS


def read(folder: str | Path) -> Parts:
    """Read the arrays in a folder or .npz file, and check them.

    Raises UsageError if they are missing or invalid, and Error if a file is damaged.
    """
    folder = Path(folder).expanduser()
    if folder.suffix == ".npz" and os.path.isfile(folder):
        return checked(*_read_npz(folder))
    if not os.path.isdir(folder):
        raise UsageError("data_dir", folder, "must be a folder or a .npz file that exists")
    archives = sorted(folder.glob("*.npz"))
    if len(archives) != 1:
        raise UsageError("data_dir", folder, f"must contain {NEEDED}; it contains {len(archives)}")
    try:
        return checked(*_read_npz(archives[0]))
    except UsageError as error:
        raise UsageError("data_dir", folder, str(error)) if error.name in PARTS else error from None


def checked(*arrays: Any) -> Parts:
    """Check arrays in the order of PARTS, and return them in that order.

    Images are returned as (n, channels, height, width), uint8 or float32, and labels as (n,).

    Raises UsageError if an array has an invalid shape or type, or if two arrays do not match.
    """
    train_images, test_images = (checked_images(name, array) for name, array in zip(PARTS[::2], arrays[::2]))
    train_labels = checked_labels("train_labels", arrays[1], train_images)
    test_labels = checked_labels("test_labels", arrays[3], test_images)
    if train_images.shape[1:] != test_images.shape[1:]:
        raise UsageError("test_images", test_images.shape, f"must have the sizes of train_images, {train_images.shape}")
    if train_images.dtype != test_images.dtype:
        raise UsageError("test_images", test_images.dtype, f"must have the type of train_images, {train_images.dtype}")
    return train_images, train_labels, test_images, test_labels


def checked_images(name: str, given: Any) -> np.ndarray:
    """Images as (n, channels, height, width), uint8 or float32. Exceptions: see `checked`. name: for messages."""
    images = _array(name, given)
    if images.ndim == 3:
        images = images[:, None]
    if images.ndim == 4 and images.shape[3] in (1, 3, 4) and min(images.shape[1:3]) > 4:
        log.say(f"{name}: the shape {images.shape} has the channels last; they are moved to the second axis")
        images = images.transpose(0, 3, 1, 2)
    if images.ndim != 4:
        raise UsageError(name, images.shape, "must have the shape (n, height, width) or (n, channels, height, width)")
    if not images.size:
        raise UsageError(name, images.shape, "contains no images")
    if images.dtype != np.uint8 and images.dtype.kind != "f":
        raise UsageError(name, images.dtype, "must be uint8 (0 to 255), or floating-point numbers")
    if images.dtype == np.uint8:
        return np.ascontiguousarray(images)
    with np.errstate(over="ignore"):
        converted = np.ascontiguousarray(images, np.float32)
    if not np.isfinite(converted).all():
        raise UsageError(name, images.dtype, "contains numbers that are not finite in float32")
    return converted


def checked_labels(name: str, given: Any, images: np.ndarray) -> np.ndarray:
    """Labels as (n,), one for each of the images. Exceptions: see `checked`. name: for messages."""
    labels = _array(name, given)
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise UsageError(name, f"{labels.dtype} {labels.shape}", "must be whole numbers, one per image")
    if len(labels) != len(images):
        raise UsageError(name, labels.shape, f"must have one label per image, and there are {len(images)} images")
    if not 0 <= labels.min() <= labels.max() < 2**24:  # float32 represents all of these exactly
        raise UsageError(name, f"{labels.min()} to {labels.max()}", "must be class numbers, counted from 0")
    return np.ascontiguousarray(labels)


def _array(name: str, given: Any) -> np.ndarray:
    if hasattr(given, "asnumpy"):  # an NDArray, which NumPy would read element by element
        given = given.asnumpy()
    if np.ma.is_masked(given):
        raise UsageError(name, "a masked array", "training would use the masked numbers, too; replace them")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of rows of different lengths, until NumPy 1.24
            return np.asarray(given)
    except Exception as error:  # other libraries' arrays raise their own exceptions
        raise UsageError(name, type(given).__name__, f"is not an array ({str(error).splitlines()[0]})") from None


def _read_npz(path: Path) -> list[np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            names = next((names for names in (PARTS, KERAS) if set(names) <= set(archive.files)), None)
            if names is None:
                advice = f"contains {', '.join(archive.files) or 'no arrays'}, but needs {', '.join(PARTS)}"
                raise UsageError("data_dir", path, advice)
            arrays = [archive[name] for name in names]
            if not all(isinstance(array, np.ndarray) for array in arrays):  # NumPy returns other members as bytes
                raise ValueError("a member is not in NumPy's .npy format")
            return arrays
    except UsageError:
        raise
    except Exception as error:  # zipfile and NumPy raise many exception types for damaged files
        raise Error(f"{path}: cannot be read ({error or type(error).__name__}); replace it") from None
