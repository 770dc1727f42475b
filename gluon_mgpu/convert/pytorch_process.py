"""A program with PyTorch and without MXNet, which checks what `to_pytorch.write` has written.

It loads BASE.py and BASE.safetensors as `net`, and runs the tasks that its arguments name, such as `outputs`. Each one
reads and writes files whose names begin with BASE.
"""

from __future__ import annotations

import json
import runpy
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_model
from torch import Tensor, nn
from torch.nn import functional as F

OPSET = 17
SYMBOLICS: dict[str, Callable[..., Any]] = {  # operators that the exporter lacks
    "trunc": lambda g, x: g.op("Mul", g.op("Sign", x), g.op("Floor", g.op("Abs", x))),
    "expm1": lambda g, x: g.op("Sub", g.op("Exp", x), g.op("Constant", value_t=torch.tensor(1.0))),
}


def load(base: str) -> nn.Module:
    """The network in evaluation mode."""
    for name in ("kaiming_uniform_", "uniform_", "normal_"):  # random values would be replaced
        setattr(nn.init, name, lambda array, *_, **__: array)
    net = runpy.run_path(f"{base}.py")["Net"]()
    load_model(net, f"{base}.safetensors")
    return net.eval()


def stored(base: str) -> list[str]:
    """The keys of the file: one for each array, even if layers share it."""
    with safe_open(f"{base}.safetensors", "np") as file:
        return list(file.keys())


def samples(base: str) -> list[list[Tensor]]:
    """The inputs of each sample."""
    found: dict[str, list[Tensor]] = {}
    with np.load(f"{base}.inputs.npz") as arrays:
        for name in arrays:
            found.setdefault(name.split()[0], []).append(torch.from_numpy(arrays[name]))
    return list(found.values())


def call(net: nn.Module, inputs: Sequence[Tensor]) -> list[Tensor]:
    outputs = net(*inputs)
    return [*outputs] if isinstance(outputs, tuple) else [outputs]


def outputs(net: nn.Module, base: str) -> None:
    """Compute the outputs for each sample, as BASE.outputs.npz."""
    found = {}
    for i, inputs in enumerate(samples(base)):
        with torch.no_grad():
            found.update({f"{i} {k}": output.detach().numpy() for k, output in enumerate(call(net, inputs))})
    np.savez(f"{base}.outputs.npz", **found)


def gradients(net: nn.Module, base: str) -> None:
    """Compute the gradients of what trains and of the inputs, as BASE.gradients/KEY.npy and BASE.gradients/input K.npy.

    pytorch.json says which parameters train, and which outputs have gradients; or it has the failure.
    """
    folder = Path(f"{base}.gradients")
    settings = json.loads((folder / "mxnet.json").read_text())
    if "failure" in settings:
        return
    try:
        result = _gradients(net, stored(base), folder, settings)
    except Exception as error:  # of any type
        result = {"failure": str(error).strip().partition("\n")[0]}
    (folder / "pytorch.json").write_text(json.dumps(result))


def _gradients(net: nn.Module, keys: list[str], folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    dtype = getattr(torch, settings["dtype"])
    if dtype == torch.float64:  # the module's float32 stands for any type
        torch.float32, torch.Tensor.float = torch.float64, torch.Tensor.double
        torch.set_default_dtype(dtype)
    net.to(dtype).train(settings["training"])
    F.dropout, F.rrelu = lambda x, *_, **__: x, lambda x, low, high, *_: F.leaky_relu(x, (low + high) / 2)
    for module in net.modules():
        if isinstance(module, nn.RNNBase):
            module.dropout = 0.0
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    with np.load(folder / "inputs.npz") as arrays:
        given = {name: torch.from_numpy(arrays[name]) for name in arrays}
    inputs = [x for name, x in given.items() if name.startswith("input")]
    parameters = dict(net.named_parameters(remove_duplicate=False))
    variables = {key: parameters[key] for key in keys if key in parameters and parameters[key].requires_grad}
    for k, x in enumerate(inputs):
        if x.is_floating_point():
            variables[f"input {k}"] = x.requires_grad_()
    for key, array in variables.items():
        array.register_post_accumulate_grad_hook(_saving(folder / f"{key}.npy"))
    found = {k: y for k, y in enumerate(call(net, inputs)) if y.requires_grad}
    if products := [(y * given[f"head {k}"]).sum() for k, y in found.items() if f"head {k}" in given]:
        torch.stack(products).sum().backward()  # given gradients of tensors, `backward` would import sympy
    return {"trained": [key for key in variables if not key.startswith("input ")], "differentiable": [*found]}


def _saving(file: Path) -> Callable[[Tensor], None]:
    """A hook that moves a gradient into a file, so that memory never holds all gradients."""

    def save(array: Tensor) -> None:
        np.save(file, array.grad.numpy())
        array.grad = None

    return save


def export(net: nn.Module, base: str) -> None:
    """Write BASE.onnx with the options of BASE.json."""
    options = json.loads(Path(f"{base}.json").read_text(encoding="utf-8"))
    # JSON has no integers as keys
    axes = {name: {int(k): size for k, size in sizes.items()} for name, sizes in options["dynamic_axes"].items()}
    warnings.simplefilter("ignore")  # the exporter warns that it is no longer developed, and about sizes that vary
    for name, symbolic in SYMBOLICS.items():
        torch.onnx.register_custom_op_symbolic(f"aten::{name}", symbolic, OPSET)
    F.adaptive_avg_pool2d = adaptive_avg_pool2d
    options |= {"dynamic_axes": axes, "opset_version": OPSET, "dynamo": False}
    try:
        torch.onnx.export(net, tuple(samples(base)[-1]), f"{base}.onnx", **options)
    except Exception as error:  # of any type
        sys.exit(f"error: {str(error).strip().splitlines()[0].partition('. Please')[0]}")


def adaptive_avg_pool2d(x: Tensor, size: Any, pool: Callable[..., Tensor] = F.adaptive_avg_pool2d) -> Tensor:
    """The exporter needs a size that divides the image's; so other pooling becomes two products of matrices."""

    def means(n: int, count: int) -> Tensor:
        """A matrix, whose product with n numbers is their adaptive pooling."""
        ends = [(i * n // count, -(-(i + 1) * n // count)) for i in range(count)]
        return torch.tensor([[(start <= k < end) / (end - start) for k in range(n)] for start, end in ends])

    if size == 1:
        return pool(x, size)
    height, width = (size, size) if isinstance(size, int) else size
    return means(int(x.shape[2]), height) @ x @ means(int(x.shape[3]), width).T


def explain(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error with the line of forward, which names the layer."""
    lines = [frame.line for frame in traceback.extract_tb(trace) if frame.filename == f"{sys.argv[1]}.py"]
    print(f"{kind.__name__}: {error}".splitlines()[0], f"in: {lines[-1]}" if lines else "", file=sys.stderr)


if __name__ == "__main__":
    sys.excepthook = explain
    torch.set_num_threads(1)  # several threads would wait for each other on a busy machine
    network = load(sys.argv[1])
    for task in sys.argv[2:]:
        {"outputs": outputs, "gradients": gradients, "export": export}[task](network, sys.argv[1])
