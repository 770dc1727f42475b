"""Steps in PyTorch: wrong ones are named, right ones are not accused."""

import ast
import importlib.util
import json
import os
import re
import sys
from functools import partial

import pytest
from forks import Forks
from runs import ROOT, gluon_mgpu

from gluon_mgpu import check
from gluon_mgpu.check.judge import DIFFERENT, SAME, UNKNOWN, Report
from gluon_mgpu.support.errors import UsageError

torch = pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="PyTorch is an extra: pytorch")
jax = pytest.mark.skipif(not importlib.util.find_spec("jax"), reason="JAX is an extra: jax")
RIGHT = {name: (ROOT / "docs" / f"{name}.py").read_text() for name in ("pytorch/scratch", "pytorch/ddp")}
SUM = "    for p in params:\n        dist.all_reduce(p.grad)\n"
NORMALIZED = """
def init_net(lr):
    net = nn.Sequential(nn.BatchNorm2d(1), lenet())
    return net, torch.optim.SGD(net.parameters(), lr=lr)


def train_batch(X, y, net, trainer):
    (F.cross_entropy(net(shard(X)), shard(y), reduction="sum") / len(X)).backward()
    for p in net.parameters():
        dist.all_reduce(p.grad)
    trainer.step()
    trainer.zero_grad()
"""
BRANCH = "    if dist.get_rank() == 0:\n        for p in params:\n            dist.all_reduce(p.grad)\n"
OWN_DRAW = "np.random.default_rng(dist.get_rank())"


def changed(name, *edits):
    """The text of a program with edits [old, new]."""
    text = RIGHT[name]
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    return text


STRIDED = "y[dist.get_rank() :: dist.get_world_size()], reduction"
LOSS = "    loss = losses.sum() * dist.get_world_size() / len(X)"
VALID = """    valid = shard(y) % 3 != 0
    count = valid.sum()
    dist.all_reduce(count)
    loss = (losses * valid).sum() * dist.get_world_size() / count"""
scratch, ddp = partial(changed, "pytorch/scratch"), partial(changed, "pytorch/ddp")
# {case: (the claim that does not hold, a part of the reason, the file)}
WRONG = {
    "no all_reduce of one parameter": ("sum", "own", scratch([SUM, SUM.replace("params:", "params[1:]:")])),
    "the same shard": ("devices", "same shard", scratch(["[dist.get_rank()]", "[0]"])),
    "accuracy of one part": ("accuracy", "0.1818", scratch(["    dist.all_reduce(correct)\n", ""])),
    "labels of others": ("update", "labels", scratch(["shard(y), reduction", STRIDED])),
    "a second division": ("update", "2 times", scratch(["losses.sum()", "losses.mean()"])),
    "only the last examples": (
        "update",
        "uses only examples 9 to 11 of 12",
        scratch(["losses.sum()", "losses[-3:].sum()"]),
    ),
    "mean of means": ("update", "sizes", ddp(["losses.sum() * dist.get_world_size() / len(X)", "losses.mean()"])),
    "not scaled": ("update", "0.5 times", ddp([" * dist.get_world_size() / len(X)", " / len(X)"])),
    "gradients of the step before": ("update", "zero_grad", ddp(["    trainer.zero_grad()\n", ""])),
    "no broadcast": ("start", "different", scratch(["np.random.default_rng(seed)", OWN_DRAW])),
    "running statistics": ("replicas", "running", RIGHT["pytorch/ddp"].partition("\nif __name__")[0] + NORMALIZED),
    "an error in one process": ("several", "Assertion", scratch([SUM, "    assert dist.get_rank() == 0\n" + SUM])),
    "a deadlock": ("several", "waits for a process", scratch([SUM, BRANCH])),
    "an exit": ("runs", "exit", scratch([SUM, "    os._exit(0)\n"])),
}
LISTED = """def example_batch(n):
    return [{"x": torch.rand(1, 28, 28), "y": torch.randint(10, ())} for _ in range(n)]


def train_batch(examples, params, lr):
    X, y = (torch.stack([example[name] for example in examples]) for name in "xy")
"""
DRAWN = """from numpy.random import default_rng as generator


def example_batch(n):
    random = generator()
    X, y = random.random((n, 1, 28, 28)), random.integers(10, size=n)
    return torch.tensor(X, dtype=torch.float32), torch.tensor(y)


def train_batch(X, y, params, lr):
"""
NO_COMPILER = '    assert "torch._dynamo.symbolic_convert" not in __import__("sys").modules\n'  # it takes seconds
TOTAL = "    correct, total = torch.zeros(()), 0\n"
RIGHT_STEPS = {
    "broadcast by DDP": ddp(["np.random.default_rng(seed)", OWN_DRAW]),
    "a mask": ddp([LOSS, VALID]),
    "without the compiler": ddp([LOSS, NO_COMPILER + LOSS], [TOTAL, NO_COMPILER + TOTAL]),
    "FSDP": (ROOT / "docs/pytorch/fsdp.py").read_text(),
    "a list of examples": scratch(["def train_batch(X, y, params, lr):\n", LISTED]),
    "batches that are drawn without a seed": scratch(["def train_batch(X, y, params, lr):\n", DRAWN]),
}


def cases(table, fast):
    """The first cases are in the normal suite."""
    return [pytest.param(key, marks=() if i < fast else pytest.mark.slow) for i, key in enumerate(table)]


CHECK = """
import json, sys
from dataclasses import asdict
from gluon_mgpu import check
report = check.compare_file(sys.argv[1], json.loads(sys.argv[2]))
print(json.dumps([asdict(report), report.status]))
"""


@pytest.fixture(scope="module")
def pytorch():
    """Runs programs as forks of a process that has imported what the checks need, which takes seconds."""
    with Forks("import torch.distributed.optim, gluon_mgpu.check.pytorch\n") as forks:
        yield forks


@pytest.fixture
def run(tmp_path, pytorch):
    """run(text) checks a program for PyTorch."""

    def run(text, processes=(2,), name="step.py"):
        path = tmp_path / name
        path.write_text(text)
        done = pytorch.run([sys.executable, "-c", CHECK, path, json.dumps(processes)])
        assert done.status == 0, done.err
        fields, status = json.loads(done.out.splitlines()[-1])
        report = Report(**fields)
        assert report.status == status
        return report

    return run


def assert_named(report, claim, reason):
    wrong = [item for item in report.claims.items() if item[1]]
    assert report.verdict and wrong[0][0] == claim and reason in wrong[0][1], wrong


@torch
@pytest.mark.parametrize("case", cases(WRONG, fast=2))
def test_a_wrong_step_is_named(run, case):
    claim, reason, text = WRONG[case]
    assert_named(run(text), claim, reason)


@torch
@pytest.mark.parametrize("case", cases(RIGHT_STEPS, fast=1))
def test_a_right_step_is_not_accused(run, case):
    report = run(RIGHT_STEPS[case])
    assert report.status == SAME and not report.how, report.explain()
    note = next(note for note in report.notes if "distance" in note)
    several, one = (float(number) for number in re.findall(r"\d\.\de-\d\d", note))
    assert 0 < one < 1e-5 and 0 < several < 1e-5


def tables():
    """(table, case, a part of the reason) in steps.py, which is not imported, because PyTorch takes seconds."""
    for node in ast.parse((ROOT / "tests/check/steps.py").read_text()).body:
        if isinstance(node, ast.Assign) and node.targets[0].id in ("RIGHT", "WRONG", "UNKNOWN", "NOTED"):
            for key, row in zip(node.value.keys, node.value.values):
                yield node.targets[0].id, key.value, row.elts[3].value if len(row.elts) > 3 else ""


@torch
@pytest.mark.slow
@pytest.mark.parametrize("table, case, reason", [*tables()])
def test_the_steps_of_real_programs(pytorch, table, case, reason):
    done = pytorch.run([sys.executable, str(ROOT / "tests/check/steps.py"), table, case])
    assert done.status == 0, done.err
    report = json.loads(done.out.splitlines()[-1])
    assert report["status"] == {"WRONG": DIFFERENT, "UNKNOWN": UNKNOWN}.get(table, SAME), report
    assert reason in ("".join(report["notes"]) if table == "NOTED" else report["line"])


STATE = """
import torch
from gluon_mgpu.check.pytorch.state import State
a, b, c = (torch.full((2,), float(i)) for i in range(3))
print(sorted(x[0].item() for x in State({"x": {"y": {"z": a}, "y.z": b}, "x.y": {"z": c}}, len).tensors.values()))
"""


@torch
def test_values_of_the_same_name_are_all_found(pytorch):
    assert pytorch.run([sys.executable, "-c", STATE]).out == "[0.0, 1.0, 2.0]\n"


THREADS = """
import os
from gluon_mgpu.check.pytorch import group
threads = lambda send, rank, world: send(len(os.listdir(f"/proc/{os.getppid()}/task")))
before = len(os.listdir("/proc/self/task"))
print([count - before for count in group.run(3, threads, 60).stages[0]])
"""


@torch
@pytest.mark.slow
def test_processes_are_forked_before_there_are_threads(pytorch, tmp_path):
    (tmp_path / "threads.py").write_text(THREADS)
    done = pytorch.run([sys.executable, tmp_path / "threads.py"])
    assert done.out.splitlines()[-1:] == ["[0, 0, 0]"], done.err


@torch
@pytest.mark.slow
@pytest.mark.parametrize("how, seconds, status", [("once", 60, SAME), ("always", 5, UNKNOWN)])
def test_a_step_that_stalls_is_tried_again_and_not_accused(pytorch, tmp_path, how, seconds, status):
    stall = (
        f"    if {how == 'always'} or not os.path.exists(FILE):\n        open(FILE, 'w')\n        clock.sleep(1000)\n"
    )
    text = scratch(["def train_batch(X, y, params, lr):\n", f"def train_batch(X, y, params, lr):\n{stall}"])
    (tmp_path / "step.py").write_text(
        f"import os\nimport time as clock\n{text}\nFILE = {str(tmp_path / 'stalled')!r}\n"
    )
    check = CHECK.replace("json.loads(sys.argv[2])", f"json.loads(sys.argv[2]), seconds={seconds}")
    done = pytorch.run([sys.executable, "-c", check, tmp_path / "step.py", "[2]"])
    assert json.loads(done.out.splitlines()[-1])[1] == status, done.out + done.err


def test_the_engine_is_what_a_file_imports(tmp_path):
    path = tmp_path / "step.py"
    path.write_text("import mxnet as mx\nimport torch\ndef train_batch(X, y, device_params, ctx, lr): ...\n")
    assert check.framework(str(path)) is None and check.framework("scratch") is None
    for text in ("from torch import nn\n", "import jax\nfrom step import train_batch, init_net\n"):
        path.write_text(text)
        with pytest.raises(UsageError, match="must define train_batch"):
            check.framework(str(path))


@jax
def test_a_step_may_be_compiled_or_imported(tmp_path):
    path = tmp_path / "step.py"
    path.write_text("import jax\nfrom other import init_params, step\ntrain_batch = jax.jit(step)\n")
    assert check.framework(str(path)) == "jax"


@torch
@pytest.mark.slow
def test_the_command_needs_no_mxnet_and_is_not_confused_by_other_files(tmp_path):
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages/mxnet.py").write_text("raise ImportError('not installed')")
    (tmp_path / "random.py").write_text("raise ImportError('a file of the user')")
    (tmp_path / "step.py").write_text(changed("pytorch/scratch", (SUM, "")))
    path = os.pathsep.join([str(tmp_path / "packages"), os.environ.get("PYTHONPATH", "")])
    done = gluon_mgpu("check", tmp_path / "step.py", "--steps", 1, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 1 and "does not take the same step" in done.stdout.splitlines()[-1], done.stderr
