"""What can be told without running the package: imports, scripts, types."""

import ast
import os
import re
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from runs import finished, output

from gluon_mgpu.commands.main import COMMANDS

ROOT = Path(__file__).parents[1] / "gluon_mgpu"
# from the bottom; the modules in a line are on one level
LAYERS = [
    ["runtime"],
    ["data"],
    ["training"],
    ["legacy"],
    ["scratch", "highlevel", "partition", "asynchrony", "sharded", "networks"],
    ["lessons"],
    ["models"],
    ["equivalence"],
    ["train"],
    ["evaluate", "convert"],
    ["exercises"],
    ["commands"],
]
# {module: path}, such as {"training.loop": ...}
PATHS = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in ROOT.rglob("*.py")}
MODULES = {name.removesuffix(".__init__"): path for name, path in PATHS.items() if name not in ("__init__", "__main__")}


def imported(path):
    """The modules of this package that a file imports, at the top or inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name.removeprefix("gluon_mgpu.") for name in found if name.startswith("gluon_mgpu.")} & MODULES.keys()


def imported_by_name(path):
    """The calls in a file that import modules of this package, or modules that cannot be told from the code."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    named = [call for call in calls if ast.unparse(call.func).split(".")[-1] in ("import_module", "__import__")]
    return [ast.unparse(call) for call in named if not re.match(r"'(?!gluon_mgpu|\.)", ast.unparse(call.args[0]))]


IMPORTS = {name: imported(path) for name, path in MODULES.items()}


def layer(module):
    return next(i for i, modules in enumerate(LAYERS) if module.split(".")[0] in modules)


def test_imports_only_go_down():
    imports = [(name, other) for name, others in IMPORTS.items() for other in others]
    assert not [f"{name} imports {other}" for name, other in imports if layer(other) > layer(name)]


def test_only_commands_and_the_lessons_loader_import_modules_by_name():
    lower = {name: path for name, path in MODULES.items() if layer(name) < layer("commands") and name != "lessons"}
    assert not [f"{path}: {call}" for path in lower.values() for call in imported_by_name(path)]


def test_the_engine_does_not_know_the_lessons():
    names = {"scratch", "highlevel", "sharded", "lenet", "resnet18"}
    for path in (ROOT / "training").glob("*.py"):
        if path.stem != "recipes":  # the notebooks' experiments
            strings = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
            assert not names & {*strings}, path


@pytest.mark.parametrize(
    "module", ["data.datasets", "data.own_data", "data.splitting", "lessons", "train", "training.run"]
)
def test_modules_that_are_needed_before_mxnet_do_not_import_it(module):
    assert output(f"import sys, gluon_mgpu.{module}; print('mxnet' in sys.modules)") == "False\n"


def test_there_are_no_import_cycles():
    others = {name: found - {name} for name, found in IMPORTS.items()}
    TopologicalSorter(others).prepare()  # raises CycleError


def test_every_command_is_a_script_and_all_of_these_scripts_are_one_file():
    scripts = ROOT.parent / "scripts"
    links = {path.stem for path in scripts.glob("*.py") if path.resolve() == scripts / "main.py"}
    assert links == {"main", "batch_size", "bench", "parity", *COMMANDS}
    assert {path.name for path in scripts.glob("*.py") if not path.is_symlink()} == {"main.py"}


# The type hints reject incorrect uses of the package in a user's program, and accept correct ones.
PROGRAM = """\
import gluon_mgpu
from gluon_mgpu import highlevel, lessons, models, scratch
from gluon_mgpu.data import datasets
from gluon_mgpu.lessons import LessonConfig
from gluon_mgpu.runtime import devices
from gluon_mgpu.train import train

gluon_mgpu.configure(contexts="2")  # wrong
model = models.build("scratch", devices.contexts([0, 1], "cpu"), LessonConfig(shares=(80, 20)))
model.step("X", "y")  # wrong
scratch.allreduce(2)  # wrong
highlevel.initialize(highlevel.lenet(), "cpu(0)")  # wrong
LessonConfig(momentum=None)  # wrong
history = train(impl="scratch", gpus=2, batch_size=256, lr=0.2, out="runs/first", epochs=1, momentum=0.9)
accuracies: list[float] = [epoch.test_accuracy for epoch in history]
train(lessons.load("scratch"), dataset=datasets.load("synthetic"))
train("scratch", 2, "256", 0.2)  # wrong
train("scratch", momentun=0.9)  # wrong
"""


def test_mypy_refuses_each_wrong_line_and_no_other(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    mypy = [sys.executable, "-m", "mypy", "--config-file=", "--follow-imports=silent"]
    done = finished(*mypy, "program.py", cwd=tmp_path, env={**os.environ, "MYPYPATH": str(ROOT.parent)})
    refused = [int(number) for number in re.findall(r"^program.py:(\d+): error: ", done.stdout, re.MULTILINE)]
    wrong = [number for number, line in enumerate(PROGRAM.splitlines(), 1) if line.endswith("# wrong")]
    assert refused == wrong, done.stdout + done.stderr
