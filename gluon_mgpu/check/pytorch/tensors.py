"""Tensors of PyTorch, and batches of them: any nest of tensors, arrays, lists and objects, with a row per example."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gluon_mgpu.support.reachable import Parts, parts_of, reachable

NO_DATA = (str, bytes, int, float, FunctionType, type, ModuleType, nn.Module)  # in a batch


def array_of(tensor: Any) -> np.ndarray:
    """A copy in float64; complex numbers as pairs."""
    if isinstance(tensor, np.ndarray):
        return tensor.astype(np.float64)
    tensor = (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return np.array(tensor.to_dense().to(torch.float64).numpy() if tensor.is_sparse else tensor.double().numpy())


# Batches


def leaves(batch: Any) -> list[Any]:
    """The tensors and arrays of a batch."""
    return [value for _, value in reachable([((), batch)], _parts) if isinstance(value, (Tensor, np.ndarray))]


def _parts(value: Any) -> Parts:
    return () if isinstance(value, (Tensor, np.ndarray, *NO_DATA)) else parts_of(value)


def rows_of(batch: Any, n: int) -> int:
    """How many rows a batch of n examples has: n, or if nothing has as many, those of the first array."""
    sizes = [len(a) for a in leaves(batch) if a.ndim]
    lists = isinstance(batch, (list, tuple)) and len(batch) == n
    return n if n in sizes or lists or not sizes else sizes[0]


def copy_of(
    batch: Any, n: int, examples: Sequence[int] | None = None, change: Callable[[Any], Any] = lambda array: array
) -> Any:
    """A copy of a batch of n examples, or of some of its examples: of each tensor, array and list that has n rows.

    change: changes each tensor and array. Everything else, and all types, stay as they are.
    """
    rows, chosen = rows_of(batch, n), [*(examples or ())]

    def has_rows(value: Any) -> bool:
        return examples is not None and getattr(value, "ndim", 1) != 0 and len(value) == rows

    found = [value for _, value in reachable([((), batch)], _parts)]
    lists = [v for v in found if isinstance(v, (list, tuple)) and not hasattr(v, "_fields") and has_rows(v)]
    whole = {id(value) for each in lists for _, value in reachable(_parts(each), _parts)}  # they belong to one row
    copies = dict[int, Any]()
    for value in found:
        if isinstance(value, (Tensor, np.ndarray)):
            is_divided = has_rows(value) and id(value) not in whole
            copies[id(value)] = change(_rows(value, chosen) if is_divided else value)
    for each in lists:
        if id(each) not in whole:
            copies[id(each)] = type(each)(copy.deepcopy(each[i], copies) for i in chosen)
    return copy.deepcopy(batch, copies)


def _rows(array: Any, chosen: Sequence[int]) -> Any:
    if isinstance(array, Tensor):
        return array.index_select(0, torch.tensor(chosen, dtype=torch.int64))
    return array[np.array(chosen, int)]


def is_float(array: Any) -> bool:
    return array.is_floating_point() if isinstance(array, Tensor) else array.dtype.kind == "f"


def own_copy(array: Any, double: bool = False, requires_grad: bool = False, factor: float = 1) -> Any:
    """A process's own copy of a tensor or an array. factor: of real numbers."""
    is_tensor = isinstance(array, Tensor)
    copied = array.detach().clone() if is_tensor else array.copy()
    if not is_float(array):
        return copied.to(torch.complex128) if double and is_tensor and array.is_complex() else copied
    if double:
        copied = copied.double() if is_tensor else copied.astype(np.float64)
    if factor != 1:
        copied = copied * factor
    return copied.requires_grad_(requires_grad) if is_tensor and not copied.is_sparse else copied


def set_last(batch: Any, n: int, value: float) -> None:
    """Set the real numbers of the last example of a batch."""
    for a in leaves(batch):
        if is_float(a) and a.ndim and len(a) == n and not getattr(a, "is_sparse", False):
            a[-1] = value


def with_gradients(batch: Any, n: int) -> list[int]:
    """The examples of a batch that have gradients."""
    tensors = [a for a in leaves(batch) if isinstance(a, Tensor) and a.grad is not None and len(a) == n]
    used = [a.grad.reshape(n, -1).ne(0).any(1) for a in tensors]
    return torch.stack(used).any(0).nonzero().ravel().tolist() if used else []
