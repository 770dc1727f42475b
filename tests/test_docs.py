"""The pages that follow the code do: every message a user can meet is explained, every module and checksum is there."""

import ast
import pkgutil
import re
from pathlib import Path

import pytest

import gluon_mgpu
from gluon_mgpu import datasets

DOCS = Path(__file__).parents[1] / "docs"
PACKAGE = Path(gluon_mgpu.__file__).parent
# A call of one of these names is a message, in its first argument; in the last one of _require, which names the value.
SAYING = ("Error", "UsageError", "kind", "_say", "fail", "error")
NAMED = ast.parse("f'{name} {value}: '", mode="eval").body  # what _require puts before its last argument
NOTICE = "gluon_mgpu: "
# Modules without a page: the command line, which has its own; what starts processes; what imports PyTorch.
INSIDE = {
    *("__main__", "cli", "commands", "own_process", "bench", "bench.cli", "bench.machine", "bench.own_process"),
    *("bench.torch_peers", "parity", "parity.finding", "parity.page"),
}


def fixed(node):
    """The fixed parts of a message, between its values; None of what is no text."""
    if isinstance(node, ast.Constant):
        text = node.value.decode(errors="replace") if isinstance(node.value, bytes) else node.value
        return [text] if isinstance(text, str) else None
    if isinstance(node, ast.JoinedStr):
        parts = [""]
        for value in node.values:
            parts = [*parts[:-1], parts[-1] + value.value] if isinstance(value, ast.Constant) else [*parts, ""]
        return parts
    return None


def messages_of(tree):
    """{the fixed parts} of each message in a module, a tuple each."""
    found = set()
    nodes = list(ast.walk(tree))
    within = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        parts = fixed(node)
        if parts and id(node) not in within and parts[0].lstrip().startswith(NOTICE):
            found.add(tuple(parts))
        if isinstance(node, ast.Call) and node.args:
            name = getattr(node.func, "id", getattr(node.func, "attr", None))
            arguments = [node.args[0]] if name in SAYING else []
            if name == "_require":
                arguments = [ast.JoinedStr([*NAMED.values, *getattr(node.args[-1], "values", [node.args[-1]])])]
            for argument in arguments:
                for case in (argument.body, argument.orelse) if isinstance(argument, ast.IfExp) else (argument,):
                    found.add(tuple(fixed(case) or ""))
    said = {tuple(part.strip("\n") for part in parts) for parts in found}
    # what `_say` puts before its line is no message, and neither is one that is a value as a whole
    return {parts for parts in said if "".join(parts) != NOTICE and re.search(r"[a-z]{2}", "".join(parts))}


def package_messages():
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for parts in messages_of(ast.parse(path.read_text())):
            found[parts] = path.relative_to(PACKAGE)
    return found


def explained():
    """The messages in the first column of the page's tables."""
    rows = re.findall(r"^\| (`+)(.+?)\1 \|", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    return [text.strip() for _, text in rows]


def is_of(message, parts):
    """Whether a message of the page, with … for values, has these fixed parts and a value between each two of them."""
    return re.fullmatch(".*".join(map(re.escape, parts)), message, re.DOTALL) is not None


def test_every_message_of_the_package_is_explained():
    page = explained()
    missing = [f"{path}: {'…'.join(parts)}" for parts, path in package_messages().items()]
    missing = [m for m, parts in zip(missing, package_messages()) if not any(is_of(said, parts) for said in page)]
    assert not missing, "docs/troubleshooting.md lacks:\n" + "\n".join(missing)


def test_every_message_explained_is_one_of_the_package():
    of_package = list(package_messages())
    assert len(of_package) > 100
    assert not [said for said in explained() if not any(is_of(said, parts) for parts in of_package)]


@pytest.mark.parametrize(
    ("code", "parts"),
    [
        ("raise Error(f'{x} is wrong: ' f'give {y}')", ("", " is wrong: give ", "")),
        ("_require(x > 0, 'x', x, f'give {y}')", ("", " ", ": give ", "")),
        ("os.write(2, b'\\ngluon_mgpu: going on\\n')", ("gluon_mgpu: going on",)),
        ("print(f'gluon_mgpu: {x} is left')", ("gluon_mgpu: ", " is left")),
    ],
)
def test_messages_are_found_as_they_are_written(code, parts):
    assert messages_of(ast.parse(code)) == {parts}


def test_every_module_has_a_page_of_the_api():
    modules = {m.name.removeprefix("gluon_mgpu.") for m in pkgutil.walk_packages([PACKAGE], "gluon_mgpu.")}
    listed = set(re.findall(r"^   gluon_mgpu\.(\S+)$", (DOCS / "api.md").read_text(), re.MULTILINE))
    assert listed == modules - INSIDE


def test_the_checksums_on_the_page_are_those_that_are_checked():
    shown = re.findall(r"^\| (\S+-ubyte) \| `(\w{64})` \|$", (DOCS / "datasets.md").read_text(), re.MULTILINE)
    assert shown == [file for files in datasets.SHA256.values() for file in files.items()]
