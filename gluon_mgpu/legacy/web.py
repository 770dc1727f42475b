"""Answers a program's own requests for known files, by urllib or requests, as `downloads` answers MXNet's."""

from __future__ import annotations

import email.message
import io
import urllib.response
from types import ModuleType
from typing import Any


def _content(url: str, data_dir: str | None) -> bytes | None:
    if "-ubyte" not in url:
        return None
    from gluon_mgpu.legacy import downloads  # imports NumPy, which a program may not need, and requests

    return downloads.content(url, data_dir)


def replace_urlopen(request: ModuleType, data_dir: str | None) -> None:
    """Change urllib.request.urlopen, which urlretrieve also calls."""
    original = request.urlopen

    def urlopen(url: Any, *args: Any, **options: Any) -> Any:
        address = getattr(url, "full_url", url)
        found = _content(address, data_dir)
        if found is None:
            return original(url, *args, **options)
        headers = email.message.Message()
        headers["Content-Length"] = str(len(found))
        return urllib.response.addinfourl(io.BytesIO(found), headers, address, 200)

    request.urlopen = urlopen  # type: ignore[attr-defined]


def replace_send(requests: ModuleType, data_dir: str | None) -> None:
    """Change how requests sends a request."""
    original = requests.adapters.HTTPAdapter.send

    def send(self: Any, request: Any, *args: Any, **options: Any) -> Any:
        found = _content(request.url, data_dir)
        if found is None:
            return original(self, request, *args, **options)
        response = requests.Response()
        response.status_code, response.request, response.url = 200, request, request.url
        response.headers["Content-Length"] = str(len(found))
        response.raw = io.BytesIO(found)
        return response

    requests.adapters.HTTPAdapter.send = send
