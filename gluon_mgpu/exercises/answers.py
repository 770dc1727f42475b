"""Learners' answers: in a Python file, in the cells of a notebook, and in folders, which may be those of students."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import tokenize
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import platformdirs

from gluon_mgpu.exercises import NAMES, solution
from gluon_mgpu.support import files, log
from gluon_mgpu.support.errors import UsageError, command

SUFFIXES = (".py", ".ipynb")  # of files with answers
LARGEST = 100 << 20  # bytes of a file with answers


class Answer(NamedTuple):
    """A learner's answer. label: what messages call it. problem: why it cannot be graded; then, it has no name.
    student: the subfolder that contains it, if a folder is graded; after the folder, if several are."""

    path: str
    cell: int | None = None  # its number in a notebook, from 1
    name: str = ""  # the exercise
    code: str = ""
    problem: str = ""
    student: str = ""

    @property
    def label(self) -> str:
        return f"{self.path}, cell {self.cell}" if self.cell else self.path

    @property
    def is_solved(self) -> bool:
        """Whether exactly this code was graded as correct on this machine."""
        return self._record().exists()

    def record(self) -> None:
        """Remember that this code is correct."""
        with suppress(OSError):  # a read-only home folder
            self._record().parent.mkdir(parents=True, exist_ok=True)
            self._record().touch()

    def _record(self) -> Path:
        digest = hashlib.sha256(self.code.encode())
        for path in sorted(Path(__file__).parent.rglob("*.py")):  # with other cases, it may not be correct
            digest.update(path.read_bytes())
        return platformdirs.user_cache_path("gluon_mgpu") / "solved" / digest.hexdigest()


def in_file(path: str) -> list[Answer]:
    """The answers in a Python file or a notebook, or one with a problem, if there are none."""
    try:
        if os.path.getsize(path) > LARGEST:
            return [Answer(path, problem=f"larger than {LARGEST >> 20} MB")]
        content = files.read(path)
        is_notebook = path.endswith(".ipynb")
        encoding = "utf-8-sig" if is_notebook else tokenize.detect_encoding(io.BytesIO(content).readline)[0]
        text = content.decode(encoding)
    except OSError as error:
        return [Answer(path, problem=f"cannot be read ({error.strerror})")]
    except (ValueError, SyntaxError):  # SyntaxError: of an encoding
        return [Answer(path, problem="not UTF-8 text")]
    cells: list[tuple[int | None, str]] = [(None, text)]
    if is_notebook:
        try:
            numbered = enumerate(json.loads(text)["cells"], 1)
            cells = [(number, "".join(cell["source"])) for number, cell in numbered if cell["cell_type"] == "code"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return [Answer(path, problem="not a notebook")]
    found = []
    for number, code in cells:
        if number:
            code = re.sub(r"^[%!].*", "", code, flags=re.MULTILINE)  # IPython's commands, such as %%time
        first = re.search(r'^"""Exercise (\w+):', code, re.MULTILINE)  # perhaps after comments or imports
        if re.search("[\0\ud800-\udfff]", code):  # a surrogate in a notebook
            found.append(Answer(path, number, problem="not text"))
        elif first and first[1] in NAMES:
            found.append(Answer(path, number, first[1], code))
        elif first:
            found.append(Answer(path, number, problem=f"{first[1]} is not an exercise; {_how_to_begin()}"))
    return found or [Answer(path, problem=f"does not name an exercise; {_how_to_begin()}")]


def _how_to_begin() -> str:
    return f'an answer begins with """Exercise NAME:, as written by `{command("exercise start")}`'


def find(paths: Sequence[str]) -> list[Answer]:
    """The answers in files, and in all Python files and notebooks in folders, with their subfolders: see `_in_folder`.
    Raises UsageError if a path does not exist, or if a folder contains no such file."""
    found: dict[str, list[Answer]] = {}  # {file: its answers}: a file counts once, however often it is given
    several = sum(map(os.path.isdir, paths)) > 1
    for path in paths:
        if not os.path.exists(path):
            raise UsageError(None, path, "does not exist")
        prefix = os.path.join(path, "") if several else ""  # two folders may have students of the same name
        of_path = _in_folder(path, prefix) if os.path.isdir(path) else {path: in_file(path)}
        for file, answers in of_path.items():
            found.setdefault(file, answers)
    return [answer for answers in found.values() for answer in answers]


def _in_folder(path: str, prefix: str) -> dict[str, list[Answer]]:
    """The answers in each file of a folder. If some of its subfolders contain answers, each of the others has an answer
    with a problem, so that no student is missing. Copies of our solutions have a problem, too.

    prefix: of the students' names.
    """
    top, found = Path(path), dict[str, list[Answer]]()
    inside, subfolders = _search(str(top))
    if not inside:
        raise UsageError(None, path, f"contains no file that ends with {' or '.join(SUFFIXES)}")
    for file, in_checkout in sorted(inside):
        student = _student(file.relative_to(top))
        for answer in in_file(str(file)):
            if answer.name or not in_checkout:
                own = _own(answer)._replace(student=student and prefix + student)
                found.setdefault(str(file), []).append(own)
    if any(file.parent != top for file, _ in inside):
        with_answers = {Path(file).relative_to(top).parts[0] for file in found}
        for name in sorted({*subfolders} - with_answers):
            if not name.startswith("_"):
                problem = f"contains no {' or '.join(SUFFIXES)} file with an answer of its own"
                folder = str(top / name)
                found[folder] = [Answer(folder, problem=problem, student=prefix + name)]
    return found


def _own(answer: Answer) -> Answer:
    """The answer, or one with a problem if it is a copy of our solution."""
    if answer.name and answer.code.strip() == solution(answer.name).strip():
        return answer._replace(name="", code="", problem=f"is our solution of {answer.name}; not graded")
    return answer


def _student(file: Path) -> str:
    """The student of a file in a folder: its subfolder, or what a learning platform puts before the file's name: in
    ada_1234_tree.py, the part before the number."""
    flat = re.match(r"(.+?)_(?:LATE_)?\d{2,}_", file.name)
    return file.parts[0] if len(file.parts) > 1 else flat[1] if flat else ""


def _search(top: str) -> tuple[list[tuple[Path, bool]], list[str]]:
    """Search a folder and its subfolders, except hidden ones, virtual environments and copies of this package.

    Returns the Python files and notebooks, each with whether it is in a checkout of this project, where files without
    answers are ours; and the names of the folder's own subfolders.
    """
    found: list[tuple[Path, bool]] = []
    of_top: list[str] = []
    checkouts: set[str] = set()  # and their subfolders
    for parent, subfolders, names in os.walk(top, followlinks=True):
        is_environment = "pyvenv.cfg" in names
        if is_environment or Path(parent, "exercises", "mistakes.ini").exists():
            log.say(f"{parent}: skipped; it is {'an environment' if is_environment else 'a copy of gluon_mgpu'}")
            subfolders.clear()
            continue
        if os.path.dirname(parent) in checkouts or Path(parent, "gluon_mgpu", "exercises").is_dir():
            checkouts.add(parent)
        subfolders[:] = [name for name in subfolders if name[0] != "." and _is_searched(parent, name, top)]
        if parent == top:
            of_top = [*subfolders]
        shown = [name for name in names if name.endswith(SUFFIXES) and not name.startswith(".")]
        found += [(Path(parent, name), parent in checkouts) for name in shown]
    return found, of_top


def _is_searched(parent: str, name: str, top: str) -> bool:
    """Whether to search a subfolder. Links are not followed, except from the top to a folder elsewhere: one that leads
    into the top, or to a folder that contains it, would find the same answers again."""
    link = os.path.join(parent, name)
    if not os.path.islink(link):
        return True
    ends = os.path.realpath(top), os.path.realpath(link)
    if parent == top and os.path.commonpath(ends) not in ends:
        return True
    log.say(f"{link}: a link to a folder, which is not followed")
    return False
