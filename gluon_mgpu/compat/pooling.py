"""Faster pooling on processors without AVX-512, with the same bits for finite numbers.

There, oneDNN pools with its reference code unless the number of channels is a multiple of 8. MXNet's own code is
faster. It computes what oneDNN does not take: sums, and float64. Arrays are pooled with these; a graph is changed when
it is compiled, so a program saves the graph that it defines.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import os
import platform
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

BLOCK = 8  # oneDNN's fast code takes numbers of channels that are multiples of this


def install(mx: ModuleType) -> None:
    """Let MXNet 1.9.1 pool as this module says, if oneDNN would use its reference code."""
    onednn = mx.runtime.Features().is_enabled("MKLDNN") and os.environ.get("MXNET_MKLDNN_ENABLED") != "0"
    if platform.machine() != "x86_64" or not onednn or channel_block() == 16 or mx.context.num_gpus():
        return
    mx.nd.Pooling = mx.nd.op.Pooling = _of_arrays(mx.nd.Pooling)
    for module in (mx.npx, mx.nd.numpy_extension):
        module.pooling = _of_arrays(module.pooling)
    CachedOp.mx, CachedOp.compiled = mx, mx.nd.CachedOp
    mx.nd.CachedOp = CachedOp
    symbol = mx.sym.Symbol
    symbol.bind, symbol.simple_bind = _compiled_first(mx, symbol.bind), _compiled_first(mx, symbol.simple_bind)


def channel_block() -> int:
    """The number of channels that oneDNN's fast code computes at once: 16 with AVX-512, 8 with AVX2, else 1.

    This depends on the processor and on DNNL_MAX_CPU_ISA, which limits what oneDNN uses.
    """
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"^flags\s*:(.*)", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else None
    flags, limit = found[1].split() if found else [], os.environ.get("DNNL_MAX_CPU_ISA", "ALL").upper()
    if limit in ("SSE41", "AVX") or "avx2" not in flags:
        return 1
    return 16 if "avx512bw" in flags and not limit.startswith("AVX2") else 8


def _of_arrays(pooling: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(pooling)
    def pool(data: Any = None, *args: Any, **options: Any) -> Any:
        usual = args or "out" in options or not hasattr(data, "dtype")
        how = None if usual else _how(options, data.shape, data.dtype)
        if how == "sum":
            return pooling(data, **{**options, "pool_type": "sum"}) / _area(options)
        if how == "float64":
            return pooling(data.astype("float64"), **options).astype("float32")
        return pooling(data, *args, **options)

    return pool


class CachedOp:
    """A hybridized network, compiled when it is called, because its inputs' shapes and types are known then."""

    mx: ModuleType
    compiled: Callable[..., Any]  # MXNet's own class

    def __init__(self, sym: Any, flags: Any = ()) -> None:
        self.sym, self.flags = sym, flags
        self.inputs = dict(flags).get("data_indices", ())
        self.by_types: dict[tuple[Any, ...], Any] = {}  # for each combination of types that the inputs have had

    def __call__(self, *args: Any, **options: Any) -> Any:
        types = tuple(args[index].dtype for index in self.inputs)
        if types not in self.by_types:
            arrays = dict(zip(self.sym.list_inputs(), args))
            self.by_types[types] = self.compiled(_compiled(self.mx, self.sym, *_known(arrays)), self.flags)
        return self.by_types[types](*args, **options)

    def _register_op_hook(self, *args: Any, **options: Any) -> None:
        """Let a function see each operator, as the program has defined it."""
        op = self.compiled(self.sym, self.flags)
        op._register_op_hook(*args, **options)
        self.inputs, self.by_types = (), {(): op}


def _compiled_first(mx: ModuleType, bind: Callable[..., Any]) -> Callable[..., Any]:
    """Let Symbol.bind or Symbol.simple_bind use the compiled graph."""
    parameters = inspect.signature(bind)

    @functools.wraps(bind)
    def compile_and_bind(self: Any, *args: Any, **options: Any) -> Any:
        given = parameters.bind(self, *args, **options).arguments
        arrays = given.get("args", {})  # of bind
        shapes, types = _known(arrays if isinstance(arrays, dict) else dict(zip(self.list_arguments(), arrays)))
        shapes.update(given.get("kwargs", {}))  # of simple_bind
        types.update(given.get("type_dict") or {})
        return bind(_compiled(mx, self, shapes, types), *args, **options)

    return compile_and_bind


def _known(arrays: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The shapes and the types of arrays."""
    return {name: a.shape for name, a in arrays.items()}, {name: a.dtype for name, a in arrays.items()}


def _compiled(mx: ModuleType, symbol: Any, shapes: Mapping[str, Any], types: Mapping[str, Any]) -> Any:
    """A graph that has the arguments, outputs and results of `symbol`, given what is known of its arguments."""
    graph = json.loads(symbol.tojson())
    pooled = [index for index, node in enumerate(graph["nodes"]) if node["op"] == "Pooling"]
    if not pooled:
        return symbol
    # Names of nodes need not be unique, so numbers replace them.
    names = {node["name"]: str(index) for index, node in enumerate(graph["nodes"]) if node["op"] == "null"}
    numbered = [{**node, "name": str(index)} for index, node in enumerate(graph["nodes"])]
    results = mx.sym.load_json(json.dumps({**graph, "nodes": numbered})).get_internals()
    infer = results.infer_shape_partial, results.infer_type_partial
    shape_of, type_of = (
        dict(zip(results.list_outputs(), function(**{names[name]: value for name, value in known.items()})[1]))
        for function, known in zip(infer, (shapes, types))
    )
    nodes: list[dict[str, Any]] = []
    places: list[int] = []  # for each node of `symbol`: the index of the one in `nodes` that has its results
    for index, node in enumerate(graph["nodes"]):
        node["inputs"] = [[places[source], *rest] for source, *rest in node["inputs"]]
        output, how = f"{index}_output", None
        if index in pooled and type_of[output]:
            how = _how(node["attrs"], shape_of[output], type_of[output])
        for part in _parts(node, how):
            nodes.append({"inputs": [[len(nodes) - 1, 0, 0]], **part})
        places.append(len(nodes) - 1)
    if len(nodes) == len(graph["nodes"]):
        return symbol
    heads = [[places[source], *rest] for source, *rest in graph["heads"]]
    arguments = [places[source] for source in graph["arg_nodes"]]
    del graph["node_row_ptr"]
    compiled = mx.sym.load_json(json.dumps({**graph, "nodes": nodes, "heads": heads, "arg_nodes": arguments}))
    return compiled if type(symbol) is mx.sym.Symbol else compiled.as_np_ndarray()


def _parts(node: dict[str, Any], how: str | None) -> list[dict[str, Any]]:
    """The nodes that compute a node's results as `how` says. Each takes the result of the one before."""
    name, attrs = node["name"], node.get("attrs", {})
    hidden = {key: value for key, value in attrs.items() if key.startswith("__")}  # such as the device

    def cast(to: str, name: str) -> dict[str, Any]:
        return {"op": "Cast", "name": name, "attrs": {"dtype": to, **hidden}}

    if how == "sum":
        divided = {"op": "_div_scalar", "name": name, "attrs": {"scalar": str(_area(attrs)), **hidden}}
        return [{**node, "name": f"{name}_sum", "attrs": {**attrs, "pool_type": "sum"}}, divided]
    if how == "float64":
        inner = {"op": "Pooling", "name": f"{name}_float64", "attrs": attrs}
        return [{**cast("float64", f"{name}_cast"), "inputs": node["inputs"]}, inner, cast("float32", name)]
    return [node]


def _how(options: Mapping[str, Any], shape: tuple[int, ...], dtype: Any) -> str | None:
    """How to pool: "sum" (and divide by the area), "float64" (and cast back), or None: as usual.

    options: of the operator, from Python or from a graph. shape: (n, c, ...), before or after pooling.
    """
    given = {name: str(value) for name, value in options.items()}
    channels_first = given.get("layout", "None") in ("None", "NCW", "NCHW", "NCDHW")
    if np.dtype(dtype) != np.float32 or not channels_first or len(shape) < 3 or shape[1] % BLOCK == 0:
        return None
    full = given.get("pooling_convention", "valid") != "valid"
    if full or any(_numbers(given.get("pad", ""))):  # windows differ in size, or contain nothing but padding
        return None
    whole = given.get("global_pool", "False") in ("True", "1")
    kernel, stride = _numbers(given.get("kernel", "")), _numbers(given.get("stride", ""))
    apart = len(stride) == len(kernel) and all(step >= size for size, step in zip(kernel, stride))
    if given.get("pool_type", "max") == "max":  # if windows overlapped, sums of gradients would be rounded differently
        return "float64" if whole or apart else None
    return "sum" if given["pool_type"] == "avg" and not whole else None


def _area(options: Mapping[str, Any]) -> int:
    """The number of elements of a window."""
    return math.prod(_numbers(str(options["kernel"])))


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]
