"""What MXNet's registry says about the attributes of its operators: their types and defaults."""

from __future__ import annotations

import ast
import ctypes
import functools
import math
import re
from typing import Any

import numpy as np
from mxnet.base import _LIB, check_call

TRUE, FALSE = ("True", "true", "1"), ("False", "false", "0")  # how graph files represent them


def simple(op: str) -> str:
    """An operator's name without capitals, underscores and prefixes: reshape for Reshape and _np_reshape."""
    return re.sub(r"^_?(contrib_|npi_|npx_|np_)?(broadcast_|elemwise_)?|_", "", op).lower()


def is_known(op: str) -> bool:
    """Whether MXNet has this operator."""
    return _LIB.NNGetOpHandle(op.encode(), ctypes.byref(ctypes.c_void_p())) == 0


@functools.cache
def attributes(op: str) -> dict[str, tuple[str, str]]:
    """{name: (type, default)} of an operator's attributes, as text. The default is "" if there is none.

    Also contains the operator's inputs.
    """
    handle = ctypes.c_void_p()
    check_call(_LIB.NNGetOpHandle(op.encode(), ctypes.byref(handle)))
    size, text, lists = ctypes.c_uint(), ctypes.c_char_p(), [ctypes.POINTER(ctypes.c_char_p)() for _ in range(3)]
    arguments = [text, text, size, *lists, text, text]
    check_call(_LIB.MXSymbolGetAtomicSymbolInfo(handle, *map(ctypes.byref, arguments)))
    found = ((lists[0][i].decode(), lists[1][i].decode()) for i in range(size.value))
    parts = {name: re.split(r", ?optional, default=", kind) for name, kind in found}
    return {name: (kind, default[0].strip("'") if default else "") for name, (kind, *default) in parts.items()}


def parse(kind: str, text: str) -> Any:
    """The value of an attribute: a bool, a word that MXNet knows, a finite number, a tuple of numbers, or None.

    kind: its type in the registry. Raises ValueError or SyntaxError for any other text.
    """
    if text == "None":
        return None
    if kind.startswith("boolean") and text in TRUE + FALSE:
        return text in TRUE
    if kind.startswith("{") and text in re.findall(r"'(\w+)'", kind) or kind.startswith("string") and text.isalnum():
        return text
    if kind.startswith(("float", "double")) and math.isfinite(number := float(text)):
        short = np.float32(number)  # 0.001 instead of 0.00100000005
        return float(str(short)) if kind.startswith("float") or float(short) == number else number
    if kind.startswith(("int", "long")):
        return int(text.rstrip("L"))
    if kind.startswith(("Shape", "tuple")):
        value = ast.literal_eval(re.sub(r"(?<=\d)L", "", text))  # (2L, 2L)
        value = tuple(value) if isinstance(value, (list, tuple)) else (value,)
        if all(number is None or type(number) in (int, float) for number in value):
            return value
    raise ValueError(f"{text!r} is not supported")
