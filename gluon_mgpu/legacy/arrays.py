"""Converts MXNet's arrays for NumPy and Matplotlib, and lets a program use `loss.mean().asnumpy()` as a number.

float(a), int(a), "%f" % a and b[0] = a work for an array with one element. NumPy 2.4 and later refuse this, unless the
array has no dimensions.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np


class array(np.ndarray):  # noqa: N801  # repr prints this name
    """An array that can be used as a number if it has one element."""

    def __float__(self) -> float:
        return float(self.item()) if self.size == 1 else super().__float__()

    def __int__(self) -> int:
        return int(self.item()) if self.size == 1 else super().__int__()

    def __array_wrap__(self, result: Any, context: Any = None, return_scalar: bool = False) -> Any:
        return result[()] if return_scalar else _as_number(result)

    def __reduce__(self) -> Any:  # pickle an ordinary array
        return self.view(np.ndarray).__reduce__()


def add_conversion(mx: ModuleType) -> None:
    """Let NumPy convert MXNet's arrays to its own. Otherwise, it takes them for sequences of objects, which it, or a
    current Matplotlib, refuses."""
    mx.nd.NDArray.__array__ = lambda self, dtype=None, copy=None: np.asarray(self.asnumpy(), dtype)


def replace_asnumpy(mx: ModuleType) -> None:
    """Make `asnumpy` return an `array` for an MXNet array with one element."""
    asnumpy = mx.nd.NDArray.asnumpy
    mx.nd.NDArray.asnumpy = lambda self: _as_number(asnumpy(self))


def _as_number(result: Any) -> Any:
    return result.view(array) if result.size == 1 and result.ndim else result
