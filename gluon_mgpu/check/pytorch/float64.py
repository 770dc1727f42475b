"""Computes in float64 what code in PyTorch computes in any other precision."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

DOUBLE = {torch.complex64: torch.complex128, torch.complex32: torch.complex128}
DRAWS = {"rand", "randn", "normal", "rand_like", "randn_like"}


class Float64(TorchDispatchMode):
    """Random numbers are drawn in float32, so that they are the same.

    note: gets each precision that the code asks for.
    """

    def __init__(self, note: Callable[[Any], None]) -> None:
        super().__init__()
        self.note = note
        names = ("from_numpy", "tensor", "as_tensor")
        self.converting = {name: self._converted(getattr(torch, name)) for name in names}

    def __enter__(self) -> Any:
        torch.set_default_dtype(torch.float64)  # which autocast leaves as it is
        self.originals = {name: getattr(torch, name) for name in self.converting}
        for name, function in self.converting.items():
            setattr(torch, name, function)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.set_default_dtype(torch.float32)
        for name, function in self.originals.items():
            setattr(torch, name, function)

    def _converted(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(function)
        def convert(*args: Any, **options: Any) -> Tensor:
            tensor = function(*args, **options)
            self.note(tensor.dtype)
            if tensor.is_complex():
                return tensor.to(torch.complex128)
            return tensor.double() if tensor.is_floating_point() and tensor.ndim else tensor

        return convert

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(t.__name__ == "DTensor" for t in types):
            return NotImplemented  # the operations on its parts come here, too
        kwargs, dtype = kwargs or {}, (kwargs or {}).get("dtype")
        first: Any = args[0] if args else None
        shape = first.shape if isinstance(first, Tensor) else first
        name = func.overloadpacket.__name__
        if dtype in DOUBLE:
            kwargs = {**kwargs, "dtype": DOUBLE[dtype]}
        elif dtype is not None and dtype.is_floating_point:
            self.note(dtype)
            # but not a number, such as the factor of a gradient scaler, which has kernels for float32 only
            if shape or isinstance(first, Tensor) and first.dtype == torch.float64:
                kwargs = {**kwargs, "dtype": torch.float64}
        if name == "_amp_foreach_non_finite_check_and_unscale_":
            args = (*args[:2], args[2].to(torch.float32))
        if torch.Tag.nondeterministic_seeded in func.tags and dtype not in (torch.float64, torch.complex128):
            if name.endswith("_") and first.dtype == torch.float64:
                return first.copy_(func(torch.empty(first.shape, dtype=torch.float32), *args[1:], **kwargs))
            if name in DRAWS and "dtype" in str(func._schema):
                drawn, wide = (torch.complex64, torch.complex128) if dtype in DOUBLE else (torch.float32, torch.float64)
                return func(*args, **{**kwargs, "dtype": drawn}).to(wide)
        return func(*args, **kwargs)
