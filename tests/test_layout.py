"""What can be told without running the package: imports, scripts, types."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

from runs import output

ROOT = Path(__file__).parents[1] / "gluon_mgpu"
# from the bottom; the modules in a line are on one level
LAYERS = [
    ["support"],
    ["compat"],
    ["data"],
    ["scratch", "highlevel", "partition", "hybrid", "asynchrony", "sharded", "networks", "old"],
    ["training"],
    ["check"],
    ["training.setup", "training.train"],  # they check a lesson of your own before they train it
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


IMPORTS = {name: imported(path) for name, path in MODULES.items()}


def layer(module):
    """The line of a module, or of the smallest package in LAYERS that contains it."""
    lines = {name: i for i, names in enumerate(LAYERS) for name in names if f"{module}.".startswith(f"{name}.")}
    return lines[max(lines, key=len)]


def test_imports_only_go_down():
    imports = {(name, other) for name, others in IMPORTS.items() for other in others}
    assert not [f"{name} imports {other}" for name, other in imports if layer(other) > layer(name)]


def test_the_training_loop_does_not_know_the_lessons():
    names = {"scratch", "highlevel", "lenet", "resnet18"}
    for name in ("loop", "step", "folder", "workers", "checkpoint", "state"):
        tree = ast.parse((ROOT / "training" / f"{name}.py").read_text())
        assert not names & {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}, name


def test_modules_that_are_needed_before_mxnet_do_not_import_it():
    modules = "gluon_mgpu.training.lessons, gluon_mgpu.training.train, gluon_mgpu.training.folder"
    assert output(f"import sys, {modules}; print('mxnet' in sys.modules)") == "False\n"


def test_checking_a_pytorch_or_jax_file_does_not_import_training():
    found, left = set[str](), {"check.pytorch", "check.jax"}
    while left:
        found |= left
        left = {other for name in left for other in IMPORTS[name]} - found
    assert not [name for name in found if name.split(".")[0] == "training"]


def test_there_are_no_import_cycles():
    others = {name: found - {name} for name, found in IMPORTS.items()}
    TopologicalSorter(others).prepare()  # raises CycleError
