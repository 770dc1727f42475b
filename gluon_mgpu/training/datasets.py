"""Find, fetch, verify and read the data sets, as uint8 arrays in memory.

Real data is looked for in the folder the user named, the user's cache, MXNet's folder and the system's; then it
is downloaded into the cache, or taken from Debian's package. Whatever its way, a file is used only when the SHA-256
of its decompressed content is the known one.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pooch
import requests

from gluon_mgpu.runtime.errors import Error, UsageError

NAMES = ("fashion-mnist", "mnist", "synthetic")
FASHION = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
DIGITS = tuple("0123456789")
CLASSES = {"fashion-mnist": FASHION, "mnist": DIGITS, "synthetic": DIGITS}  # names, in the order of the labels

# Of the decompressed files: the gzip bytes differ from mirror to mirror.
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
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "https://storage.googleapis.com/tensorflow/tf-keras-datasets/",
        "https://apache-mxnet.s3-accelerate.dualstack.amazonaws.com/gluon/dataset/fashion-mnist/",
    ),
    "mnist": (
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
        "https://apache-mxnet.s3-accelerate.dualstack.amazonaws.com/gluon/dataset/mnist/",
    ),
}
TIMEOUT = (4, 8)  # seconds to connect, seconds without a byte
SYSTEM_FOLDER = Path("/usr/share/datasets")
PACKAGES = {"fashion-mnist": "dataset-fashion-mnist"}
APT_SECONDS = 300


class Dataset(NamedTuple):
    """Images are uint8 (n, 1, 28, 28), 0 to 255; labels uint8 (n,), 0 to 9. Arrays read from files are read-only."""

    name: str
    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    source: str  # the folder it was read from, or "synthetic, seed 0"

    def checksum(self) -> str:
        """CRC-32 of all arrays, in hexadecimal."""
        checksum = 0
        for array in self[1:5]:
            checksum = zlib.crc32(array.data, checksum)
        return f"{checksum:08x}"


def load(name: str, data_dir: str | Path | None = None, limit: int | None = None, seed: int | None = 0) -> Dataset:
    """Return the Dataset called `name`, one of NAMES, fetching it into the user's cache where it is nowhere yet.

    data_dir (else GLUON_MGPU_DATA) is a folder that holds NAME/ or the four files. limit keeps the first `limit`
    training and max(limit // 6, 100) test examples; of "synthetic" it is the size (60,000). seed, an integer from 0
    up, is for "synthetic" only (None is 0). Raises UsageError for an unknown name or a limit out of range, Error where
    the data cannot be had or is not the known one.
    """
    if name not in NAMES:
        raise UsageError(f"unknown data set {name!r}: choose one of {', '.join(NAMES)}")
    if limit is not None and limit < 1:
        raise UsageError(f"limit {limit} leaves nothing to train on: give 1 or more, or no limit")
    if name == "synthetic":
        train_size = 60000 if limit is None else limit
        return synthetic(train_size, max(train_size // 6, 100), seed or 0)
    data = read(find(name, data_dir) or fetch(name), name)
    if limit is None:
        return data
    if limit > len(data.train_images):
        raise UsageError(f"limit {limit}: {name} has {len(data.train_images)} examples; give as many at most")
    test_limit = max(limit // 6, 100)
    return data._replace(
        train_images=data.train_images[:limit],
        train_labels=data.train_labels[:limit],
        test_images=data.test_images[:test_limit],
        test_labels=data.test_labels[:test_limit],
    )


def find(name: str, data_dir: str | Path | None = None) -> Path | None:
    """Return the first folder that holds all four files of data set `name`, or None.

    Raises Error if the folder that data_dir or GLUON_MGPU_DATA names does not: a user's word is not passed over.
    """
    given = (os.environ.get("GLUON_MGPU_DATA") or None) if data_dir is None else data_dir
    if given is not None:
        given = Path(given).expanduser()
        places: tuple[Path, ...] = given / name, given
    else:
        mxnet_home = Path(os.environ.get("MXNET_HOME") or "~/.mxnet").expanduser()
        places = cache_folder(name), mxnet_home / "datasets" / name, SYSTEM_FOLDER / name
    for folder in places:
        if not _missing(folder, name):
            return folder
    if given is not None:
        expected = ", ".join(SHA256[name])
        raise Error(f"no {name} in {given}: expected a folder {name}/ there, or these files, plain or .gz: {expected}")
    return None


def fetch(name: str) -> Path:
    """Put the files of data set `name` into the user's cache, each whole or not at all, and return that folder.

    GLUON_MGPU_MIRROR, a URL that FILE.gz is appended to, takes the place of the known mirrors. Several processes may
    fetch at once. Raises Error, with why each way failed, if there is none left.
    """
    folder = cache_folder(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as temp:
            failures = _download(name, folder, Path(temp))
            if failures and name in PACKAGES:
                problem = _unpack_package(name, folder, Path(temp))
                failures = failures + [problem] if problem else []
    except OSError as error:
        why = error.strerror or error
        raise Error(f"cannot write to {folder} ({why}): make room there, or set XDG_CACHE_HOME") from error
    if failures:
        package = f", or run `apt install {PACKAGES[name]}`" if name in PACKAGES else ""
        raise Error(
            f"cannot fetch {name} ({'; '.join(failures)}): go online, or name a folder that has it with --data-dir or "
            f"GLUON_MGPU_DATA{package}"
        )
    return folder


def read(folder: Path, name: str) -> Dataset:
    """Return the Dataset `name` from the four files in `folder`; Error if one of them is not the known one."""
    arrays = []
    for file in SHA256[name]:
        raw = _content(_locate(folder, file) or folder / file, name)
        dimensions = raw[3]
        shape = np.frombuffer(raw, ">u4", dimensions, offset=4)
        array = np.frombuffer(raw, np.uint8, offset=4 + 4 * dimensions)
        arrays.append(array.reshape(shape[0], 1, 28, 28) if dimensions == 3 else array)
    return Dataset(name, arrays[0], arrays[1], arrays[2], arrays[3], str(folder))


def synthetic(train_size: int, test_size: int, seed: int = 0) -> Dataset:
    """Return a Dataset of any size, the same for the same seed, with the ten classes as equally frequent as can be.

    A class is one smooth random picture; its examples show it shifted by up to 2 pixels, brighter or darker, under
    noise. As bright and as contrasted as Fashion-MNIST, so that a LeNet learns it at the same learning rate.
    """
    rng = np.random.default_rng(seed)
    waves = np.cos(np.pi * np.outer(np.arange(5), np.arange(32) + 0.5) / 32)
    strengths = rng.standard_normal((10, 5, 5))
    strengths[:, 0, 0] = 0  # the mean: set below, class by class
    pictures = np.einsum("cij,iy,jx->cyx", strengths, waves, waves)
    pictures /= pictures.std((1, 2), keepdims=True)
    pictures = 0.6 * pictures + np.linspace(-0.5, 0.8, 10)[:, None, None]
    pictures = (255 * np.clip(pictures, 0, 1)).astype(np.float32)
    shifted = np.lib.stride_tricks.sliding_window_view(pictures, (1, 28, 28))[:, :, :, 0]  # class, y, x, 28, 28

    def draw(size: int) -> tuple[np.ndarray, np.ndarray]:
        labels = rng.permutation(np.arange(size, dtype=np.uint32) % 10).astype(np.uint8)
        images = np.empty((size, 1, 28, 28), np.uint8)
        for start in range(0, size, 4096):  # float32 copies of a block, not of all
            block = labels[start : start + 4096]
            y, x = rng.integers(0, 5, (2, len(block)))
            drawn = shifted[block, y, x]
            drawn *= rng.uniform(0.6, 1.2, (len(block), 1, 1)).astype(np.float32)
            drawn += 25 * rng.standard_normal(drawn.shape, np.float32)
            images[start : start + 4096, 0] = np.clip(drawn, 0, 255, out=drawn)
        return images, labels

    return Dataset("synthetic", *draw(train_size), *draw(test_size), f"synthetic, seed {seed}")


def cache_folder(name: str) -> Path:
    """Return the folder that data set `name` is downloaded into; XDG_CACHE_HOME moves it."""
    return Path(pooch.os_cache("gluon_mgpu")) / name


def _locate(folder: Path, file: str) -> Path | None:
    paths = (folder / f"{file}.gz", folder / file)
    return next((path for path in paths if os.path.isfile(path)), None)


def _missing(folder: Path, name: str) -> list[str]:
    return [file for file in SHA256[name] if not _locate(folder, file)]


def _content(path: Path, name: str) -> bytes:
    """Return the decompressed bytes of a file of data set `name`; Error if they are not the known ones."""
    remedy = f"delete or replace it, or name a folder that has {name} with --data-dir"
    try:
        raw = path.read_bytes()
        if raw[:2] == b"\x1f\x8b":
            raw = gzip.decompress(raw)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise Error(f"{path} is damaged, its gzip stream cannot be read ({error}): {remedy}") from error
    except OSError as error:
        raise Error(f"cannot read {path} ({error.strerror}): {remedy}") from error
    found, expected = hashlib.sha256(raw).hexdigest(), SHA256[name][path.name.removesuffix(".gz")]
    if found != expected:
        raise Error(f"{path} is not {name}'s: SHA-256 expected {expected}, found {found}: {remedy}")
    return raw


def _download(name: str, folder: Path, temp: Path) -> list[str]:
    """Bring the missing files into folder; return why each mirror failed if there is a file that none gave."""
    print(f"downloading {name} into {folder}", file=sys.stderr)
    own = os.environ.get("GLUON_MGPU_MIRROR")
    mirrors = [own] if own else list(MIRRORS[name])
    transfer = pooch.HTTPDownloader(progressbar=sys.stderr.isatty(), timeout=TIMEOUT)
    for file in _missing(folder, name):
        part = temp / f"{file}.gz"
        failures = []
        for mirror in mirrors:
            try:
                transfer(f"{mirror.rstrip('/')}/{part.name}", str(part), None)
                _content(part, name)
            except (requests.RequestException, ValueError, Error) as error:  # ValueError: no address, a bad length
                host = mirror.split("//")[-1].split("/")[0].split("@")[-1]
                failures.append(f"{host}: {_reason(error)}")
            else:
                os.replace(part, folder / part.name)
                break
        else:
            return failures
        mirrors.sort(key=mirror.__ne__)  # the next file is asked of the mirror that answered
    return []


def _reason(error: Exception) -> str:
    if isinstance(error, Error):
        return "wrong content"
    if isinstance(error, requests.HTTPError):
        return f"HTTP {error.response.status_code}"
    if "timed out" in str(error):
        return "timed out"
    if isinstance(error, requests.exceptions.ChunkedEncodingError):
        return "cut off"
    return "no connection" if isinstance(error, requests.ConnectionError) else type(error).__name__


def _unpack_package(name: str, folder: Path, temp: Path) -> str | None:
    """Bring the missing files into folder from the distribution's package, without root; return why not, or None."""
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        return "apt-get: not on this machine"
    package = PACKAGES[name]
    print(f"no mirror gave {name}: taking it from the package {package} with apt-get", file=sys.stderr)
    (temp / "lists" / "partial").mkdir(parents=True)
    (temp / "cache" / "archives" / "partial").mkdir(parents=True)
    # Root's apt would drop to a user that cannot enter the cache folder; elsewhere the setting does nothing.
    settings = [f"Dir::State::Lists={temp}/lists", f"Dir::Cache={temp}/cache", "Debug::NoLocking=1"]
    settings += ["APT::Sandbox::User=root", "Acquire::http::Timeout=10", "Acquire::https::Timeout=10"]
    apt = ["apt-get", "-qq"] + [part for setting in settings for part in ("-o", setting)]

    def run(*command: str, check: bool = True) -> None:
        no = subprocess.DEVNULL
        subprocess.run(command, cwd=temp, check=check, timeout=APT_SECONDS, stdin=no, stdout=no, stderr=no)

    try:
        run(*apt, "update", check=False)  # fails for one bad source of many; download tells whether ours was there
        run(*apt, "download", package)
        run("dpkg-deb", "-x", *map(str, temp.glob("*.deb")), str(temp))
        for file in _missing(folder, name):
            path = _locate(temp / "usr/share/datasets" / name, file)
            if not path:
                return f"{package}: has no {file}"
            _content(path, name)
            os.replace(path, folder / path.name)
    except subprocess.CalledProcessError as error:
        return f"{error.cmd[0]}: exit status {error.returncode} for {package}"
    except subprocess.TimeoutExpired as error:
        return f"{error.cmd[0]}: not done after {APT_SECONDS} s"
    except Error:
        return f"{package}: wrong content"
    return None
