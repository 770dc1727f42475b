"""Lets MXNet 1.9.1 do what its early versions did."""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any

from gluon_mgpu.old import names


def restore(mx: ModuleType) -> None:
    """Change the imported mxnet, which is version 1."""
    import numpy as np

    names.restore(mx.gluon, {"autograd": mx.autograd})
    names.restore(mx.optimizer, vars(mx.optimizer.optimizer))  # was a module, with the functions that it imports
    metric, reset_local = mx.metric.EvalMetric, mx.metric.EvalMetric.reset_local
    metric.reset_local = lambda self: (reset_local if type(self).reset is metric.reset else type(self).reset)(self)
    _accept_number_of_sums(metric)
    _allow_large_k(mx.metric.TopKAccuracy)
    split = mx.gluon.utils.split_data
    mx.gluon.utils.split_data = lambda data, num_slice, batch_axis=0, even_split=True: split(
        data, num_slice if even_split else min(num_slice, data.shape[batch_axis]), batch_axis, even_split
    )
    mx.init.Constant.dumps = lambda self: json.dumps(["constant", {"value": np.asarray(self.value).tolist()}])


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
