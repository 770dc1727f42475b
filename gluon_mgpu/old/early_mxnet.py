"""Lets MXNet do what its early versions did, and work with current versions of NumPy and Matplotlib."""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any

from gluon_mgpu.old import names
from gluon_mgpu.support import log


def add_to_mxnet(mx: ModuleType) -> None:
    """Change the imported mxnet."""
    import numpy as np

    names.restore(mx.gluon, {"autograd": mx.autograd})
    names.restore(mx.optimizer, vars(mx.optimizer.optimizer))  # was a module, with the functions that it imports
    if mx.__version__ >= "2":
        log.say("MXNet 2 has no mx.mod, mx.mon, mx.rnn or mx.th: programs that use them need mxnet==1.9.1")
    else:
        metric, reset_local = mx.metric.EvalMetric, mx.metric.EvalMetric.reset_local
        metric.reset_local = lambda self: (reset_local if type(self).reset is metric.reset else type(self).reset)(self)
        _accept_number_of_sums(metric)
        _allow_large_k(mx.metric.TopKAccuracy)
    # Let NumPy convert arrays. Otherwise, it takes them for sequences of objects, which it, or a current Matplotlib,
    # refuses. Their dtype is a class, from which NumPy 2.4 and later make no np.dtype.
    mx.nd.NDArray.__array__ = lambda self, dtype=None, copy=None: np.asarray(self.asnumpy(), dtype)
    mx.nd.NDArray.__numpy_dtype__ = property(lambda self: np.dtype(self.dtype))
    if hasattr(np, "trapezoid"):
        _keep_sums_in_float64(mx.metric.EvalMetric)
    split = mx.gluon.utils.split_data
    mx.gluon.utils.split_data = lambda data, num_slice, batch_axis=0, even_split=True: split(
        data, num_slice if even_split else min(num_slice, data.shape[batch_axis]), batch_axis, even_split
    )
    mx.init.Constant.dumps = lambda self: json.dumps(["constant", {"value": np.asarray(self.value).tolist()}])


def _keep_sums_in_float64(metric: Any) -> None:
    """Store the sums of a metric as np.float64. Since NumPy 2, 0.0 + np.float32(x) is a float32, but np.float64(0.0) +
    np.float32(x) is still a float64."""
    import numpy as np

    def stored_as(name: str) -> property:
        def set_sum(self: Any, value: Any) -> None:
            vars(self)[name] = np.float64(value) if isinstance(value, (float, np.floating)) else value

        return property(lambda self: getattr(self, name), set_sum)  # raises AttributeError before it is set

    metric.sum_metric, metric.global_sum_metric = stored_as("_sum_metric"), stored_as("_global_sum_metric")


def _accept_number_of_sums(metric: Any) -> None:
    """Let a metric that calls EvalMetric.__init__(self, name, 2) have two sums, and self.num, as before MXNet 1."""
    create, reset, get = metric.__init__, metric.reset, metric.get

    def create_with_number(self: Any, name: str, output_names: Any = None, *args: Any, **options: Any) -> None:
        if isinstance(output_names, int):
            self.num = self._sums = output_names
            output_names = None
        create(self, name, output_names, *args, **options)

    def reset_all(self: Any) -> None:
        reset(self)
        if self._sums is not None:
            self.num_inst, self.sum_metric = [0] * self._sums, [0.0] * self._sums

    def get_all(self: Any) -> Any:
        if self._sums is None:
            return get(self)
        pairs = zip(self.sum_metric, self.num_inst)
        names = [f"{self.name}_{i}" for i in range(self._sums)]
        return names, [total / count if count else float("nan") for total, count in pairs]

    metric.num = metric._sums = None
    metric.__init__, metric.reset, metric.get = create_with_number, reset_all, get_all


def _allow_large_k(metric: Any) -> None:
    """Let TopKAccuracy(20) count 10 classes."""
    update = metric.update

    def update_with_fewer(self: Any, labels: Any, preds: Any) -> None:
        given = self.top_k
        self.top_k = min([given, *(pred.shape[-1] for pred in (preds if isinstance(preds, list) else [preds]))])
        update(self, labels, preds)
        self.top_k = given

    metric.update = update_with_fewer
