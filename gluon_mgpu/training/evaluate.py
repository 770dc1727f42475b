"""Evaluate a run: test accuracy and confusion table, classes of image files, and export to Gluon's files.

Only reads the run's folder, so the run may still be training.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import mxnet as mx
import numpy as np
from mxnet import gluon, nd
from mxnet.ndarray import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from gluon_mgpu.runtime import devices, log
from gluon_mgpu.runtime.errors import Error, UsageError
from gluon_mgpu.training import datasets, records
from gluon_mgpu.training.batches import batches, read_behind
from gluon_mgpu.training.replicas import VELOCITY, Replicas, check_model, implementation
from gluon_mgpu.training.settings import Settings

FORMATS = ("PNG", "JPEG", "GIF", "BMP", "WEBP", "PPM")  # not EPS: Pillow would run Ghostscript
CHECKED = 1000  # check an exported network on at most this many test images
ROUNDING = 1e-4  # largest difference of an exported network's scores, as a fraction of the largest score
TOP = 3  # classes printed per image


class Trained(NamedTuple):
    """A run's network with the parameters of its checkpoint."""

    replicas: Replicas
    settings: Settings
    parameters: dict[str, np.ndarray]
    title: str  # "runs/first: lenet (scratch) after 4 epochs, on [cpu(0)]"


def load(
    folder: str | Path, impl: str | None = None, gpus: int | str | Sequence[int] = 1, device: str = "auto"
) -> Trained:
    """Load the network of the run in `folder`.

    impl: "scratch" or "highlevel"; None: whichever the run used. gpus, device: see `devices.contexts`.
    Raises UsageError if the folder holds no run or impl does not have its network; Error if the run has no checkpoint
    yet, or if the checkpoint is damaged or from a different network or version.
    """
    arrays, config, settings, position = records.last(folder)
    if arrays is None:
        raise Error(
            f"{folder}: no checkpoint yet; it is written after the first epoch or on Ctrl-C. If the run was killed, "
            f"`gluon-mgpu train --resume {folder}` continues it"
        )
    impl = impl or config["impl"]
    kind: type[Replicas] = implementation(impl).Replicas
    check_model(kind, settings.model)
    ctx = devices.contexts(gpus, device)
    options = {name: config[name] for name in kind.own_options if name in config}
    settings = replace(settings, shares=None, momentum=0.0)  # for these devices, without velocities
    replicas = kind(ctx, settings, **options)
    parameters = {name: array for name, array in arrays.items() if not name.startswith(VELOCITY)}
    records.restore(replicas, parameters, folder)
    return Trained(replicas, settings, parameters, f"{folder}: {settings.model} ({impl}) after {position}, on {ctx}")


def held_out(settings: Settings, data_dir: str | Path | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The run's test set: images uint8 (n, 1, 28, 28), labels uint8 (n,). data_dir, exceptions: see `datasets.load`."""
    data = datasets.load(settings.dataset, data_dir, settings.limit, settings.seed)
    return data.test_images, data.test_labels


def scores(trained: Trained, images: np.ndarray) -> np.ndarray:
    """Compute the network's scores (n, 10) for images, uint8 (n, 1, 28, 28)."""
    replicas = trained.replicas
    issued = ([replicas.predict(shard) for shard in replicas.split(X)] for X in _batches(trained, images))
    return np.concatenate(list(read_behind(issued)))


def _batches(trained: Trained, images: np.ndarray) -> Iterator[NDArray]:
    for X, _ in batches(images, np.zeros(len(images)), trained.settings.batch_size):
        assert X is not None
        yield X


def report(trained: Trained, images: np.ndarray, labels: np.ndarray) -> str:
    """Format the accuracy on a test set and the confusion table, for a terminal."""
    classes = datasets.CLASSES[trained.settings.dataset]
    counts = np.zeros((len(classes), len(classes)), int)
    np.add.at(counts, (labels, scores(trained, images).argmax(axis=1)), 1)
    right, total = counts.trace(), counts.sum()
    return f"{trained.title}\ntest accuracy: {right / total:.4f} ({right}/{total})\n\n{table(counts, classes)}"


def table(counts: np.ndarray, classes: Sequence[str]) -> str:
    """Format how often an example of class i was predicted as class j, counts (n, n), and the recall of each class.
    Zeros are shown as dots."""
    rows = [["", *classes, "recall"]]
    for i, name in enumerate(classes):
        examples = counts[i].sum()
        recall = f"{counts[i, i] / examples:.3f}" if examples else "-"
        rows.append([name, *(str(count or ".") for count in counts[i]), recall])
    margin, *widths = (max(map(len, column)) for column in zip(*rows))
    lines = ["rows: true class; columns: predicted class"]
    for name, *cells in rows:
        lines.append(name.ljust(margin) + "".join(cell.rjust(width + 2) for cell, width in zip(cells, widths)))
    return "\n".join(lines)


def read_image(path: str | Path) -> np.ndarray:
    """Read an image file as grayscale, uint8 (1, 28, 28). Prints a notice if it was resized.

    Transparent pixels become black, the background of the data sets. Raises Error if the file is missing, damaged, not
    in one of FORMATS, or so large that Pillow considers it an attack.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path, formats=FORMATS) as image:
                image = ImageOps.exif_transpose(image)  # this decodes the image
                if image.mode.startswith("I"):  # Pillow would clip 16-bit values to 8 bits instead of scaling them
                    image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
                if image.has_transparency_data:
                    image = image.convert("RGBA")
                    image = Image.alpha_composite(Image.new("RGBA", image.size, "black"), image)
                image = image.convert("L")
    except UnidentifiedImageError:
        raise Error(f"{path}: not an image; supported formats: {', '.join(FORMATS)}") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise Error(f"{path}: more than {Image.MAX_IMAGE_PIXELS} pixels; 28x28 is enough") from None
    except Exception as error:  # decoders raise many types for damaged files
        raise Error(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    if image.size != (28, 28):
        log.say(f"{path}: resized from {image.width}x{image.height} to 28x28")
        image = image.resize((28, 28))
    return np.asarray(image)[None]


def classify(trained: Trained, paths: Sequence[str], images: Sequence[np.ndarray]) -> str:
    """Format the most probable classes of each image, uint8 (1, 28, 28), and their probabilities, for a terminal."""
    classes = datasets.CLASSES[trained.settings.dataset]
    lines = []
    probabilities = nd.softmax(nd.array(scores(trained, np.stack(images)))).asnumpy()
    for path, row in zip(paths, probabilities):
        best = row.argsort()[::-1][:TOP]
        lines.append(f"{path}: " + ", ".join(f"{classes[i]} {row[i]:.4f}" for i in best))
    return "\n".join(lines)


def exported_files(prefix: str) -> tuple[Path, Path]:
    """The paths of an export: PREFIX-symbol.json and PREFIX-0000.params.

    Raises UsageError if one of them exists, or if the prefix has no name or names a folder that does not exist.
    """
    if os.path.basename(prefix) in ("", ".", ".."):
        raise UsageError(f"export={prefix}: must end with a name, such as {Path(prefix) / 'lenet'}")
    if not Path(prefix).parent.is_dir():
        raise UsageError(f"export={prefix}: folder {Path(prefix).parent} does not exist")
    files = Path(f"{prefix}-symbol.json"), Path(f"{prefix}-0000.params")
    for file in files:
        if os.path.lexists(file):
            raise UsageError(f"export={prefix}: {file} already exists; use another prefix")
    return files


def export(trained: Trained, prefix: str, images: np.ndarray) -> str:
    """Export the network, without tuning, to `exported_files(prefix)`. Returns a two-line report.

    First loads the files with SymbolBlock.imports and compares their scores for images, uint8 (n, 1, 28, 28), with the
    run's. Raises UsageError as `exported_files` does, or if the network is not hybrid; Error if the files cannot be
    written or if the scores differ by more than rounding. If it raises, it leaves no file.
    """
    symbol, params = exported_files(prefix)
    images, ctx = images[:CHECKED], trained.replicas.ctx[0]
    plain = implementation("highlevel").Replicas([mx.cpu()], trained.settings, tune=False)
    if not isinstance(plain.net, gluon.HybridBlock):
        raise UsageError(f"export={prefix}: {trained.settings.model} is not a HybridBlock, so it cannot be exported")
    plain.load_state_dict(trained.parameters)
    expected = scores(trained, images)
    try:
        with tempfile.TemporaryDirectory(prefix=".export-", dir=symbol.parent) as folder:
            written = f"{folder}/net-symbol.json", f"{folder}/net-0000.params"
            plain.net.export(f"{folder}/net")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # "Cannot decide type", because the graph leaves its input's type open
                block = gluon.SymbolBlock.imports(written[0], ["data"], written[1], ctx)
            found = np.concatenate([block(X.as_in_context(ctx)).asnumpy() for X in _batches(trained, images)])
            difference = np.abs(found - expected).max()
            if not difference <= ROUNDING * np.abs(expected).max():  # true for nan too
                raise Error(
                    f"export={prefix}: scores of the exported network differ from the run's by {difference:.2g}; files "
                    "removed"
                )
            os.replace(written[0], symbol)
            os.replace(written[1], params)
    except (OSError, mx.MXNetError) as error:
        symbol.unlink(missing_ok=True)
        reason = getattr(error, "strerror", None) or str(error).strip().splitlines()[-1]
        raise Error(f"export={prefix}: cannot be written ({reason})") from None
    return (
        f"exported to {symbol} and {params}; on {len(images)} test images, its scores (at most "
        f"{np.abs(expected).max():.3g}) differ from the run's by at most {difference:.2g}\n"
        f"load it with gluon.SymbolBlock.imports('{symbol}', ['data'], '{params}')"
    )
