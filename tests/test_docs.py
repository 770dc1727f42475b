"""Commands, options, files, messages and modules that the docs name exist; the code shown is the code that runs."""

import ast
import importlib
import inspect
import itertools
import pkgutil
import re
from pathlib import Path

import click
import pytest
from parity import notebook
from parity.recipes import RECIPES
from runs import ROOT

from gluon_mgpu import asynchrony, exercises, highlevel, hybrid, partition, scratch, sharded
from gluon_mgpu.commands.main import main

PAGES = {path.name: path.read_text() for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]}
del PAGES["CHANGELOG.md"]  # also names what has been removed
PROGRAM = r"(?:gluon-mgpu|python -m gluon_mgpu|python scripts/(\w+)\.py) ([a-z-][^`#|\n]*)"


def unknown_options(script, words):
    """The options that a command on a page uses but that the program lacks. script: None for gluon-mgpu."""
    module = f"{script}.cli" if script in ("bench", "parity") else f"gluon_mgpu.commands.{script}"
    command = getattr(importlib.import_module(module), script) if script else main
    while isinstance(command, click.Group) and words and words[0][0] != "-":
        command = command.get_command(click.Context(command), words.pop(0))
        if command is None:
            return {"no such command"}
    if command.context_settings.get("allow_interspersed_args") is False:  # the rest belongs to another program
        words = list(itertools.takewhile(lambda word: not word.endswith((".py", ".ipynb")), words))
    known = {"--help", "-h"}.union(*[param.opts + param.secondary_opts for param in command.params])
    options = [re.match(r"-[\w-]*", word)[0] for word in words if word.startswith("-")]
    options = options[: options.index("--")] if "--" in options else options
    return set(options) - known


def test_the_commands_and_options_on_the_pages_exist():
    found = [(page, *line) for page, text in PAGES.items() for line in re.findall(PROGRAM, text.replace("\\\n", " "))]
    assert len(found) > 50
    for page, script, line in found:
        assert not unknown_options(script, line.split()), f"{page}: {line}"


def test_the_exercises_on_the_pages_exist():
    found = {name for text in PAGES.values() for name in re.findall(r"exercise start ([a-z0-9_]+)", text)}
    assert found == {*exercises.NAMES}


def test_the_files_and_make_targets_on_the_pages_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^([a-z0-9-]+):", makefile, re.MULTILINE)
    for page, text in {**PAGES, "Makefile": makefile}.items():
        assert {*re.findall(r"(?:^    |`)make ([a-z0-9-]+)", text, re.MULTILINE)} <= {*targets}, page
        for path in re.findall(r"(?<![\w/.-])(?:gluon_mgpu|scripts|tests)/[a-z0-9_/]+\.(?:py|sh)", text):
            assert (ROOT / path).exists(), f"{page}: {path}"


def strings(tree):
    """The text of each string in a module, with … for values."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)):
            yield node.value if isinstance(node.value, str) else node.value.decode(errors="replace")


def test_the_messages_explained_are_messages_of_the_package():
    sources = [*(ROOT / "gluon_mgpu").rglob("*.py"), *(ROOT / "scripts").rglob("*.py")]
    texts = [path.read_text().replace("$(VENV)", ".venv") for path in [ROOT / "Makefile", *ROOT.glob("scripts/*.sh")]]
    said = "\n".join([*texts, *(text for path in sources for text in strings(ast.parse(path.read_text())))])
    symptoms = re.findall(r"^\| (?!symptom )(.+?) \| ", PAGES["troubleshooting.md"], re.MULTILINE)
    messages = [symptom.strip("` ") for symptom in symptoms if symptom.startswith("`")]
    values = r"…|gluon_mgpu: |error: |--[\w-]+( [a-z]+)?"  # the code has the argument's name there
    parts = {part.strip(" :;()") for message in messages for part in re.sub(values, "…", message).split("…")}
    assert len(symptoms) >= 14 and len(messages) >= 10 and not [part for part in parts if part not in said]


def test_every_module_that_programs_may_import_has_a_page_of_the_api():
    found = {m.name for m in pkgutil.walk_packages([str(ROOT / "gluon_mgpu")], "gluon_mgpu.") if not m.ispkg}
    others = (
        r"__main__|\.(commands|old|exercises|check|compat.kernels)\.|convert\.(?!operators)|support\.(?!errors)|mxnet2"
    )
    modules = {name for name in found if not re.search(others, name)}
    assert set(re.findall(r"^   (gluon_mgpu\.\S+)$", PAGES["api.md"], re.MULTILINE)) == modules


def test_the_accuracies_said_to_be_the_notebooks_are_those_in_the_recipes():
    printed = {(r.options["gpus"], tuple(map(float, r.test_accuracy))) for r in RECIPES.values()}
    rows = re.findall(r"^\| the notebook, on (\d) GPUs? \| (.*) \|$", "\n".join(PAGES.values()), re.MULTILINE)
    assert rows and {(gpus, tuple(map(float, row.split(" | ")))) for gpus, row in rows} <= printed


def functions(code):
    """{name: syntax tree} of the functions and classes in some code, without docstrings, type hints and decorators."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    found = {node.name: node for node in ast.parse(code).body if isinstance(node, kinds)}
    for node in [part for tree in found.values() for part in ast.walk(tree)]:
        if isinstance(node, kinds):
            node.body, node.decorator_list = node.body[bool(ast.get_docstring(node)) :], []
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        elif isinstance(node, ast.arg):
            node.annotation = None
    return {name: ast.dump(node) for name, node in found.items()}


def of(module):
    return functions(Path(module.__file__).read_text()).items()


def with_callees(module, names):
    """The names, and the names of all functions of the module that these functions call."""
    code = dict(of(module))
    for _ in code:
        names = names | {name for name in code if any(f"Name(id='{name}'" in code[caller] for caller in names)}
    return names


def blocks(page, language="python"):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGES[page], re.DOTALL | re.MULTILINE)


def cells(page):
    return "\n".join(blocks(page, r"{code-cell} ipython3(?:\n:\w+: .*)*"))


# Functions that pages define for themselves.
OWN = {"losses_of", "counted", "ring_allreduce", "milliseconds", "new_state", "allocated"}
# Functions that pages use without showing them.
IMPORTED = {"BenchMark", "copy_to_cpu", "stages"}


@pytest.mark.parametrize(
    "code, module, names",
    [
        ("\n".join(blocks("README.md")), scratch, ""),
        (cells("from-scratch.md"), scratch, "init_params train_batch"),
        (cells("gluon.md"), highlevel, "initialize train_batch"),
        ("\n".join(blocks("gluon.md")), scratch, ""),
        (cells("asynchrony.md"), asynchrony, "run_asynchronously run_one_after_another run_at_once run_and_copy"),
        (cells("partition.md"), partition, "train_batch_network train_batch_layers"),
        (cells("hybrid.md"), hybrid, "place train_batch"),
        (cells("rings.md"), sharded, "ddp"),
        (cells("rings.md") + "\n" + cells("zero.md"), sharded, "ddp zero1 zero3"),
    ],
)
def test_functions_on_the_pages_are_those_of_the_modules_and_a_lesson_shows_all_that_it_teaches(code, module, names):
    shown = {name: tree for name, tree in functions(code).items() if name not in OWN}
    assert shown and shown.items() <= of(module)
    assert with_callees(module, {*names.split()}) - IMPORTED <= functions(code).keys()


def test_all_lines_of_the_step_with_workers_that_scratch_lacks_are_marked_as_new():
    old = {line.strip() for line in inspect.getsource(scratch.train_batch).splitlines()}
    [step] = re.findall(r"(?ms)^def train_batch.*?^    return losses$", cells("several-machines.md"))
    unmarked = [line.strip() for line in step.splitlines() if "# new" not in line]
    assert len(unmarked) > 5 and {*unmarked} <= old


def test_the_page_names_each_function_of_the_notebook_that_the_lesson_changes():
    changed = {name for name, tree in of(notebook) if dict(of(scratch))[name] != tree}
    _, differences = PAGES["parity.md"].split("## Where this project differs from the notebooks")
    assert changed < {*re.findall(r"`(\w+)`", differences)}


PYTORCH = {name: (ROOT / f"docs/pytorch/{name}.py").read_text() for name in ("scratch", "ddp", "fsdp")}
DIFFS = {"pytorch.md": [(PYTORCH["scratch"], PYTORCH["ddp"])], "zero.md": [(PYTORCH["ddp"], PYTORCH["fsdp"])]}


@pytest.mark.parametrize("page", DIFFS)
def test_the_lines_of_a_diff_on_a_page_are_in_the_code(page):
    diffs = blocks(page, "diff")
    assert len(diffs) == len(DIFFS[page])
    for diff, (old, new) in zip(diffs, DIFFS[page]):
        for line in diff.splitlines():
            assert f"\n{line[1:]}" in "\n" + (new if line[0] == "+" else old), line


def test_the_lines_of_the_programs_on_the_page_about_meshes_are_in_the_programs():
    shown = {path: lines for path, *lines in (block.splitlines() for block in blocks("hybrid.md"))}
    for path in ("docs/pytorch/hybrid.py", "docs/jax/hybrid.py"):
        code = (ROOT / path).read_text().splitlines()
        assert {*shown[f"# {path}"]} - {"...", "    ..."} <= {*code}


def test_the_four_steps_beside_each_other_are_those_of_the_programs():
    shown = {block.splitlines()[0][2:]: block for block in blocks("pytorch.md") if block.startswith("# ")}
    assert len(shown) == 4
    for path, block in shown.items():
        assert functions(block)["train_batch"] == functions((ROOT / path).read_text())["train_batch"]
