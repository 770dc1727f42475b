"""The pages that follow the code do: every message is explained, every module and checksum is there, and what is shown
beside PyTorch is what runs."""

import ast
import importlib.util
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest

import gluon_mgpu
from gluon_mgpu import scratch
from gluon_mgpu.runtime import engine
from gluon_mgpu.training import datasets, loop, recipes

DOCS = Path(__file__).parents[1] / "docs"
PACKAGE = Path(gluon_mgpu.__file__).parent
# A call of one of these names is a message, in its first argument; in the last one of _require, which names the value.
SAYING = ("Error", "UsageError", "kind", "say", "_say", "fail", "error", "_end", "ended_after")
NAMED = ast.parse("f'{name} {value}: '", mode="eval").body  # what _require puts before its last argument
NOTICE = "gluon_mgpu: "
# Modules without a page: the command line, which has its own; what starts processes; what imports PyTorch.
INSIDE = {
    *("__main__", "cli", "commands", "own_process", "bench", "bench.cli", "bench.machine", "bench.own_process"),
    *("bench.torch_peers", "parity", "distributed", "parity.finding", "parity.page"),
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
    said = {tuple(part.strip("\n").removeprefix(NOTICE) for part in parts) for parts in found}
    return {parts for parts in said if re.search(r"[a-z]{2}", "".join(parts))}  # not what is a value as a whole


def package_messages():
    found = {}
    for path in sorted([*PACKAGE.rglob("*.py"), *(DOCS.parent / "scripts").glob("*.py")]):
        for parts in messages_of(ast.parse(path.read_text())):
            found[parts] = path.relative_to(DOCS.parent)
    return found


def explained():
    """The messages in the first column of the page's tables."""
    rows = re.findall(r"^\| (`+)(.+?)\1 \|", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    return [text.strip().removeprefix(NOTICE) for _, text in rows]


def is_of(message, parts):
    """Whether a message of the page, with … for values, has these fixed parts and a value between each two of them."""
    return re.fullmatch(".*".join(map(re.escape, parts)), message, re.DOTALL) is not None


def pages():
    return "\n".join(path.read_text() for path in sorted(DOCS.glob("*.md")))


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
        ("os.write(2, b'\\ngluon_mgpu: going on\\n')", ("going on",)),
        ("print(f'gluon_mgpu: {x} is left')", ("", " is left")),
    ],
)
def test_messages_are_found_as_they_are_written(code, parts):
    assert messages_of(ast.parse(code)) == {parts}


def test_every_module_has_a_page_of_the_api():
    modules = {m.name.removeprefix("gluon_mgpu.") for m in pkgutil.walk_packages([str(PACKAGE)], "gluon_mgpu.")}
    listed = set(re.findall(r"^   gluon_mgpu\.(\S+)$", (DOCS / "api.md").read_text(), re.MULTILINE))
    assert listed == modules - INSIDE


def test_the_checksums_on_the_page_are_those_that_are_checked():
    shown = re.findall(r"^\| (\S+-ubyte) \| `(\w{64})` \|$", (DOCS / "datasets.md").read_text(), re.MULTILINE)
    assert shown == [file for files in datasets.SHA256.values() for file in files.items()]


def test_what_the_pages_say_that_the_notebooks_printed_is_what_they_printed():
    printed = {(r.options["gpus"], tuple(map(float, r.test_accuracy))) for r in recipes.RECIPES.values()}
    rows = re.findall(r"^\| the notebook, on (\d) GPUs? \| (.*) \|$", pages(), re.MULTILINE)
    assert len(rows) == 4
    assert {(gpus, tuple(map(float, row.split(" | ")))) for gpus, row in rows} <= printed


SHORTENED = ("allreduce", "train_batch")  # on the page: without settings and other processes


def twins():
    """(the code on the left, the code on the right) of docs/pytorch.md, a list of blocks each."""
    text = (DOCS / "pytorch.md").read_text()
    blocks = re.findall(r"<td>\n\n\w+\n\n```python\n(.*?)```\n\n</td>", text, re.DOTALL)
    return blocks[::2], blocks[1::2]


def functions(code):
    """{name: what it does} of the functions of a module, whatever its layout, comments, docstrings and type hints."""
    found = {}
    for node in ast.parse(code).body:
        if isinstance(node, ast.FunctionDef):
            if ast.get_docstring(node):
                del node.body[0]
            node.returns = None
            for arg in node.args.args:
                arg.annotation = None
            found[node.name] = ast.dump(node)
    return found


def test_the_functions_beside_their_twins_are_those_of_scratch():
    ours, shown = functions((PACKAGE / "scratch.py").read_text()), {}
    for block in twins()[0]:
        shown.update({name: done for name, done in functions(block).items() if name not in SHORTENED})
    assert shown.keys() > {"lenet", "get_params", "split_and_load", "forward_backward"}
    assert shown == {name: ours[name] for name in shown}


def test_the_shortened_step_beside_its_twin_is_that_of_scratch():
    shown = dict(vars(scratch))
    for block in twins()[0]:
        if "def allreduce(data)" in block or "def train_batch(X, y, device_params" in block:
            exec(block, shown)
    params, ctx = scratch.init_params(0.1), [mx.cpu(0), mx.cpu(1)]
    X, y = mx.nd.random.uniform(shape=(11, 1, 28, 28)), mx.nd.arange(11) % 10
    both = [[scratch.get_params(params, c) for c in ctx] for _ in range(2)]
    for train_batch, replicas in zip((shown["train_batch"], scratch.train_batch), both):
        train_batch(X, y, replicas, ctx, 0.2)
    for a, b in zip(sum(both[0], []), sum(both[1], [])):
        assert np.array_equal(a.asnumpy(), b.asnumpy())
    assert not np.array_equal(both[0][0][0].asnumpy(), params[0].asnumpy())


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="PyTorch is an extra: bench")
def test_the_twins_in_pytorch_take_the_same_step(tmp_path):
    """From scratch on two replicas, and as two processes of DistributedDataParallel."""
    mx.random.seed(1)
    params = scratch.init_params(0.1)
    data = datasets.synthetic(101, 100, seed=1)
    X, y = next(loop.batches(data.train_images, data.train_labels, 101))
    np.savez(tmp_path / "given.npz", *[p.asnumpy() for p in params], X=X.asnumpy(), y=y.asnumpy())
    ours = [scratch.get_params(params, mx.cpu(i)) for i in range(2)]
    for _ in range(3):
        scratch.train_batch(X, y, ours, [mx.cpu(0), mx.cpu(1)], 0.2)
    script = tmp_path / "twins.py"
    script.write_text("\n".join([TORCH, *twins()[1], STEPS]))
    workers = [
        subprocess.Popen([sys.executable, script, str(rank)], cwd=tmp_path, env=engine.users_environment())
        for rank in range(2)
    ]
    assert [worker.wait(120) for worker in workers] == [0, 0]
    for rank in range(2):
        theirs = np.load(tmp_path / f"rank{rank}.npz")
        for i, p in enumerate(ours[rank]):
            expected = p.asnumpy()
            moved = np.abs(expected - params[i].asnumpy()).max()
            for way in ("scratch", "ddp"):
                assert np.abs(theirs[f"{way}{i}"] - expected).max() < 1e-3 * moved, (way, i)


TORCH = """
import sys
from pathlib import Path

import numpy as np
"""
STEPS = """
rank, given = int(sys.argv[1]), np.load("given.npz")
params = [torch.from_numpy(given[f"arr_{i}"]) for i in range(8)]
X, y = torch.from_numpy(given["X"]), torch.from_numpy(given["y"]).long()
devices = [torch.device("cpu")] * 2
replicas = [get_params(params, d) for d in devices]
dist.init_process_group("gloo", init_method=f"file://{Path.cwd()}/store", rank=rank, world_size=2)
with torch.no_grad():
    for p, value in zip(net.parameters(), params):
        p.copy_(value)
net = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
for _ in range(3):
    train_batch(X, y, replicas, devices, 0.2)
    train_batch_ddp(X, y, net, optimizer)
assert [p.shape for p in init_params()] == [p.shape for p in params]
ways = {"scratch": replicas[rank], "ddp": list(net.parameters())}
arrays = {f"{way}{i}": p.detach().numpy() for way, of_way in ways.items() for i, p in enumerate(of_way)}
np.savez(f"rank{rank}.npz", **arrays)
dist.destroy_process_group()
"""
