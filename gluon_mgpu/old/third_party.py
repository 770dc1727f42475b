"""Restores names that pandas, Pillow, SciPy, IPython, Matplotlib and PyYAML have removed."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from gluon_mgpu.old.names import restore


def _pandas(pd: Any) -> None:
    import numpy as np

    def append(self: Any, other: Any, ignore_index: bool = False, **_: Any) -> Any:
        if isinstance(other, (dict, pd.Series)) and self.ndim == 2:  # a row
            other = pd.Series(other).to_frame().T.infer_objects()
        others = other if isinstance(other, list) else [other]
        return pd.concat([self, *others], ignore_index=ignore_index)

    def as_matrix(self: Any, columns: Any = None) -> Any:
        return (self if columns is None else self[columns]).to_numpy()

    def swapaxes(self: Any, axis1: Any, axis2: Any, copy: bool = True) -> Any:  # np.split calls it
        return self.copy() if self._get_axis_number(axis1) == self._get_axis_number(axis2) else self.T

    if pd.__version__ >= "3":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # this option is deprecated
            pd.set_option("future.infer_string", False)  # texts are Python objects
        _refuse_chained_assignment(pd.errors.ChainedAssignmentError)
        _restore_letters_of_frequencies(pd._libs.tslibs.offsets)
    if pd.__version__ >= "2":
        pd.get_dummies = functools.partial(pd.get_dummies, dtype=np.uint8)
        for owner in (pd.DataFrame, pd.core.groupby.DataFrameGroupBy):
            for name in ("mean", "median", "std", "var"):
                setattr(owner, name, _without_texts(getattr(owner, name)))
    for owner in (pd.DataFrame, pd.Series):
        restore(owner, {"as_matrix": as_matrix, "append": append, "iteritems": "items", "swapaxes": swapaxes})
        if "method" not in inspect.signature(owner.fillna).parameters:
            _restore_method_of_fillna(owner)


def _refuse_chained_assignment(error: Any) -> None:
    """pandas 3 only warns that it ignores an assignment. Programs often hide warnings."""

    def refuse(*_: Any) -> None:
        raise RuntimeError("pandas 3 ignores frame[column][row] = value: run `pip install 'pandas<3'`")

    error.__init__ = refuse


def _restore_letters_of_frequencies(offsets: Any) -> None:
    """Accept "H", "T", "S", "A" and others. pandas says what to write instead of "M" and "Q"."""
    current = offsets.prefix_mapping
    former = {**offsets.deprec_to_valid_alias, "A": "YE"}
    current.update({old: current[new] for old, new in former.items() if new in current})
    offsets.deprec_to_valid_alias.clear()


def _without_texts(reduce: Any) -> Any:
    """Let a method of frames leave out columns with text, as before pandas 2."""

    @functools.wraps(reduce)
    def reduce_numbers(self: Any, *args: Any, **options: Any) -> Any:
        try:
            return reduce(self, *args, **options)
        except (TypeError, ValueError):
            return reduce(self, *args, **{**options, "numeric_only": True})

    return reduce_numbers


def _restore_method_of_fillna(owner: Any) -> None:
    original = owner.fillna

    def fillna(self: Any, value: Any = None, *args: Any, method: str | None = None, **options: Any) -> Any:
        if method is None:
            return original(self, value, *args, **options)
        return (self.ffill if method in ("ffill", "pad") else self.bfill)(**options)

    owner.fillna = fillna


# gluonts compares the names of pandas' offsets with the letters that they had before pandas 2.2.
FORMER_LETTERS = {"h": "H", "min": "T", "s": "S", "ME": "M", "QE": "Q", "YE": "A", "Y": "A"}


def _gluonts_names(time_feature: Any) -> None:
    normalize = time_feature.norm_freq_str

    def normalize_to_former(name: str) -> str:
        current = normalize(name)
        return FORMER_LETTERS.get(current, current)

    time_feature.norm_freq_str = normalize_to_former


def _gluonts_offsets(module: Any) -> None:
    to_offset = module.to_offset

    def to_former(freq: str) -> SimpleNamespace:
        offset = to_offset(freq)
        return SimpleNamespace(name=FORMER_LETTERS.get(offset.name, offset.name), n=offset.n)

    module.to_offset = to_former


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

    def imsave(name: Any, arr: Any, format: str | None = None) -> None:
        picture(arr).save(name, format)

    restore(misc, {"imread": imread, "imresize": imresize, "imsave": imsave})


def _display(display: ModuleType) -> None:
    def set_matplotlib_formats(*formats: str, **options: Any) -> None:
        from matplotlib_inline import backend_inline  # imports IPython, so it cannot be imported earlier

        backend_inline.set_matplotlib_formats(*formats, **options)

    restore(display, {"set_matplotlib_formats": set_matplotlib_formats})


def _core_display(module: ModuleType) -> None:
    def display(*objects: Any, **options: Any) -> Any:
        from IPython import display  # imports this module

        return display.display(*objects, **options)

    restore(module, {"display": display})


def _seaborn_styles(style: Any) -> None:
    current = [name for name in style.library if name.startswith("seaborn-v0_8")]
    style.library.update({name.replace("-v0_8", ""): style.library[name] for name in current})


def _yaml(yaml: ModuleType) -> None:
    load = yaml.load
    yaml.load = lambda stream, Loader=yaml.FullLoader: load(stream, Loader)  # type: ignore[attr-defined]


def _size(box: tuple[float, ...]) -> tuple[int, int]:
    return int(box[2] - box[0]), int(box[3])


def _image_font(module: ModuleType) -> None:
    for font in (module.FreeTypeFont, module.ImageFont):
        restore(font, {"getsize": lambda self, text, *a, **options: _size(self.getbbox(text, *a, **options))})


def _image_draw(module: ModuleType) -> None:
    restore(module.ImageDraw, {"textsize": lambda self, *a, **options: _size(self.textbbox((0, 0), *a, **options))})


RESTORE: dict[str, Callable[[ModuleType], object]] = {
    "pandas": _pandas,
    "PIL.Image": lambda image: restore(image, {"ANTIALIAS": "LANCZOS", "LINEAR": "BILINEAR", "CUBIC": "BICUBIC"}),
    "PIL.ImageDraw": _image_draw,
    "PIL.ImageFont": _image_font,
    "scipy.misc": _scipy_misc,
    "IPython.core.display": _core_display,
    "IPython.display": _display,
    "gluonts.mx.model.deepstate.issm": _gluonts_offsets,
    "gluonts.mx.model.deepvar._estimator": _gluonts_offsets,
    "gluonts.time_feature._base": _gluonts_names,
    "matplotlib.pyplot": lambda pyplot: restore(pyplot.cm, {"get_cmap": pyplot.get_cmap}),
    "matplotlib.style": _seaborn_styles,
    "yaml": _yaml,
}
