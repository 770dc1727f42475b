"""Answers requests for known files with verified files from `datasets`, because MXNet 1.9.1's URLs may be dead.

Any other download with MXNet's functions is attempted only once. If it fails, the error gives the URL, and the path
where the program expects the file. data_dir: see `datasets.load`.

Every prepared process imports this module, so it imports requests and NumPy (with `datasets`) only where they are used.
"""

from __future__ import annotations

import email.message
import functools
import gzip
import inspect
import io
import os
import re
import shutil
import urllib.response
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from gluon_mgpu.support import files, log

SECONDS = 20  # time limit for a stalled download
FOLDERS = (  # (pattern of a folder or a host, the data set in it; "": unknown), the first that matches
    (r"mnist([-_]?data(sets?)?)?", "mnist"),
    (r"fashion([-_]?mnist)?([-_]?data(sets?)?)?|fashion-mnist\.s3-\S+|tf-keras-datasets", "fashion-mnist"),
    (".*mnist.*", ""),
)
FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
FAILURES = (OSError, RuntimeError, AssertionError, UserWarning)  # what MXNet's functions raise if a download fails


def replace_download(module: Any, data_dir: str | None) -> None:
    """Change the function `download` of a module of MXNet or gluoncv."""
    import requests

    original = module.download
    signature = inspect.signature(original)
    module.requests = SimpleNamespace(get=functools.partial(requests.get, timeout=SECONDS))  # they set no timeout

    def download(*args: Any, **options: Any) -> str:
        call = signature.bind(*args, **options)
        call.apply_defaults()
        words = call.arguments
        if "retries" in words:
            words["retries"] = 1
        url, name = words["url"], os.path.basename(words["url"])
        if "path" in words:
            path = os.path.expanduser(words["path"] or name)
            target = Path(path, name) if os.path.isdir(path) else Path(path)
        else:
            target = Path(words["dirname"] or "", words["fname"] or name)
        known = content(url, data_dir)
        if known:
            if not target.is_file() or target.read_bytes() != known:
                target.parent.mkdir(parents=True, exist_ok=True)
                files.write_whole(target, lambda file: file.write(known))
                log.say(f"using a verified copy of {target.name} for {target}")
            return str(target)
        place = Path(re.sub(r"\.zip[0-9a-f-]{36}$", ".zip", str(target)))  # without the model zoo's random suffix
        if place != target and place.exists():
            return str(shutil.copy(place, target))
        try:
            return str(original(*call.args, **call.kwargs))
        except FAILURES as error:
            reason = "no connection" if isinstance(error, requests.ConnectionError) else type(error).__name__
            raise OSError(f"cannot download {url} ({reason}): put the file at {place.absolute()}") from None

    module.download = download


def replace_urlopen(request: ModuleType, data_dir: str | None) -> None:
    """Change urllib.request.urlopen, which urlretrieve also calls."""
    original = request.urlopen

    def urlopen(url: Any, *args: Any, **options: Any) -> Any:
        address = getattr(url, "full_url", url)
        found = content(address, data_dir)
        if found is None:
            return original(url, *args, **options)
        headers = email.message.Message()
        headers["Content-Length"] = str(len(found))
        return urllib.response.addinfourl(io.BytesIO(found), headers, address, 200)

    request.urlopen = urlopen  # type: ignore[attr-defined]


def content(url: str, data_dir: str | None) -> bytes | None:
    """What the server of a known file returned; None for any other URL. Exceptions: see `datasets.content`."""
    known = known_file(url)
    if known is None and not url.endswith("/data/mnist.zip"):
        return None
    from gluon_mgpu.data import datasets

    if known:
        found = datasets.content(*known, data_dir)
        return gzip.compress(found, compresslevel=1, mtime=0) if url.endswith(".gz") else found
    archive = io.BytesIO()  # which `mx.test_utils.get_mnist_ubyte` unpacks
    with zipfile.ZipFile(archive, "w") as file:
        for name in FILES:
            file.writestr(zipfile.ZipInfo(name), datasets.content("mnist", name, data_dir))
    return archive.getvalue()


def known_file(address: str) -> tuple[str, str] | None:
    """The (data set, file) that a URL names, or None. KMNIST and others have files with the same names, so the last
    folder that looks like a data set decides."""
    *folders, file = re.sub(r"\.gz$", "", address).split("/")
    names = (name for folder in reversed(folders) for pattern, name in FOLDERS if re.fullmatch(pattern, folder, re.I))
    name = next(names, "")
    return (name, file) if name and file in FILES else None
