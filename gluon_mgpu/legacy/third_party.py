"""Restores names that pandas, Pillow and SciPy have removed. As in `names`, what still exists is left as it is."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from gluon_mgpu.legacy.names import add


def _pandas(pd: ModuleType) -> None:
    def append(self: Any, other: Any, ignore_index: bool = False, **_: Any) -> Any:
        if isinstance(other, (dict, pd.Series)) and self.ndim == 2:  # a row
            other = pd.Series(other).to_frame().T.infer_objects()
        others = other if isinstance(other, list) else [other]
        return pd.concat([self, *others], ignore_index=ignore_index)

    for owner in (pd.DataFrame, pd.Series):
        add(owner, "as_matrix", lambda self, columns=None: (self if columns is None else self[columns]).to_numpy())
        add(owner, "append", append)
        add(owner, "iteritems", owner.items)
        if "method" not in inspect.signature(owner.fillna).parameters:
            _restore_method_of_fillna(owner)


def _restore_method_of_fillna(owner: Any) -> None:
    original = owner.fillna

    def fillna(self: Any, value: Any = None, *args: Any, method: str | None = None, **options: Any) -> Any:
        if method is None:
            return original(self, value, *args, **options)
        return (self.ffill if method in ("ffill", "pad") else self.bfill)(**options)

    owner.fillna = fillna


def _pillow(image: ModuleType) -> None:
    for old, new in (("ANTIALIAS", "LANCZOS"), ("LINEAR", "BILINEAR"), ("CUBIC", "BICUBIC")):
        add(image, old, getattr(image, new))


def _scipy_misc(misc: ModuleType) -> None:
    import numpy as np
    from PIL import Image

    def picture(a: Any) -> Any:
        """As scipy.misc did, stretch values that are not uint8 from 0 to 255."""
        a = np.asarray(a)
        if a.dtype != np.uint8:
            a = (255 * (a - a.min()) / max(np.ptp(a), 1e-12) + 0.5).astype(np.uint8)
        return Image.fromarray(a)

    def imresize(arr: Any, size: Any, interp: str = "bilinear", mode: str | None = None) -> Any:
        image, filters = picture(arr), {"lanczos": "LANCZOS", "cubic": "BICUBIC"}
        if isinstance(size, (int, float)):
            scale = size / 100 if isinstance(size, int) else size
            width, height = (int(scale * length) for length in image.size)
        else:
            height, width = size[:2]
        resample = getattr(Image, filters.get(interp, interp.upper()))
        return np.array(image.resize((width, height), resample=resample))

    def imread(name: Any, flatten: bool = False, mode: str | None = None) -> Any:
        image: Any = Image.open(name)
        mode = "F" if flatten else mode
        return np.array(image.convert(mode) if mode else image)

    add(misc, "imread", imread)
    add(misc, "imresize", imresize)
    add(misc, "imsave", lambda name, arr, format=None: picture(arr).save(name, format))


RESTORE: dict[str, Callable[[ModuleType], object]] = {
    "pandas": _pandas,
    "PIL.Image": _pillow,
    "scipy.misc": _scipy_misc,
}
