"""Converts a run, or any exported Gluon network, to files for Gluon, PyTorch or ONNX Runtime.

    network = convert.from_run("runs/first")  # or from_files("net-symbol.json", "net-0000.params", (3, 224, 224))
    convert.save(network, "pytorch", "lenet")

Each target is a module that writes files and computes scores from these files. `save` compares the scores with MXNet's.
"""

from __future__ import annotations

import errno
import importlib.machinery
import importlib.util
import keyword
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import mxnet as mx
import numpy as np

from gluon_mgpu.convert import to_gluon, to_onnx, to_pytorch
from gluon_mgpu.convert.exported import Exported, from_files, from_run, last_line
from gluon_mgpu.support.errors import Error, UsageError

__all__ = ["TARGETS", "TOLERANCE", "Exported", "check_prefix", "from_files", "from_run", "save"]
TARGETS = {"gluon": to_gluon, "pytorch": to_pytorch, "onnx": to_onnx}
TOLERANCE = 1e-4  # largest relative error of an example's scores; rounding alone can cause 1e-5
SPREAD = 3  # how much more one float32 program can round than another one, which sums in another order
MOST_ROUNDING = 1e-2  # if float32 is farther from float64, the network magnifies rounding, and no comparison is sure


def check_prefix(to: str, prefix: str) -> list[Path]:
    """Returns the paths of the files that `save` will write.

    Raises UsageError if one of the files exists, if the prefix does not end with a valid name, if its folder does not
    exist, or if a required package is missing.
    """
    path, missing = Path(prefix), [name for name in TARGETS[to].PACKAGES if not importlib.util.find_spec(name)]
    if os.path.basename(prefix) in ("", ".", ".."):
        raise UsageError(None, prefix or repr(prefix), f"must end with a name, such as {path / 'lenet'}")
    if to == "pytorch" and not (path.name.isidentifier() and not keyword.iskeyword(path.name)):
        raise UsageError(None, prefix, "cannot be the name of a Python module; use a name such as lenet")
    if not path.parent.is_dir():
        raise UsageError(None, prefix, f"folder {path.parent} does not exist")
    files = [Path(prefix + suffix) for suffix in TARGETS[to].SUFFIXES]
    for file in files:
        if os.path.lexists(file):
            raise UsageError(None, prefix, f"{file} already exists; use another prefix")
    if to == "pytorch" and _is_installed(path.name):
        raise UsageError(None, prefix, f"{path.name}.py would hide an installed module; use a name such as lenet")
    if to == "pytorch" and (path / "__init__.py").exists():
        raise UsageError(None, prefix, f"the package {path} would hide {path.name}.py; use another name")
    if missing:
        advice = f"required packages are missing: {', '.join(missing)}; docs/convert.md shows how to install them"
        raise UsageError("to", to, advice)
    return files


def _is_installed(name: str) -> bool:
    """Whether Python has a module of this name, such as torch, outside the current folder."""
    folders = [folder for folder in sys.path if Path(folder).resolve() != Path.cwd()]
    spec = importlib.machinery.PathFinder.find_spec(name, folders)
    return name in sys.builtin_module_names or spec is not None and spec.origin is not None


def save(network: Exported, to: str, prefix: str, tolerance: float = TOLERANCE) -> str:
    """Write the network to files whose paths start with prefix. Returns a report of at least two lines.

    to: "gluon" (PREFIX-symbol.json, PREFIX-0000.params), "pytorch" (PREFIX.py, PREFIX.safetensors) or "onnx"
    (PREFIX.onnx). The files are loaded back, and their scores are compared with MXNet's scores, before any file is
    moved into place. tolerance: the largest relative error (`Exported.relative_error`). A larger one is accepted if
    the file's scores are at most SPREAD times as far from MXNet's in float64 as MXNet's in float32, which are within
    1%.

    Raises UsageError in the same cases as `check_prefix`, or if layers cannot be converted; Error if the scores differ
    by more than the tolerance, or if the files cannot be written. On failure, no files are left behind.
    """
    target, files = TARGETS[to], check_prefix(to, prefix)
    try:
        with tempfile.TemporaryDirectory(prefix=".convert-", dir=files[0].parent) as folder:
            base = os.path.join(folder, Path(prefix).name)
            converted, found = _written(network, target, base)
            remarks = [_compared_scores(converted, found, prefix, tolerance)]
            if to == "pytorch":
                remarks += _compared_training(converted, base, prefix, tolerance)
            _move({base + suffix: file for suffix, file in zip(target.SUFFIXES, files)})
    except SyntaxError as failure:  # a rule wrote wrong code
        line = (failure.text or "").strip().partition("\n")[0]
        raise Error(f"{prefix}: cannot be written (wrong Python code: {failure.msg}: {line})") from None
    except (OSError, mx.MXNetError) as failure:
        reason = getattr(failure, "strerror", None) or last_line(failure)
        if quantized := [name for name, array in network.params.items() if array.dtype == np.int8]:
            reason += f"; these parameters are int8: {', '.join(quantized)}"
        raise Error(f"{prefix}: cannot be written ({reason})") from None
    if len(network.samples) > len(converted.samples):
        remarks.append("the files accept only inputs of the given size")
    remarks += _remarks(converted)
    usage = target.USAGE.format(prefix=prefix, inputs=network.inputs)
    return "\n".join([f"wrote {' and '.join(map(str, files))}; {remarks[0]}", *remarks[1:], usage])


def _move(files: dict[str, Path]) -> None:
    """Rename files: all of them or none. Raises OSError if that fails, or if one of the new names exists by now."""
    moved: list[Path] = []
    try:
        for source, file in files.items():
            if os.path.lexists(file):
                raise FileExistsError(errno.EEXIST, f"{file} was created meanwhile")
            moved.append(file)
            os.replace(source, file)
    except BaseException:  # also Ctrl-C
        for file in moved:
            file.unlink(missing_ok=True)
        raise


def _written(network: Exported, target: ModuleType, base: str) -> tuple[Exported, list[list[np.ndarray]]]:
    """Write a network's files and compute their outputs. Returns the network with those samples that the files accept.

    If a network cannot be converted for inputs of different sizes, it is converted for inputs of one size.
    """
    try:
        target.write(network, base)
        return network.compute(), target.outputs(network, base)
    except (Error, mx.MXNetError) as failure:
        single = network.of_one_size()
        if len(single.samples) == len(network.samples) or not getattr(failure, "fixed_size", True):
            raise
        target.write(single, base)
        return single.compute(), target.outputs(single, base)


def _compared_scores(network: Exported, found: list[list[np.ndarray]], prefix: str, tolerance: float) -> str:
    """How near the scores are to MXNet's. Raises Error if they are too far off."""
    error = network.relative_error(found)
    near = error <= tolerance  # not if it is NaN
    if not near:
        exact = network.in_float64()
        rounding = exact.relative_error([outputs for _, outputs in network.samples]) if exact else 0.0
        if not exact or rounding > MOST_ROUNDING or not exact.relative_error(found) <= SPREAD * rounding:
            what = f"for {network.worst_input(found)}, scores differ from MXNet's by {error:.2g} (relative)"
            if rounding > MOST_ROUNDING:
                what += (
                    f"; MXNet's float32 scores differ from its float64 scores by {rounding:.2g}, so this says little"
                )
            ties = network.ties()
            advice = "" if ties else "; a larger --tolerance accepts them"
            raise Error(f"{prefix}: {'; '.join(ties) or what}; nothing was written{advice}")
    return (
        f"on {sum(network.batch_sizes)} inputs, scores differ from MXNet's by at most {error:.1e} (relative error)"
        + ("" if near else "; MXNet's float64 scores are about as far from its float32 scores")
    )


def _compared_training(network: Exported, base: str, prefix: str, tolerance: float) -> list[str]:
    """What was not compared in the training. Raises Error if a PyTorch module would train differently."""
    words, tolerable, uncompared = to_pytorch.differences(network, base, tolerance)
    if words:
        what = "; ".join(words[:3]) + f"; and {len(words) - 3} more" * (len(words) > 3)
        advice = "; if MXNet's gradients are wrong, a larger --tolerance accepts these" * tolerable
        raise Error(f"{prefix}: it would train differently: {what}; nothing was written{advice}")
    return [uncompared] if uncompared else []


def _remarks(network: Exported) -> Iterator[str]:
    """What else a user should know about a converted network."""
    if any(node.has_lengths for node in network.graph.nodes):
        yield "MXNet ignores the lengths of recurrent layers on CPUs, so the check used full lengths"
    if {*network.batch_sizes} == {1}:
        yield "the files accept only one example at a time"
    if damaged := [name for name, array in network.params.items() if np.isnan(array).any()]:
        yield f"the parameters contain NaN: {', '.join(damaged)}"
    if constant := network.nearly_constant():
        yield f"the check says little about {', '.join(constant)}: almost the same for all inputs"
