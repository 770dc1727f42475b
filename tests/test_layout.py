"""Modules never import from a higher layer, even for type hints, and there are no import cycles."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1] / "gluon_mgpu"
LESSONS = ["scratch", "highlevel", "partition", "asynchrony", "walkthrough", "networks", "convert"]
# from the bottom
LAYERS = ["runtime", "distributed", "training", "legacy", "lessons", "exercises", "commands"]


def modules():
    """{module: path}, such as {"training.loop": ...}; packages and the top have no code that imports upward."""
    paths = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in ROOT.rglob("*.py")}
    return {name.removesuffix(".__init__"): path for name, path in paths.items()}


def imported(path, known):
    """The modules of this package that a file imports, wherever it does."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "gluon_mgpu":
            base = node.module.split(".")[1:]
            names = [".".join([*base, alias.name]) for alias in node.names]
            found |= {name if name in known else ".".join(base) for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[2] for alias in node.names if alias.name.startswith("gluon_mgpu.")}
    return found & known


def layer(module):
    package = module.split(".")[0]
    return LAYERS.index("lessons" if package in LESSONS else package)


def test_imports_only_go_down():
    known = modules().keys() - {"__init__", "__main__"}
    upward = [
        f"{name} imports {other}"
        for name, path in modules().items()
        if name in known
        for other in imported(path, known)
        if layer(other) > layer(name)
    ]
    assert not upward


def test_there_are_no_import_cycles():
    known = modules().keys() - {"__init__", "__main__"}
    left = {name: imported(modules()[name], known) - {name} for name in known}
    while left:
        free = [name for name, others in left.items() if not others & left.keys()]
        assert free, f"a cycle among {sorted(left)}"
        for name in free:
            del left[name]
