"""Writes CUDA files that instantiate kernels of MXNet 1.9.1 by their mangled names, and nothing else."""

from __future__ import annotations

import configparser
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

from gluon_mgpu.support.errors import Error

COMMON = ("mxnet/base.h", "mshadow/tensor.h", *(f"operator/{name}.h" for name in ("mxnet_op", "mshadow_op")))
GROUPS = configparser.ConfigParser(interpolation=None)
GROUPS.read_string(Path(__file__).with_name("groups.ini").read_text())
# A function that implements an operator; it would instantiate kernels for all types.
OPERATORS = re.compile(r"^template ?<>\n(?:inline )?void \w+<gpu>\(.*?^\}\n", re.M | re.S)


def write(names: Iterable[str], source: Path, folder: Path) -> tuple[dict[str, list[str]], list[str]]:
    """Write a file GROUP.cu for each group of kernels. names: mangled. source: MXNet's folder.

    Returns the names in each group, and the declarations of those that no group can make.
    """
    names = list(dict.fromkeys(names))
    groups: dict[str, list[str]] = {}
    lines: dict[str, list[str]] = {}
    unknown = []
    for name, declaration in zip(names, demangled(names)):
        group = next((group for group in GROUPS.sections() if re.search(GROUPS[group]["pattern"], declaration)), "")
        if not group:
            unknown.append(declaration)
            continue
        groups.setdefault(group, []).append(name)
        if declaration.startswith("void "):  # others are not templates; their file defines them
            declared = declaration.replace("(anonymous namespace)::", "")
            lines.setdefault(group, []).append(f"template __global__ {declared};")
    for group in groups:
        headers = GROUPS[group]["headers"].split()
        included = [f'#include "{name}"' for name in COMMON] + [_include(source / "src", name) for name in headers]
        text = "\n".join([*included, *lines.get(group, ()), ""])
        (folder / f"{group}.cu").write_text(text)
    return groups, unknown


def demangled(names: list[str]) -> list[str]:
    """The C++ declarations of mangled names."""
    try:
        done = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
    except OSError:
        raise Error("c++filt is missing on this machine: `apt install binutils` installs it") from None
    return done.stdout.splitlines()


def _include(source: Path, path: str) -> str:
    """A line that includes a header, or the part of a .cu file before its operators."""
    if not path.endswith(".cu"):
        return f'#include "{path}"'
    text, operators, _ = (source / path).read_text().partition("NNVM_REGISTER_OP")
    text = OPERATORS.sub("", text)
    beside = Path(path).parent
    text = re.sub(
        r'#include "(.*?)"',
        lambda match: f'#include "{beside / match[1]}"' if (source / beside / match[1]).exists() else match[0],
        text,
    )
    return text + "}}" * bool(operators and "}  // namespace op" not in text)  # closes mxnet and op
