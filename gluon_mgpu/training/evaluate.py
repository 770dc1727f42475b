"""What a run has learned: its accuracy and confusion table, the classes of images, its net as Gluon's own files.

Reads the folder that `train.py --out` left and changes nothing in it, so that the run may be training on meanwhile.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from gluon_mgpu.runtime import devices, engine
from gluon_mgpu.runtime.errors import Error, UsageError
from gluon_mgpu.training import datasets, loop, records
from gluon_mgpu.training import tuning as blocks
from gluon_mgpu.training.settings import Settings

engine.configure()

import mxnet as mx  # noqa: E402
from mxnet import gluon, nd  # noqa: E402

FORMATS = ("PNG", "JPEG", "GIF", "BMP", "WEBP", "PPM")  # Pillow would run Ghostscript for EPS
CHECKED = 1000  # test images at most that an exported net is checked on
ROUNDING = 1e-4  # of the largest score: how far the scores of an exported net may be from the run's
TOP = 3  # classes named for an image


class Trained(NamedTuple):
    """A run's network with the parameters of its checkpoint."""

    replicas: loop.Replicas
    settings: Settings
    parameters: dict[str, np.ndarray]
    title: str  # what it is: "runs/first: lenet (scratch) after 4 epochs, on [cpu(0)]"


def load(
    folder: str | Path, impl: str | None = None, gpus: int | str | Sequence[int] = 1, device: str = "auto"
) -> Trained:
    """The network of the run in `folder`, as `Trained`.

    impl: "scratch" or "highlevel"; None: the run's own. gpus, device: as in `devices.contexts`.
    Raises UsageError where no run is and for a network that impl does not have, Error for a run without a checkpoint
    yet, or with one that is cut off, altered, or of another network or version.
    """
    arrays, config, settings, position = records.last(folder)
    if arrays is None:
        raise Error(
            f"{folder}: the run has no checkpoint yet; it leaves one after its first epoch, or on Ctrl-C; where it was "
            f"killed, train.py --resume {folder} goes on"
        )
    impl = impl or config["impl"]
    if impl == "scratch" and settings.model != "lenet":
        raise UsageError(f"--impl scratch: it has lenet only, and the run's {settings.model} is highlevel's")
    ctx = devices.contexts(gpus, device)
    options = {"hybridize": config.get("hybridize", True)} if impl == "highlevel" else {}
    # shares were for the run's devices; without momentum the replicas have no velocities to load
    settings = replace(settings, shares=None, momentum=0.0)
    replicas = importlib.import_module(f"gluon_mgpu.{impl}").Replicas(ctx, settings, **options)
    parameters = {name: array for name, array in arrays.items() if not name.startswith(records.VELOCITY)}
    expected = {name: array.shape for name, array in replicas.parameters().items()}
    if {name: array.shape for name, array in parameters.items()} != expected:
        raise Error(f"{folder}: its checkpoint holds the parameters of another network than {settings.model}")
    replicas.load(parameters, {})
    return Trained(replicas, settings, parameters, f"{folder}: {settings.model} ({impl}) after {position}, on {ctx}")


def held_out(settings: Settings, data_dir: str | Path | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The run's test set: images uint8 (n, 1, 28, 28), labels uint8 (n,). data_dir, errors: see `datasets.load`."""
    data = datasets.load(settings.dataset, data_dir, settings.limit, settings.seed)
    return data.test_images, data.test_labels


def scores(trained: Trained, images: np.ndarray) -> np.ndarray:
    """The network's scores (n, 10) of images, uint8 (n, 1, 28, 28), in batches as the run's own."""
    test_iter = loop.batches(images, np.zeros(len(images)), trained.settings.batch_size)
    return np.concatenate(list(loop.read_behind(trained.replicas.predict(X) for X, _ in test_iter)))


def report(trained: Trained, images: np.ndarray, labels: np.ndarray) -> str:
    """Lines for a terminal: the accuracy on a test set and the confusion table."""
    classes = datasets.CLASSES[trained.settings.dataset]
    counts = confusion(labels, scores(trained, images).argmax(axis=1), len(classes))
    right, total = counts.trace(), counts.sum()
    return "\n".join(
        [trained.title, f"test accuracy: {right / total:.4f} ({right}/{total})", "", table(counts, classes)]
    )


def confusion(labels: np.ndarray, predicted: np.ndarray, classes: int) -> np.ndarray:
    """How often class i was taken for class j: counts (classes, classes) from two vectors (n,) of whole numbers."""
    counts = np.zeros((classes, classes), int)
    np.add.at(counts, (labels, predicted), 1)
    return counts


def table(counts: np.ndarray, classes: Sequence[str]) -> str:
    """Confusion counts (n, n) as text, with the names of the n classes and the recall of each: right / examples.

    A count of 0 is a dot, the recall of a class without examples a dash.
    """
    cells = [[str(count or ".") for count in row] for row in counts]
    heads = [name.split() for name in classes]  # two words stand one above the other
    widths = [max(map(len, [*head, *column])) + 2 for head, column in zip(heads, zip(*cells))]
    margin = max(map(len, classes))

    def line(name: str, texts: Sequence[str], recall: str) -> str:
        return name.ljust(margin) + "".join(text.rjust(width) for text, width in zip(texts, widths)) + recall.rjust(8)

    lines = ["rows: true class; columns: predicted class"]
    if max(map(len, heads)) > 1:
        lines.append(line("", [head[0] if len(head) > 1 else "" for head in heads], "").rstrip())
    lines.append(line("", [head[-1] for head in heads], "recall"))
    for i, name in enumerate(classes):
        examples = counts[i].sum()
        lines.append(line(name, cells[i], f"{counts[i, i] / examples:.3f}" if examples else "-"))
    return "\n".join(lines)


def read_image(path: str | Path) -> np.ndarray:
    """An image file as uint8 (1, 28, 28), in shades of grey; a line on standard error says when it was resized.

    What is transparent becomes black, the data's ground. Raises Error for a file that is not there, or that is no whole
    image of one of FORMATS, and for one of more pixels than Pillow holds safe.
    """
    advice = f"give a file of one of {', '.join(FORMATS)}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path, formats=FORMATS) as image:
                image = ImageOps.exif_transpose(image)  # decodes it too
                if image.mode.startswith("I"):  # 16 bits, which Pillow would clip, not scale, to 8
                    image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
                if image.has_transparency_data:
                    image = image.convert("RGBA")
                    image = Image.alpha_composite(Image.new("RGBA", image.size, "black"), image)
                image = image.convert("L")
    except UnidentifiedImageError:
        raise Error(f"{path} is no image that can be read: {advice}") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise Error(f"{path} has more than {Image.MAX_IMAGE_PIXELS} pixels: make it smaller, 28x28 is enough") from None
    except Exception as error:  # decoders raise many kinds for damaged files
        raise Error(f"{path} cannot be read ({getattr(error, 'strerror', None) or error}): {advice}") from None
    if image.size != (28, 28):
        print(f"gluon_mgpu: {path}: resized from {image.width}x{image.height} to 28x28", file=sys.stderr)
        image = image.resize((28, 28))
    return np.asarray(image)[None]


def classify(trained: Trained, paths: Sequence[str], images: Sequence[np.ndarray]) -> str:
    """Lines for a terminal: for each image, uint8 (1, 28, 28), its most probable classes with their probabilities."""
    classes = datasets.CLASSES[trained.settings.dataset]
    lines = []
    for path, row in zip(paths, softmax(scores(trained, np.stack(images)))):
        best = row.argsort()[::-1][:TOP]
        lines.append(f"{path}: " + ", ".join(f"{classes[i]} {row[i]:.4f}" for i in best))
    return "\n".join(lines)


def softmax(scores: np.ndarray) -> np.ndarray:
    """Scores (n, classes) to probabilities, float64."""
    exponents = np.exp(scores.astype(np.float64) - scores.max(axis=1, keepdims=True))
    return exponents / exponents.sum(axis=1, keepdims=True)


def exported_files(prefix: str) -> tuple[Path, Path]:
    """The paths of the symbol and of the parameters that Gluon gives an export, none of which may exist yet.

    Raises UsageError for one that does, and for a prefix without a name or in a folder that is not there.
    """
    if os.path.basename(prefix) in ("", ".", ".."):
        raise UsageError(f"--export {prefix}: give what the files' names begin with, such as {Path(prefix) / 'lenet'}")
    if not Path(prefix).parent.is_dir():
        raise UsageError(f"--export {prefix}: there is no folder {Path(prefix).parent}")
    files = Path(f"{prefix}-symbol.json"), Path(f"{prefix}-0000.params")
    for file in files:
        if os.path.lexists(file):
            raise UsageError(f"--export {prefix}: {file} exists already; give another prefix")
    return files


def export(trained: Trained, prefix: str, images: np.ndarray) -> str:
    """Leave Gluon's PREFIX-symbol.json and PREFIX-0000.params, both or none; returns two lines that say so.

    The files are first loaded back with SymbolBlock.imports, and their scores of images, uint8 (n, 1, 28, 28), compared
    with the run's. Raises UsageError as `exported_files`, Error for files that cannot be written or whose scores differ
    by more than rounding.
    """
    from gluon_mgpu import highlevel

    files = exported_files(prefix)
    images, ctx = images[:CHECKED], trained.replicas.ctx[0]
    with blocks.as_written():
        net = highlevel.Replicas([mx.cpu()], trained.settings, hybridize=False)
        net.load(trained.parameters, {})
        net.net.hybridize()
        net.net(nd.zeros((1, 1, 28, 28)))  # makes the graph that is exported
    expected = scores(trained, images)
    try:
        with tempfile.TemporaryDirectory(prefix=".export-", dir=files[0].parent) as folder:
            net.net.export(f"{folder}/net")
            made = f"{folder}/net-symbol.json", f"{folder}/net-0000.params"
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # "Cannot decide type": the symbol leaves the input's open
                block = gluon.SymbolBlock.imports(made[0], ["data"], made[1], ctx=ctx)
            test_iter = loop.batches(images, np.zeros(len(images)), trained.settings.batch_size)
            found = np.concatenate([block(X.as_in_context(ctx)).asnumpy() for X, _ in test_iter])
            difference = np.abs(found - expected).max()
            if not difference <= ROUNDING * np.abs(expected).max():  # nan is no number's equal
                raise Error(
                    f"--export {prefix}: scores of the exported net differ by {difference:.2g}: nothing is left"
                )
            try:
                for file, path in zip(made, files):
                    os.replace(file, path)
            except BaseException:
                for path in files:
                    path.unlink(missing_ok=True)
                raise
    except (OSError, mx.MXNetError) as error:
        reason = getattr(error, "strerror", None) or str(error).strip().splitlines()[-1]
        raise Error(f"--export {prefix}: cannot be written ({reason}): give another prefix") from None
    return (
        f"exported to {files[0]} and {files[1]}: on {len(images)} test images, scores of up to "
        f"{np.abs(expected).max():.3g} differ from the run's by at most {difference:.2g}\n"
        f"load: gluon.SymbolBlock.imports('{files[0]}', ['data'], '{files[1]}')"
    )
