"""Writes a network as a PyTorch module: the graph as readable code, and the parameters as a safetensors file."""

from __future__ import annotations

import os
import sys
import textwrap
from pathlib import Path

import numpy as np

import gluon_mgpu.convert.gradients as gradients
from gluon_mgpu import __version__
from gluon_mgpu.convert.blocks import find
from gluon_mgpu.convert.converter import Converter
from gluon_mgpu.convert.exported import Exported, release_memory
from gluon_mgpu.convert.loops import find_loops, roll
from gluon_mgpu.convert.statements import TAKEN, identifier, join
from gluon_mgpu.convert.writer import WORDS, functions_of, methods
from gluon_mgpu.support import subprocesses

SUFFIXES = (".py", ".safetensors")
PACKAGES = ("torch", "safetensors", "ruff")
USAGE = "the docstring of {prefix}.py shows how to load the network"

MODULE = '''"""A network converted from MXNet by gluon_mgpu {version}.

To load the network and its parameters:

    from safetensors.torch import load_model

    from {name} import Net

    net = Net()
    load_model(net, "{name}.safetensors")
    net.eval()  # for inference; omit it to continue the training
"""

import torch
from torch import nn
from torch.nn import functional as F
{definitions}

class Net(nn.Module):
    """{docstring}"""

{net}
'''
LINE_LENGTH = 100


def _write_formatted(file: Path, code: str) -> None:
    """Write code that ruff has formatted."""
    compile(code, file.name, "exec")  # raises SyntaxError
    file.write_text(code, encoding="utf-8")
    command = [sys.executable, "-m", "ruff", "format", "--isolated", f"--line-length={LINE_LENGTH}", str(file)]
    subprocesses.raise_for_status("ruff", subprocesses.run(command))


def write(network: Exported, base: str) -> None:
    """Write BASE.py and BASE.safetensors, whose metadata has MXNet's names. BASE's last part must be an identifier.

    Raises Refused if operators cannot be converted.
    """
    from safetensors.numpy import save_file

    converter = Converter(network)
    net = converter.convert()
    taken = {"Net", *WORDS}
    classes = roll(net, taken) + find(net, taken)
    find_loops(net)  # of the blocks
    used, layers = {*TAKEN}, net.layers()
    for layer in layers:
        layer.name = identifier(layer.name, used)
    inputs = [f"{identifier(name, set())} ({', '.join(map(str, network.axes(name)))})" for name in network.inputs]
    outputs = ", ".join(identifier(name, set()) for name in network.outputs)
    docstring = textwrap.wrap(f"Inputs: {', '.join(inputs)}. Outputs: {outputs}.", LINE_LENGTH - 10)
    words = {*WORDS, *(block.name for block in classes)}
    blocks = [f"class {block.name}(nn.Module):\n{methods(block, words, classes)}" for block in classes]
    body = methods(net, words, classes)
    definitions = [*functions_of("\n".join([*blocks, body])), *blocks]
    code = MODULE.format(
        version=__version__,
        name=os.path.basename(base),
        definitions="".join(f"\n\n{definition}\n" for definition in definitions),
        docstring="\n    ".join(docstring) + "\n    " * (len(docstring) > 1),
        net=body,
    )
    _write_formatted(Path(f"{base}.py"), code)
    state = {join(layer.name, key): array for layer in layers for key, array in layer.state.items()}
    metadata = {key: converter.names[id(array)] for key, array in state.items() if id(array) in converter.names}
    save_file(state, f"{base}.safetensors", metadata or None)  # it cannot read an empty one


def run(network: Exported, base: str, *tasks: str) -> None:
    """Run tasks of pytorch_process.py, which load the written files."""
    inputs = {f"{i} {k}": X for i, sample in enumerate(network.samples) for k, X in enumerate(sample.inputs)}
    np.savez(f"{base}.inputs.npz", **inputs)
    program = str(Path(__file__).with_name("pytorch_process.py"))
    command = subprocesses.python(f"import runpy; runpy.run_path({program!r}, run_name='__main__')")
    subprocesses.raise_for_status("PyTorch", subprocesses.run([*command, base, *tasks]))


def outputs(network: Exported, base: str) -> list[list[np.ndarray]]:
    """Load the written files in a new process, and compute the outputs for each of the network's samples."""
    gradients.write_reference(network, base)
    release_memory()
    run(network, base, "outputs", "gradients")
    with np.load(f"{base}.outputs.npz") as arrays:
        return [[arrays[f"{i} {k}"] for k in range(len(sample.outputs))] for i, sample in enumerate(network.samples)]


def differences(network: Exported, base: str, tolerance: float) -> gradients.Differences:
    """How the written module trains differently. `outputs` has run before."""
    if gradients.failed(base):  # such as an operator that PyTorch computes only in float32
        gradients.write_reference(network, base, ["float32"])
        run(network, base, "gradients")
    return gradients.differences(network, base, tolerance)
