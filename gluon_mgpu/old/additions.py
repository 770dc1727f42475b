"""Reads the packages that the user adds, and leaves out those that the environment has in a version of its own."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from gluon_mgpu.support.errors import UsageError

MXNET = r"mxnet(-(mkl|native|cu\d+(mkl)?))?"  # packages that contain the module mxnet
FILE = re.compile(r"\s*(-r|--requirement|-c|--constraint)[\s=]*(.+?)\s*$")  # a line that names another file
BOMS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}


def name_of(requirement: str) -> str:
    """The package's name as the index spells it: "Scikit_Learn>=1" -> "scikit-learn"; empty for an option or a URL."""
    name = re.match(r"\s*([A-Za-z0-9][\w.-]*)(?!\S*://)", requirement)
    return re.sub("[-_.]+", "-", name[1]).lower() if name else ""


def is_option(line: str) -> bool:
    """Whether a line of a requirements file adds no package, such as --index-url URL."""
    return line.startswith("-") and not line.startswith(("-e", "--editable"))


def check(extra: Iterable[str]) -> None:
    """Raise UsageError for what is not a package, such as an option of pip, or is another MXNet."""
    for requirement in extra:
        if not requirement.strip() or requirement.lstrip().startswith("-"):
            raise UsageError("extra", requirement, "must be a package, such as gluoncv==0.10.5")
        if re.fullmatch(MXNET, name_of(requirement)):
            raise UsageError("extra", requirement, "the environment has MXNet 1.9.1, and works with no other; omit it")


def read(path: str | Path) -> tuple[list[str], list[str]]:
    """The requirements and the constraints in a file, and in the files that it names, without comments.

    Raises UsageError if a file cannot be read.
    """
    found: tuple[list[str], list[str]] = ([], [])
    _read(Path(path), found, is_constraint=False, inside=())
    return found


def _read(path: Path, found: tuple[list[str], list[str]], is_constraint: bool, inside: Sequence[Path]) -> None:
    try:
        content = path.read_bytes()
        encoding = next((name for bom, name in BOMS.items() if content.startswith(bom)), "utf-8")
        text = content.decode(encoding)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise UsageError("requirements", path, f"cannot be read ({reason})") from None
    for line in re.sub(r"\\\r?\n", " ", text).splitlines():
        line = re.sub(r"(^|\s)#.*", "", line).strip()
        other = FILE.match(line)
        if other and "://" not in other[2]:
            target = path.parent / other[2]
            if target.resolve() not in inside:  # files may name each other
                _read(target, found, is_constraint or "-c" in other[1], [*inside, path.resolve()])
        elif line:
            found[is_constraint].append(line)


def split(requirements: Iterable[str], pinned: Sequence[str]) -> tuple[list[str], list[str]]:
    """(those to install, those that the environment has). pinned: the environment's own requirements."""
    names = {name_of(requirement) for requirement in pinned}
    install: list[str] = []
    has: list[str] = []
    for requirement in requirements:
        name = name_of(requirement)
        (has if name in names or re.fullmatch(MXNET, name) else install).append(requirement)
    return install, has


def differing(has: Iterable[str], pinned: Sequence[str]) -> Iterator[str]:
    """Describes each of these requirements that asks for another version: "numpy==1.16.4 (1.19.5)"."""
    versions = dict(requirement.split("==") for requirement in pinned if "==" in requirement)
    for requirement in has:
        text, name = requirement.partition(";")[0].strip(), name_of(requirement)
        version = versions.get(name, "1.9.1")  # of MXNet, by another name
        if text.replace(" ", "").lower() not in (name, f"{name}=={version}"):
            yield f"{text} ({version})"
