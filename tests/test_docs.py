"""Commands, options, files, messages and modules that the docs name exist; the code shown is the code that runs."""

import ast
import importlib
import inspect
import itertools
import math
import pkgutil
import re
from pathlib import Path
from unittest.mock import Mock

import click
import mxnet as mx
import numpy as np
import pytest
from mxnet import nd
from parity import notebook
from parity.recipes import RECIPES
from runs import ROOT, finished

from gluon_mgpu import asynchrony, exercises, highlevel, hybrid, partition, scratch, sharded
from gluon_mgpu.commands.main import main
from gluon_mgpu.compat import devices, startup
from gluon_mgpu.data import datasets
from gluon_mgpu.support import errors
from gluon_mgpu.training import loop
from gluon_mgpu.training.config import Config
from gluon_mgpu.training.losses import Losses
from gluon_mgpu.training.workers import Group

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


def raised(function, *arguments):
    with pytest.raises(errors.Error) as caught:
        function(*arguments)
    return str(caught.value)


@pytest.fixture
def rendered(monkeypatch, tmp_path, capsys):
    """The messages that troubleshooting.md explains, from the code that says them."""
    monkeypatch.setattr(errors.caller, "options", {"device": "--device", "lr": "--lr"})
    group = Group()
    losses = Losses(1, 1, 1, 1, group)
    other = Mock(rank=1, broadcast=lambda values: {"lr": 0.1})
    model = Mock(ctx=[mx.cpu(0), mx.cpu(1)])
    monkeypatch.setattr(loop, "read_arrays", lambda model, device=0: {"W1": np.ones(1) * device})
    monkeypatch.setenv("GLUON_MGPU_MIRROR", "http://127.0.0.1:1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(datasets, "PACKAGES", {})
    monkeypatch.setattr(startup, "openmp_threads", lambda: 2)
    monkeypatch.setattr(startup, "_one_thread_computes", lambda: False)
    monkeypatch.setattr(devices.cuda, "driver_gpus", lambda: [("H200", 9, 0)])
    monkeypatch.setattr(devices.cuda, "has_kernels", lambda *_: False)
    monkeypatch.setattr(devices.cuda, "wheels", lambda: ["mxnet-cu112"])
    messages = [
        finished("/bin/sh", ROOT / "scripts/find-python.sh", env={"PATH": "/bin", "PYTHON": "no"}).stderr,
        errors.reason(ModuleNotFoundError("No module named 'mxnet'")),
        raised(startup.check_contexts, [mx.cpu(0), mx.cpu(1)]),
        raised(devices.contexts, [0], "gpu"),
        raised(datasets.fetch, "mnist"),
        raised(losses.add, [nd.array([math.nan])], 1),
        raised(Config(lr=0.1).resumed, {"lr": 0.2}),
        raised(Group.agree, other, {"lr": 0.2}, "start all workers with the same options"),
    ]
    capsys.readouterr()
    loop._check_replicas(model, "epoch 1", group)
    messages.append(capsys.readouterr().err)
    monkeypatch.setattr(mx.context, "num_gpus", lambda: 1)
    return [*messages, raised(devices.contexts, [0], "gpu")]


def test_the_messages_explained_are_those_that_the_package_says(rendered):
    symptoms = re.findall(r"^\| `(.+)` \| ", PAGES["troubleshooting.md"], re.MULTILINE)
    patterns = [re.escape(symptom).replace("…", ".*") for symptom in symptoms]
    found = [[message for message in rendered if re.match(f"(gluon_mgpu: )?{p}", message)] for p in patterns]
    assert [len(messages) for messages in found] == [1] * len(rendered), [*zip(symptoms, found)]


def test_the_api_has_a_page_for_each_module_that_a_page_imports_or_links_to():
    found = {m.name for m in pkgutil.walk_packages([str(ROOT / "gluon_mgpu")], "gluon_mgpu.") if not m.ispkg}
    text = "\n".join(PAGES.values())
    linked = {name.replace("/", ".") for name in re.findall(r"\]\((?:\.\./)+(gluon_mgpu/[\w/]+)\.py\)", text)}
    lines = re.findall(r"^from (gluon_mgpu[\w.]*) import ([\w, ]+)$", text, re.MULTILINE)
    imported = {name for start, names in lines for name in (start, *(f"{start}.{n}" for n in names.split(", ")))}
    modules = re.findall(r"^   (gluon_mgpu\.\S+)$", PAGES["api.md"], re.MULTILINE)
    assert len(modules) == len({*modules}) and linked | (imported & found) <= {*modules} <= found


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
OWN = {"losses_of", "counted", "ring_allreduce", "milliseconds", "placed", "allocated"}
# Functions that pages use without showing them.
IMPORTED = {"stages"}


@pytest.mark.parametrize(
    "code, module, names",
    [
        ("\n".join(blocks("README.md")), scratch, ""),
        (cells("from-scratch.md"), scratch, "init_params train_batch"),
        (cells("gluon.md"), highlevel, "initialize train_batch"),
        ("\n".join(blocks("gluon.md")), scratch, ""),
        (cells("asynchrony.md"), asynchrony, "matrices run"),
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
