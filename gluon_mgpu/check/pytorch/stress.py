"""What may reach lines and limits that a step has not reached: larger numbers, and numbers that are not finite."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gluon_mgpu.check.driver import Options
from gluon_mgpu.check.pytorch.tensors import is_float, leaves

STRESS = {
    "with larger gradients": Options(factor=1e4),
    "with larger inputs": Options(scale=100.0),
    "if one process gets numbers that are not finite": Options(factor=math.nan, scale=math.nan),
}


def scale_gradients(factor: float) -> None:
    """Multiply the gradients with which each backward pass begins."""
    backward = torch.autograd.backward

    def scaled(tensors: Any, grad_tensors: Any = None, *args: Any, **options: Any) -> None:
        tensors = [tensors] if isinstance(tensors, Tensor) else [*tensors]
        grads = [grad_tensors] if isinstance(grad_tensors, Tensor) else grad_tensors or [None] * len(tensors)
        grads = [(torch.ones_like(t) if g is None else g) * factor for t, g in zip(tensors, grads)]
        backward(tensors, grads, *args, **options)

    torch.autograd.backward = scaled


def set_last(batch: Any, n: int, value: float) -> None:
    """Set the inputs of the last example of a batch."""
    for a in leaves(batch):
        if is_float(a) and a.ndim and len(a) == n and not getattr(a, "is_sparse", False):
            a[-1] = value
