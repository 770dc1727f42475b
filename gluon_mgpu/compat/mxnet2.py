"""Gives MXNet 2 what the lessons use of MXNet 1.9.1, so that the same lessons run on both.

MXNet 2's Gluon computes with arrays of `mx.np`, and the lessons with those of `mx.nd`. Both are views of the same
memory, so a call across this border converts its arguments and its result.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any


def restore(mx: ModuleType) -> None:
    """Restore mx.metric, mx.Context, Gluon for arrays of mx.nd, and what MXNet 2 has removed from blocks."""
    mx.util.reset_np()  # outside of Gluon, operators take and return arrays of mx.nd
    gluon = mx.gluon
    vars(mx).update(metric=gluon.metric, Context=mx.Device)
    mx.context.Context = mx.Device  # instead of a function
    for block in _with_subclasses(gluon.Block):
        for name in {"__call__", "forward", "initialize", "load_parameters"} & {*vars(block)}:
            setattr(block, name, _with_arrays(mx, True, getattr(block, name)))
    for name in ("data", "grad", "list_data", "list_grad", "set_data"):
        setattr(gluon.Parameter, name, _with_arrays(mx, True, getattr(gluon.Parameter, name)))
    for init in (mx.init.Normal, mx.init.Uniform):  # to draw the same numbers as mx.nd
        init._init_weight = _with_arrays(mx, False, init._init_weight)
    for block in (gluon.Block, gluon.HybridBlock, gluon.nn.Sequential, gluon.nn.HybridSequential):
        block.__init__ = _without_names(block.__init__)
    gluon.Block.name_scope = contextlib.nullcontext
    gluon.Block.__init_subclass__ = classmethod(lambda block: _adapt(mx, block))


def _with_subclasses(block: Any) -> Iterator[Any]:
    yield block
    for subclass in block.__subclasses__():
        yield from _with_subclasses(subclass)


def _with_arrays(mx: ModuleType, numpy: bool, function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function use arrays of mx.np (numpy=True) or mx.nd, whichever its caller uses."""

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        callers = mx.is_np_array()
        with mx.np_shape(numpy or mx.is_np_shape()), mx.np_array(numpy):
            result = function(*_converted(args, numpy), **options)
        return _converted(result, callers)

    return call


def _converted(value: Any, numpy: bool) -> Any:
    if isinstance(value, (list, tuple)):
        return [_converted(part, numpy) for part in value]
    convert = getattr(value, "as_np_ndarray" if numpy else "as_nd_ndarray", None)
    return convert() if convert else value


def _without_names(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def init_block(self: Any, prefix: str | None = None, params: object = None) -> None:
        init(self)

    return init_block


def _adapt(mx: ModuleType, block: Any) -> None:
    """Let a new class of blocks define forward(x, ...) or hybrid_forward(F, x, ..., **parameters) for arrays of
    mx.nd."""
    compute = vars(block).get("forward")
    if "hybrid_forward" in vars(block):
        hybrid = block.hybrid_forward
        del block.hybrid_forward  # MXNet 2 refuses blocks that have it

        def compute(self: Any, x: Any, *args: Any) -> Any:
            return hybrid(self, mx.nd, x, *args, **{name: p.data(x.context) for name, p in self._reg_params.items()})

    if compute:
        block.forward = _with_arrays(mx, False, compute)
