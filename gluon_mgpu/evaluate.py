"""Evaluates a run: computes its test accuracy and confusion matrix, and classifies image files.

This module only reads from the run's folder, so it can evaluate a run that is still training.
"""

from __future__ import annotations

import numbers
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
from mxnet import nd
from PIL import Image, ImageOps

from gluon_mgpu.compat import devices
from gluon_mgpu.data import datasets, own_data
from gluon_mgpu.data.batches import LARGEST_BATCH, batches
from gluon_mgpu.data.datasets import IMAGE_SHAPE
from gluon_mgpu.data.splitting import split
from gluon_mgpu.support import log
from gluon_mgpu.support.errors import Error, UsageError, setting
from gluon_mgpu.training import lessons
from gluon_mgpu.training.checkpoint import STATE
from gluon_mgpu.training.config import LESSONS, Config
from gluon_mgpu.training.models import VELOCITY, Model, create_model
from gluon_mgpu.training.record import Run, read

FORMATS = ("PNG", "JPEG", "GIF", "BMP", "WEBP", "PPM")  # not EPS, because Pillow would run Ghostscript
ONLY_TRAINING = ("momentum", "weight_decay", "shares", "tune")  # settings that an evaluation does not need
MOST = 2  # of pixels that training had from 0 to 1: a little more is noise, and much more is another scale
TOP = 3  # number of classes printed per image


class Trained(NamedTuple):
    """A run, and its network with the parameters of its checkpoint."""

    folder: str | Path
    run: Run
    config: Config  # the run's settings, without those for training only
    model: Model
    title: str  # "runs/first: lenet (scratch) after 4 epochs, on [cpu(0)]"


def load(
    folder: str | Path, impl: str | ModuleType | None = None, gpus: int | str | Sequence[int] = 1, device: str = "auto"
) -> Trained:
    """Load the network of the run in `folder`.

    impl: see `lessons.load`; None: the run's lesson. gpus, device: see `devices.contexts`.
    Raises UsageError if the folder does not hold a run, or if impl does not support its network; Error if the
    checkpoint is damaged or from a different network or version.
    """
    if not isinstance(folder, (str, os.PathLike)) or "\0" in str(folder):
        raise UsageError("folder", folder, "must be the path of a run")
    run = read(folder)
    if impl is None and run.config.impl not in LESSONS:
        option = setting("impl", run.config.impl)
        raise UsageError(None, folder, f"trained with your own lesson; pass it with {option}")
    ctx = devices.contexts(gpus, device)
    lesson = lessons.describe(impl if isinstance(impl, ModuleType) else lessons.load(impl or run.config.impl))
    config = run.config.with_defaults((lesson.missing | {*ONLY_TRAINING}) - {"model"})
    model = create_model(lesson.module, ctx, config, run.details["image_shape"], classes=1)
    try:
        model.load({name: array for name, array in run.arrays.items() if not name.startswith((VELOCITY, STATE))})
    except Error as error:
        raise Error(f"{folder}: {error}") from None
    title = f"{folder}: {config.model} ({lesson.name}) after {run.position}, on {ctx}"
    return Trained(folder, run._replace(arrays={}), config, model, title)


def held_out(run: Run, data_dir: str | Path | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Load a run's test set: images (n, channels, height, width) and labels (n,).

    data_dir, exceptions: see `datasets.load`. Raises UsageError if the run was trained on different data.
    """
    data = datasets.load(run.config.dataset, data_dir, run.config.limit, run.config.seed)
    run.check_data(data, data.digest(), "data_dir", data.source)
    return data.test_images, data.test_labels


def class_names(dataset: str, count: int) -> Sequence[str]:
    """The names of a data set's classes; the numbers 0 to count - 1 for your own data."""
    return datasets.CLASSES.get(dataset, tuple(map(str, range(count))))


def scores(trained: Trained, images: np.ndarray) -> np.ndarray:
    """Compute the network's scores (n, classes) for images: uint8, or floating-point numbers as in training.

    Shapes: see `datasets.own`. Raises UsageError if the images are not such as the network was trained on.
    """
    model = trained.model
    images = own_data.checked_images("images", images)
    if images.shape[1:] != model.image_shape:
        raise UsageError("images", images.shape, f"the network takes images of shape {model.image_shape}")
    trained_on_uint8 = trained.run.details["image_dtype"] == "uint8"
    if images.dtype == np.uint8 and not trained_on_uint8:
        raise UsageError("images", "uint8", "the network was trained on floating-point numbers; scale them so")
    if images.dtype != np.uint8 and trained_on_uint8 and images.max() > MOST:
        advice = "the network was trained on numbers from 0 to 1; divide by 255, or pass uint8"
        raise UsageError("images", f"numbers up to {images.max():g}", advice)
    results: list[np.ndarray] = []
    for X, _ in batches(images, np.zeros(len(images)), min(trained.config.batch_size, LARGEST_BATCH)):
        shards = [model.predict(X_shard) for X_shard in split(X, model.ctx)]  # computed at the same time
        results += [shard.asnumpy() for shard in shards]
    return np.concatenate(results)


def report(trained: Trained, images: np.ndarray, labels: np.ndarray) -> str:
    """Compute the accuracy and the confusion matrix on a test set, and format them for a terminal.

    The matrix also has the recall of each class. Zeros are shown as dots. images: see `scores`. labels: class numbers
    (n,). Raises UsageError if the images or the labels do not fit the network, or each other.
    """
    values = scores(trained, images)
    labels = own_data.checked_labels("labels", labels, values)
    if labels.max() >= values.shape[1]:
        raise UsageError("labels", int(labels.max()), f"the network has only {values.shape[1]} classes, counted from 0")
    predicted = values.argmax(axis=1)
    # A network may have more outputs than its data has classes
    count = max(trained.run.details["classes"], labels.max() + 1, predicted.max() + 1)
    classes = class_names(trained.config.dataset, count)
    counts = np.zeros((len(classes), len(classes)), int)
    np.add.at(counts, (labels, predicted), 1)
    rows = [["", *classes, "recall"]]
    for i, name in enumerate(classes):
        examples = counts[i].sum()
        recall = f"{counts[i, i] / examples:.3f}" if examples else "-"
        rows.append([name, *(str(count or ".") for count in counts[i]), recall])
    right, total = counts.trace(), counts.sum()
    accuracy = f"test accuracy: {right / total:.4f} ({right}/{total})"
    return "\n".join([trained.title, accuracy, "", "rows: true class; columns: predicted class", *log.table(rows)])


def read_image(path: str | Path, shape: Sequence[int] = IMAGE_SHAPE) -> np.ndarray:
    """Read an image file as uint8 of this shape: 1 channel is grayscale, 3 are RGB. Prints a notice if it is resized.

    Transparent pixels become black, the background color of the data sets. Raises Error if the file is missing,
    damaged, not in one of FORMATS, or so large that Pillow treats it as a decompression bomb.
    """
    is_shape = isinstance(shape, (list, tuple)) and all(isinstance(n, numbers.Integral) and int(n) > 0 for n in shape)
    if not is_shape or len(shape) != 3:
        raise UsageError("shape", shape, "must be (channels, height, width)")
    channels, height, width = shape
    if channels not in (1, 3):
        raise Error(f"{path}: the network takes {channels} channels, but an image file has 1 or 3")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path, formats=FORMATS) as image:
                image = ImageOps.exif_transpose(image)  # this decodes the image
                transparent = image.info.get("transparency")
                if image.mode.startswith("I"):  # Pillow would clip 16-bit values to 8 bits instead of scaling them
                    pixels = np.asarray(image)
                    if transparent is not None:
                        pixels = np.where(pixels == transparent, 0, pixels)
                    image = Image.fromarray((pixels >> 8).astype(np.uint8))
                elif image.has_transparency_data:
                    image = image.convert("RGBA")
                    image = Image.alpha_composite(Image.new("RGBA", image.size, "black"), image)
                image = image.convert("L" if channels == 1 else "RGB")
    except FileNotFoundError:
        raise Error(f"{path} does not exist") from None
    except Exception as error:  # decoders raise many exception types for damaged files
        raise Error(f"{path}: not an image that can be read ({error}); use {', '.join(FORMATS)}") from None
    if image.size != (width, height):
        log.say(f"{path}: resized from {image.width}x{image.height} to {width}x{height}")
        image = image.resize((width, height))
    return np.asarray(image).reshape(height, width, channels).transpose(2, 0, 1)


def classify(trained: Trained, paths: Sequence[str], images: Sequence[np.ndarray]) -> str:
    """Classify images. Returns a line for each image with its TOP most probable classes and their probabilities.

    paths: names to print. images: one uint8 array (channels, height, width) per path. Raises UsageError if an image
    does not fit the network, or if the run was trained on images that are not uint8.
    """
    if trained.run.details["image_dtype"] != "uint8":
        advice = "trained on floating-point numbers; scale images in the same way, and use evaluate.scores"
        raise UsageError(None, trained.folder, advice)
    if len(paths) != len(images) or not paths:
        raise UsageError("images", f"{len(images)} images", f"must be one per path, and there are {len(paths)} paths")
    for image in images:
        if np.shape(image) != trained.model.image_shape:
            raise UsageError("images", np.shape(image), f"the network takes shape {trained.model.image_shape}")
    lines = []
    probabilities = nd.softmax(nd.array(scores(trained, np.stack(images)))).asnumpy()
    classes = class_names(trained.config.dataset, probabilities.shape[1])
    for path, row in zip(paths, probabilities):
        best = row.argsort()[::-1][:TOP]
        lines.append(f"{log.printable(str(path))}: " + ", ".join(f"{classes[i]} {row[i]:.4f}" for i in best))
    return "\n".join(lines)
