"""Exercises that are graded automatically. `solutions` has the tasks and our answers, known.txt the known mistakes as
edits of them, and mistakes.ini their explanations. `steps`, `sums` and `processes` have the hidden cases: one function
per exercise, named after it. `diagnosis` compares an answer with our solution and the known mistakes on each case. An
answer begins with the exercise's docstring; the cases call its function that is named as the solution's last function.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import os
import re
import tokenize
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import platformdirs

from gluon_mgpu import __version__
from gluon_mgpu.support import files, log
from gluon_mgpu.support.errors import UsageError, command

# {lesson page: its exercises}, in the order of the course
ON_PAGE = {
    "from-scratch": ("split", "allreduce", "step", "predict", "accumulate"),
    "gluon": ("replicas", "stats"),
    "pytorch": ("process",),
    "asynchrony": ("timing", "overlap"),
    "rings": ("tree", "ring", "reduce_scatter", "buckets"),
    "zero": ("zero1",),
    "partition": ("block",),
    "hybrid": ("hybrid",),
}
PAGES = {name: page for page, names in ON_PAGE.items() for name in names}
NAMES = tuple(PAGES)
SUFFIXES = (".py", ".ipynb")  # of files with answers
LARGEST = 100 << 20  # bytes of a file with answers


class Mistake(Exception):
    """A mistake in an answer. name: its entry in mistakes.ini. case: the input, and the expected and actual values."""

    def __init__(self, name: str, case: str) -> None:
        super().__init__(f"{name}: {case}")
        self.name, self.case = name, case


def solution(name: str) -> str:
    """The code of our solution."""
    return (Path(__file__).parent / "solutions" / f"{name}.py").read_text()


@cache
def known(name: str) -> list[tuple[str, str]]:
    """The known mistakes: pairs of a name in mistakes.ini and an answer's code. Each is an edit of our solution and, if
    it fits, of each correct answer in known.txt."""
    text = (Path(__file__).parent / "known.txt").read_text()
    found = re.findall(rf"^## {name}: (\S+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    wrong = [(mistake, code) for mistake, code in found if mistake != "correct"]
    edits = [(mistake, code) for mistake, code in wrong if code.startswith("< ")]  # the others are whole functions
    answers = [(mistake, edited(solution(name), code)) for mistake, code in wrong]
    for base in (edited(solution(name), code) for mistake, code in found if mistake == "correct"):
        answers += [(mistake, edited(base, code)) for mistake, code in edits]
    return [(mistake, code) for mistake, code in answers if code]


def edited(code: str, change: str) -> str:
    """Apply a change to an answer: pairs of lines "< OLD" and "> NEW", or code that replaces its function. Returns ""
    if a line to replace does not occur."""
    edits = re.findall(r"((?:^< .*\n)+)((?:^>.*\n)+)", change, re.MULTILINE)
    if not edits:
        return f"{code}\n{change}"
    for old, new in edits:
        old, new = (re.sub(r"^[<>] ?", "", lines, flags=re.MULTILINE)[:-1] for lines in (old, new))
        if old not in code:
            return ""
        code = code.replace(old, new, 1)
    return code


def title(name: str) -> str:
    """The title of an exercise: its task in one line."""
    text = solution(name)[len(f'"""Exercise {name}: ') :].splitlines()[0].rstrip(".")
    return text[0].upper() + text[1:]


@cache
def answer_of(name: str) -> ast.FunctionDef:
    """The function that a learner has to write: the solution's last function."""
    functions = [node for node in ast.parse(solution(name)).body if isinstance(node, ast.FunctionDef)]
    return functions[-1]


def skeleton(name: str) -> str:
    """The solution, without the code of its last function."""
    docstring = answer_of(name).body[0]
    kept = solution(name).splitlines()[: docstring.end_lineno]
    return "\n".join([*kept, '    raise NotImplementedError("write this function")', ""])


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
        digest = hashlib.sha256(f"{__version__}\n{self.code}".encode()).hexdigest()
        return platformdirs.user_cache_path("gluon_mgpu") / "solved" / digest


def answers(path: str) -> list[Answer]:
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
    """The answers in files, and in all Python files and notebooks in folders, with their subfolders. In folders, copies
    of this package are skipped, with a notice, and copies of our solutions have a problem. If some subfolders contain
    answers, each of the others has one with a problem, so that no student is missing. Raises UsageError if a path does
    not exist, or if a folder contains no such file."""
    found: dict[str, list[Answer]] = {}  # {file: its answers}
    empty: list[Answer] = []
    several = sum(map(os.path.isdir, paths)) > 1  # folders, which may have students of the same name
    for path in paths:
        if not os.path.exists(path):
            raise UsageError(None, path, "does not exist")
        if not os.path.isdir(path):
            found.setdefault(path, answers(path))
            continue
        prefix = os.path.join(path, "") if several else ""
        searched = list(_folders(path))
        inside = sorted((folder / name, in_checkout) for folder, names, in_checkout in searched for name in names)
        if not inside:
            raise UsageError(None, path, f"contains no file that ends with {' or '.join(SUFFIXES)}")
        for file, in_checkout in inside:
            kept = [_own(answer) for answer in answers(str(file)) if answer.name or not in_checkout]
            if kept:
                student = _student(file.relative_to(path))
                found.setdefault(str(file), [answer._replace(student=student and prefix + student) for answer in kept])
        subfolders = {folder.name for folder, *_ in searched if folder.parent == Path(path) and folder.name[0] != "_"}
        if any(len(file.relative_to(path).parts) > 1 for file, _ in inside):
            with_answers = {Path(file).relative_to(path).parts[0] for file in found if Path(path) in Path(file).parents}
            for name in sorted(subfolders - with_answers):
                problem = f"contains no {' or '.join(SUFFIXES)} file with an answer of its own"
                empty.append(Answer(os.path.join(path, name), problem=problem, student=prefix + name))
    return [answer for in_file in found.values() for answer in in_file] + empty


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


def _folders(path: str) -> Iterator[tuple[Path, list[str], bool]]:
    """The folders to search: this one and those in it, each with the names of its Python files and notebooks, and
    whether it is in a checkout of this project. No names are given for virtual environments and copies of the package.
    Hidden folders are left out."""
    checkouts: set[str] = set()  # and their subfolders
    for parent, subfolders, names in os.walk(path, followlinks=True):
        if "pyvenv.cfg" in names or Path(parent, "exercises", "mistakes.ini").exists():
            log.say(f"{parent}: skipped; it is {'an environment' if 'pyvenv.cfg' in names else 'a copy of gluon_mgpu'}")
            subfolders.clear()
            names.clear()
        if os.path.dirname(parent) in checkouts or Path(parent, "gluon_mgpu", "exercises").is_dir():
            checkouts.add(parent)
        subfolders[:] = [name for name in subfolders if name[0] != "." and _is_searched(parent, name, top=path)]
        shown = [name for name in names if name.endswith(SUFFIXES) and not name.startswith(".")]
        yield Path(parent), shown, parent in checkouts


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
