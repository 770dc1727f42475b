"""Lets Python, and MXNet 1.9.1 on CPUs, do what earlier versions, or MXNet on GPUs, did; or explains why it cannot.

All changes affect only this process. A name that still exists is left as it is.
"""

from __future__ import annotations

import collections
import collections.abc
import errno
import inspect
import math
import re
from types import ModuleType
from typing import Any

ArgSpec = collections.namedtuple("ArgSpec", "args varargs keywords defaults")
# {module: {name removed from 2016 to 2022: a name beside it, or a value}}
STANDARD_NAMES: dict[str, dict[str, Any]] = {
    "collections": {name: getattr(collections.abc, name) for name in collections.abc.__all__},
    "fractions": {"gcd": math.gcd},
    "inspect": {"getargspec": lambda function: ArgSpec(*inspect.getfullargspec(function)[:4])},
    "os": {"errno": errno},
    "platform": {"linux_distribution": lambda *_, **__: ("", "", "")},
    "time": {"clock": "perf_counter"},
}
ADVICE = (  # (pattern of MXNet's error, what to do)
    (
        "Check failed: !is_view|could not (create|execute) a ",  # of oneDNN; also Deconvolution with target_shape
        "start the program with MXNET_MKLDNN_ENABLED=0 (slower)",
    ),
    ("(?i)float16|fp16", "MXNet has few operators for float16 on CPUs; use float32, without AMP"),
)


def restore(module: Any, names: dict[str, Any]) -> None:
    """Add names to a module. names: {name: value, or the name of one beside it}."""
    for name, value in names.items():
        if name not in vars(module):
            setattr(module, name, getattr(module, value) if isinstance(value, str) else value)


def replace(mx: ModuleType) -> None:
    """Change the imported mxnet, which is version 1."""
    restore(mx.gluon, {"autograd": mx.autograd})
    restore(mx.optimizer, vars(mx.optimizer.optimizer))  # was a module, with the functions that it imports
    metric, reset_local = mx.metric.EvalMetric, mx.metric.EvalMetric.reset_local
    metric.reset_local = lambda self: (reset_local if type(self).reset is metric.reset else type(self).reset)(self)
    split = mx.gluon.utils.split_data
    mx.gluon.utils.split_data = lambda data, num_slice, batch_axis=0, even_split=True: split(
        data, num_slice if even_split else min(num_slice, data.shape[batch_axis]), batch_axis, even_split
    )
    layer = mx.gluon.nn.conv_layers._Conv
    original, last_error = layer.hybrid_forward, mx.base.get_last_ffi_error

    def convolve(self: Any, F: Any, x: Any, weight: Any, bias: Any = None) -> Any:
        """Compute Conv1D as a Conv2D of height 1: other operators, such as BatchNorm, cannot read what oneDNN's
        one-dimensional convolution returns if the number of channels is a multiple of 8."""
        given = self._kwargs
        if (given["layout"], self._op_name) != ("NCW", "Convolution") or mx.util.is_np_array():
            return original(self, F, x, weight, bias)
        two = {name: (value, *given[name]) for name, value in (("kernel", 1), ("stride", 1), ("dilate", 1), ("pad", 0))}
        inputs = [F.expand_dims(x, 2), F.expand_dims(weight, 2), *([] if bias is None else [bias])]
        outputs = F.squeeze(F.Convolution(*inputs, name="fwd", **{**given, **two, "layout": "NCHW"}), axis=2)
        return outputs if self.act is None else self.act(outputs)

    def explain() -> Exception:
        error: Exception = last_error()
        advice = [advice for pattern, advice in ADVICE if re.search(pattern, str(error))]
        error.args = ("\n".join([str(error), *advice]),)
        return error

    layer.hybrid_forward, mx.base.get_last_ffi_error = convolve, explain
