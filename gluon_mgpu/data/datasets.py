"""Finds, downloads, verifies and reads the data sets, as uint8 arrays in memory.

If the user names a folder, only that folder is searched. Otherwise, the user's cache, MXNet's folder and the system's
folder are searched; if none of them has the data set, it is downloaded into the cache or unpacked there from Debian's
package. The SHA-256 of each decompressed file is checked.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import secrets
import shutil
import sys
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import platformdirs

from gluon_mgpu.data import own_data
from gluon_mgpu.support import log, subprocesses
from gluon_mgpu.support.errors import Error, UsageError, check_whole

if TYPE_CHECKING:
    from gluon_mgpu.data.batches import DataIter

    # Where files come from: (their names, a folder to write to). Old programs' Python 3.8 cannot evaluate this.
    Source = Callable[[list[str], Path], Iterator[Path]]

DATASETS = ("fashion-mnist", "mnist", "synthetic", "own")
IMAGE_SHAPE = (1, 28, 28)  # of the built-in data sets: channels, height, width
LARGEST = 60000  # number of training examples in mnist and fashion-mnist, and the limit for synthetic
FASHION = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
DIGITS = tuple("0123456789")
CLASSES = {"fashion-mnist": FASHION, "mnist": DIGITS, "synthetic": DIGITS}  # class names, in the order of the labels

# Hashes of the decompressed files; the gzip files differ between mirrors.
SHA256 = {
    "fashion-mnist": {
        "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    },
    "mnist": {
        "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    },
}
MIRRORS = {
    "fashion-mnist": (
        "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
        "https://storage.googleapis.com/tensorflow/tf-keras-datasets/",
        "https://apache-mxnet.s3-accelerate.dualstack.amazonaws.com/gluon/dataset/fashion-mnist/",
    ),
    "mnist": (
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
        "https://apache-mxnet.s3-accelerate.dualstack.amazonaws.com/gluon/dataset/mnist/",
    ),
}
MOST = 64 << 20  # maximum number of bytes to read from a file; the largest of these files is 47 MB
TIMEOUT = (4, 8)  # maximum seconds to connect, and to wait for more data
SYSTEM_FOLDER = Path("/usr/share/datasets")
PACKAGES = {"fashion-mnist": "dataset-fashion-mnist"}  # packages in Debian and Ubuntu
APT_SECONDS = 300


class Dataset(NamedTuple):
    """In the built-in data sets, images are uint8 (n, 1, 28, 28), 0 to 255, and labels are uint8 (n,), 0 to 9. For your
    own data, see `own`."""

    name: str
    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    source: str  # the folder that contains the files, "synthetic, seed 0", or "arrays"

    @property
    def classes(self) -> int:
        """The number of classes; for your own data, the largest label plus 1."""
        largest = max(self.train_labels.max(), self.test_labels.max())
        return len(CLASSES.get(self.name, range(1 + int(largest))))

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(channels, height, width)"""
        _, channels, height, width = self.train_images.shape
        return channels, height, width

    def checked(self) -> Dataset:
        """This data set with its arrays as `own` returns them, because a program may have made or changed it itself.

        Exceptions: see `own`.
        """
        data = Dataset(self.name, *own_data.checked(*self[1:5]), self.source)
        for name, labels in (("train_labels", data.train_labels), ("test_labels", data.test_labels)):
            if labels.max() >= data.classes:
                advice = f"{self.name} has {data.classes} classes, counted from 0; pass other data as datasets.own"
                raise UsageError(name, int(labels.max()), advice)
        return data

    def first(self, limit: int | None) -> Dataset:
        """The first `limit` training examples and the first max(limit // 6, 100) test examples; None: all.

        Raises UsageError if there are fewer training examples.
        """
        if limit is None:
            return self
        advice = f"{self.name} has {len(self.train_images)} training examples"
        check_whole("limit", limit, 1, len(self.train_images), advice)
        tests = max(limit // 6, 100)
        train = self.train_images[:limit], self.train_labels[:limit]
        return Dataset(self.name, *train, self.test_images[:tests], self.test_labels[:tests], self.source)

    def digest(self) -> str:
        """SHA-256 of the arrays' shapes, types and values, in hexadecimal. The labels' type does not matter."""
        digest = hashlib.sha256()
        for array in self[1:5]:
            same = array.astype(np.int64) if array.ndim == 1 else array
            digest.update(f"{same.dtype.str} {same.shape}".encode())
            digest.update(np.ascontiguousarray(same).data)
        return digest.hexdigest()

    def described(self) -> dict[str, Any]:
        """What a run records of its data."""
        return {
            "data": self.source,
            "data_digest": self.digest(),
            "image_shape": self.image_shape,
            "image_dtype": str(self.train_images.dtype),
            "classes": self.classes,
        }

    def checksum(self) -> str:
        """CRC-32 of all arrays, in hexadecimal, which runs of earlier versions record instead of `digest`."""
        checksum = 0
        for array in self[1:5]:
            checksum = zlib.crc32(array.data, checksum)
        return f"{checksum:08x}"


def load(name: str, data_dir: str | Path | None = None, limit: int | None = None, seed: int | None = 0) -> Dataset:
    """Load the data set `name`, one of DATASETS; download it if this machine does not have it.

    data_dir: a folder that contains NAME/ or the four files; None: see `find`; for "own", see `own_data.read`.
    limit: see `Dataset.first`; for "synthetic", None means LARGEST. seed: used only for "synthetic"; None means 0.
    Raises UsageError if the name is unknown, limit is out of range, or data_dir does not contain the data set; Error if
    the data is damaged or cannot be downloaded.
    """
    if seed is not None:
        check_whole("seed", seed, 0)
    if data_dir is not None and not isinstance(data_dir, (str, os.PathLike)):
        raise UsageError("data_dir", data_dir, "must be the path of a folder")
    if name not in DATASETS:
        raise UsageError("dataset", name, f"must be one of {', '.join(DATASETS)}")
    if name == "synthetic":
        if data_dir is not None:
            raise UsageError("data_dir", data_dir, "synthetic data needs no files; omit this setting")
        train_size = LARGEST if limit is None else limit
        check_whole("limit", train_size, 1, LARGEST, f"must be 1 to {LARGEST} for synthetic")
        return synthetic(train_size, max(train_size // 6, 100), seed or 0)
    if name == "own":
        source = "data_dir" if data_dir else "GLUON_MGPU_DATA"
        data_dir = data_dir or os.environ.get("GLUON_MGPU_DATA")
        if not data_dir:
            raise UsageError("data_dir", None, f"needed for your own data: a folder with {own_data.NEEDED}")
        try:
            return Dataset(name, *own_data.read(data_dir), str(data_dir)).first(limit)
        except UsageError as error:
            raise UsageError(source if error.name == "data_dir" else error.name, error.value, error.advice) from None
    return read(find(name, data_dir) or fetch(name), name).first(limit)


def own(
    train_images: np.ndarray,
    train_labels: np.ndarray,
    test_images: np.ndarray,
    test_labels: np.ndarray,
) -> Dataset:
    """Make a data set of your own arrays: `train(dataset=datasets.own(...))`.

    images: (n, height, width), (n, channels, height, width) or (n, height, width, channels); the last with more than 4
    rows and columns, and 1, 3 or 4 channels. Training divides uint8 by 255, and uses floating-point numbers as they
    are. labels: whole numbers from 0, (n,) or (n, 1).
    Raises UsageError if an array has an invalid shape or type, or if two arrays do not match.
    """
    return Dataset("own", *own_data.checked(train_images, train_labels, test_images, test_labels), "arrays")


def load_fashion_mnist(batch_size: int, seed: int | None = None) -> tuple[DataIter, DataIter]:
    """Load Fashion-MNIST as two iterators over batches, for training and for testing.

    Each pass over the first one is an epoch in a new random order, which depends on seed; None: a random seed. Batches
    are X float32 (n, 1, 28, 28) in [0, 1] and y float32 (n,). Exceptions: see `load`.
    """
    from gluon_mgpu.data.batches import DataIter  # imports mxnet

    check_whole("batch_size", batch_size, 1)
    data = load("fashion-mnist", seed=seed)
    seed = secrets.randbelow(2**31) if seed is None else seed
    train_iter = DataIter(data.train_images, data.train_labels, batch_size, seed)
    return train_iter, DataIter(data.test_images, data.test_labels, batch_size)


def find(name: str, data_dir: str | Path | None = None) -> Path | None:
    """Find the first folder that contains all four files of data set `name`. Returns None if no folder does.

    If data_dir or the environment variable GLUON_MGPU_DATA names a folder, searches only that folder, and raises
    UsageError if it does not contain the files. Otherwise, searches the user's cache, MXNet's folder and SYSTEM_FOLDER.
    """
    source = "data_dir"
    if data_dir is None:
        source, data_dir = "GLUON_MGPU_DATA", os.environ.get("GLUON_MGPU_DATA")
        if not data_dir:
            mxnet_home = Path(os.environ.get("MXNET_HOME") or "~/.mxnet").expanduser()
            places = (cache_folder(name), mxnet_home / "datasets" / name, SYSTEM_FOLDER / name)
            return next((place for place in places if not _missing(place, name)), None)
    folder = Path(data_dir).expanduser()
    if not os.path.isdir(folder):  # Path.is_dir fails for a name that is too long
        raise UsageError(source, data_dir, "the folder does not exist")
    for place in (folder / name, folder):
        if not _missing(place, name):
            return place
    names = ", ".join(SHA256[name])
    advice = f"does not contain {name}: it needs a folder {name} or the files {names} (plain or .gz)"
    raise UsageError(source, data_dir, advice)


def fetch(name: str) -> Path:
    """Download data set `name` into the user's cache, or unpack it there from Debian's package. Returns the folder.

    If GLUON_MGPU_MIRROR is set, files are downloaded from that URL only. Each file appears complete or not at all, so
    several processes may call this at the same time. If all sources fail, raises Error with all reasons.
    """
    folder, failures, advice = cache_folder(name), [], ""
    mirror = os.environ.get("GLUON_MGPU_MIRROR")
    urls = [mirror] if mirror else MIRRORS[name]
    hosts = [url.split("//")[-1].split("/")[0].split("@")[-1] for url in urls]
    sources: list[tuple[str, Source]] = [(host, partial(_download, url)) for host, url in zip(hosts, urls)]
    if name in PACKAGES:
        sources.append(("apt-get", partial(_unpack, PACKAGES[name], name)))
        advice = f", or run `apt install {PACKAGES[name]}`"
    log.say(f"downloading {name} into {folder}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as temp:
            for title, source in sources:
                try:
                    for path in source(_missing(folder, name), Path(temp)):
                        _content(path, name)
                        os.replace(path, folder / path.name)
                    return folder
                except Error as error:
                    failures.append(f"{title}: {error}")
    except OSError as error:
        raise Error(f"cannot write to {folder} ({error.strerror or error}); change XDG_CACHE_HOME") from error
    reasons = "; ".join(failures)
    raise Error(f"cannot download {name} ({reasons}); set GLUON_MGPU_DATA to a folder that contains it{advice}")


def read(folder: Path, name: str) -> Dataset:
    """Read data set `name` from the four files in `folder`, as read-only arrays. Raises Error if a file is damaged."""
    arrays = [_parse_idx(_content(_path(folder, file), name)) for file in SHA256[name]]
    return Dataset(name, arrays[0][:, None], arrays[1], arrays[2][:, None], arrays[3], str(folder))


def _parse_idx(content: bytes) -> np.ndarray:
    """Parse an IDX file of unsigned bytes: two zeros, the type 8, the number of dimensions, their sizes."""
    start = 4 + 4 * content[3]
    return np.frombuffer(content, np.uint8, offset=start).reshape(np.frombuffer(content[4:start], ">u4"))


def content(name: str, file: str, data_dir: str | Path | None = None) -> bytes:
    """The decompressed content of one of the files in SHA256[name]. data_dir, exceptions: see `load`."""
    return _content(_path(find(name, data_dir) or fetch(name), file), name)


def synthetic(train_size: int, test_size: int, seed: int = 0) -> Dataset:
    """Generate a data set with ten equally frequent classes. The seed determines its content.

    Each class has a smooth random picture. The examples of a class are copies of its picture: shifted by up to 2
    pixels, brighter or darker, and with noise. Brightness and contrast match Fashion-MNIST, so LeNet can train on both
    data sets with the same learning rate. Raises UsageError for a number that is not whole, or below 0.
    """
    for name, value in (("train_size", train_size), ("test_size", test_size), ("seed", seed)):
        check_whole(name, value, 0)
    rng = np.random.default_rng(seed)
    waves = np.cos(np.pi * np.outer(np.arange(5), np.arange(32) + 0.5) / 32)
    strengths = rng.standard_normal((10, 5, 5))
    strengths[:, 0, 0] = 0  # the mean brightness is set below
    pictures = np.einsum("cij,iy,jx->cyx", strengths, waves, waves)
    pictures /= pictures.std((1, 2), keepdims=True)
    pictures = 0.6 * pictures + np.linspace(-0.5, 0.8, 10)[:, None, None]
    pictures = (255 * np.clip(pictures, 0, 1)).astype(np.float32)
    shifted = np.lib.stride_tricks.sliding_window_view(pictures, (1, 28, 28))[:, :, :, 0]  # class, y, x, 28, 28

    def draw(size: int) -> tuple[np.ndarray, np.ndarray]:
        labels = rng.permutation(np.arange(size, dtype=np.uint32) % 10).astype(np.uint8)
        images = np.empty((size, 1, 28, 28), np.uint8)
        for start in range(0, size, 4096):  # in blocks, to limit the memory used by float32 copies
            block = labels[start : start + 4096]
            y, x = rng.integers(0, 5, (2, len(block)))
            drawn = shifted[block, y, x]
            drawn *= rng.uniform(0.6, 1.2, (len(block), 1, 1)).astype(np.float32)
            drawn += 25 * rng.standard_normal(drawn.shape, np.float32)
            images[start : start + 4096, 0] = np.clip(drawn, 0, 255, out=drawn)
        return images, labels

    return Dataset("synthetic", *draw(train_size), *draw(test_size), f"synthetic, seed {seed}")


def cache_folder(name: str) -> Path:
    """The folder for downloads of data set `name`. The environment variable XDG_CACHE_HOME changes its location."""
    return platformdirs.user_cache_path("gluon_mgpu") / name


def _path(folder: Path, file: str) -> Path:
    """The path of a file that may be compressed, or missing."""
    compressed = folder / f"{file}.gz"
    return compressed if os.path.isfile(compressed) else folder / file


def _missing(folder: Path, name: str) -> list[str]:
    return [file for file in SHA256[name] if not os.path.isfile(_path(folder, file))]


def _content(path: Path, name: str) -> bytes:
    """Read and decompress a file of data set `name`. Raises Error if it cannot be read or its SHA-256 is wrong."""
    try:
        with open(path, "rb") as file:
            is_compressed = file.peek(2)[:2] == b"\x1f\x8b"
            content = (gzip.GzipFile(fileobj=file) if is_compressed else file).read(MOST)
    except (OSError, EOFError, zlib.error) as error:  # a bad gzip file raises an OSError without strerror
        raise Error(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error}); replace it") from error
    if hashlib.sha256(content).hexdigest() != SHA256[name][path.name.replace(".gz", "")]:
        raise Error(f"{path}: damaged, or not from {name}: its SHA-256 is wrong; replace it")
    return content


def _download(mirror: str, names: list[str], temp: Path) -> Iterator[Path]:
    """Download compressed files into `temp` one by one, and yield their paths. Raises Error if a download fails."""
    with warnings.catch_warnings():  # imported here, because few runs download
        warnings.simplefilter("ignore")  # in Jupyter without ipywidgets, tqdm warns that it falls back to text
        import pooch
        import requests
    download = pooch.HTTPDownloader(progressbar=sys.stderr.isatty(), timeout=TIMEOUT)
    for name in names:
        path = temp / f"{name}.gz"
        try:
            download(f"{mirror.rstrip('/')}/{path.name}", str(path), None)
        except requests.HTTPError as error:
            raise Error(f"HTTP {error.response.status_code}") from None
        except requests.ConnectionError:
            raise Error("no connection") from None
        except (requests.RequestException, ValueError) as error:  # ValueError: not a valid URL
            raise Error(type(error).__name__) from None
        yield path


def _unpack(package: str, dataset: str, names: list[str], temp: Path) -> Iterator[Path]:
    """Unpack a Debian package in `temp`, without root, and yield the files' paths. Raises Error if a command fails."""
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise Error("not installed")
    log.say(f"could not download {dataset} from any mirror: downloading the package {package} with apt-get")
    (temp / "lists" / "partial").mkdir(parents=True)
    (temp / "cache" / "archives" / "partial").mkdir(parents=True)
    # apt's own folders belong to root. When root runs apt, apt by default downloads as a user who cannot access `temp`.
    settings = [f"Dir::State::Lists={temp}/lists", f"Dir::Cache={temp}/cache", "Debug::NoLocking=1"]
    settings += ["APT::Sandbox::User=root", "Acquire::http::Timeout=10", "Acquire::https::Timeout=10"]
    apt = ["apt-get", "-qq", *(f"-o{setting}" for setting in settings)]

    def run(*command: str) -> None:
        subprocesses.raise_for_status(command[0], subprocesses.run(command, seconds=APT_SECONDS, folder=temp))

    with suppress(Error):  # `update` fails if any apt source fails; `download` fails only if its own source failed
        run(*apt, "update")
    run(*apt, "download", package)
    run("dpkg-deb", "-x", *map(str, temp.glob("*.deb")), ".")
    yield from (_path(temp / "usr/share/datasets" / dataset, name) for name in names)
