"""Steps in PyTorch and JAX: wrong ones are named, right ones are not accused."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from functools import partial

import pytest
from runs import ROOT, gluon_mgpu

from gluon_mgpu.check import files
from gluon_mgpu.check.comparison import Report
from gluon_mgpu.runtime.errors import UsageError

torch = pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="PyTorch is an extra: pytorch")
jax = pytest.mark.skipif(not importlib.util.find_spec("jax"), reason="JAX is an extra: jax")
RIGHT = {name: (ROOT / "docs" / f"{name}.py").read_text() for name in ("pytorch/scratch", "pytorch/ddp", "jax/scratch")}
SUM = "    for p in params:\n        dist.all_reduce(p.grad)\n"
ACCUMULATED = """
    n, k = len(X), dist.get_world_size()
    (X1, X2), (y1, y2) = shard(X).chunk(2), shard(y).chunk(2)
    with {first}:
        (F.cross_entropy(net(X1), y1, reduction="sum") * k / n).backward()
    with {last}:
        (F.cross_entropy(net(X2), y2, reduction="sum") * k / n).backward()
    trainer.step()
    trainer.zero_grad()
"""
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
# Checks files in processes forked from one that has imported PyTorch or JAX, which takes longer than a check.
CHILD = """
import os, runpy, sys
import {imported}
for folder in sys.argv[1:]:
    if not os.fork():
        sys.argv = ["step", folder + "/step.py", folder]
        runpy.run_module("gluon_mgpu.check.{module}", run_name="__main__")
    os.wait()
"""


def changed(name, *edits):
    """The text of a program with edits [old, new]."""
    text = RIGHT[name]
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    return text


def accumulated(first, last):
    head, _, rest = RIGHT["pytorch/ddp"].partition("    losses = F.cross_entropy")
    body = ACCUMULATED.format(first=first, last=last)
    imports = "from contextlib import nullcontext\n"
    return imports + head + body + "\n\ndef full" + rest.partition("\n\ndef full")[2]


FIRST = ["[dist.get_rank()]", "[0]"]
MEAN = ["losses.sum() * dist.get_world_size() / len(X)", "losses.mean()"]
STRIDED = ["shard(y), reduction", "y[dist.get_rank() :: dist.get_world_size()], reduction"]
STEP = SUM + "    sgd(params, lr, len(X))"
NORM = ["DistributedDataParallel(lenet())", "DistributedDataParallel(nn.Sequential(nn.BatchNorm2d(1), lenet()))"]
ADAM = ["torch.optim.SGD(net.parameters(), lr=lr)", "torch.optim.Adam(net.parameters(), lr=lr / 100)"]
LOSS = "    loss = losses.sum() * dist.get_world_size() / len(X)"
VALID = """    valid = shard(y) % 3 != 0
    count = valid.sum()
    dist.all_reduce(count)
    loss = (losses * valid).sum() * dist.get_world_size() / count"""
scratch, ddp = partial(changed, "pytorch/scratch"), partial(changed, "pytorch/ddp")
# {case: (the claim that does not hold, a part of the reason, the file)}
WRONG = {
    "no all_reduce of one parameter": ("sum", "own", scratch([SUM, SUM.replace("params:", "params[1:]:")])),
    "the same shard": ("devices", "same shard", scratch(FIRST)),
    "a deadlock": ("update", "waits forever", scratch([SUM, BRANCH])),
    "accuracy of one part": ("accuracy", "0.1818", scratch(["    dist.all_reduce(correct)\n", ""])),
    "labels of others": ("update", "labels", scratch(STRIDED)),
    "a second division": ("update", "2 times", scratch(["losses.sum()", "losses.mean()"])),
    "only the last examples": ("update", "order", scratch(["losses.sum()", "losses[-3:].sum()"])),
    "a step before the sum": ("sum", "own", scratch([STEP, "    sgd(params, lr, len(X))"])),
    "mean of means": ("update", "sizes", ddp(MEAN)),
    "gradients of the step before": ("update", "zero_grad", ddp(["    trainer.zero_grad()\n", ""])),
    "not scaled": ("update", "0.5 times", ddp([" * dist.get_world_size() / len(X)", " / len(X)"])),
    "the whole batch": (
        "devices",
        "whole batch",
        ddp(MEAN, ["tensor_split(data, dist.get_world_size())", "tensor_split(data, 1)"], FIRST),
    ),
    "no broadcast": ("start", "different", scratch(["np.random.default_rng(seed)", OWN_DRAW])),
    "no_sync in the last part": ("replicas", "no_sync", accumulated("nullcontext()", "net.no_sync()")),
    "running statistics": ("replicas", "running", RIGHT["pytorch/ddp"].partition("\nif __name__")[0] + NORMALIZED),
    "an error in one process": ("update", "Assertion", scratch([SUM, "    assert dist.get_rank() == 0\n" + SUM])),
    "an exit": ("update", "exit", scratch([SUM, "    os._exit(0)\n"])),
}
RIGHT_STEPS = {
    "broadcast by DDP": ddp(["np.random.default_rng(seed)", OWN_DRAW]),
    "a mask": ddp([LOSS, VALID]),
    "no_sync in the first part": accumulated("net.no_sync()", "nullcontext()"),
    "Adam": ddp(ADAM),
    "normalization in DDP": ddp(NORM),
    "FSDP": (ROOT / "docs/pytorch/fsdp.py").read_text(),
}
# A smaller network, because JAX compiles for seconds
SMALL = [
    ["[(20, 1, 3, 3), (50, 20, 5, 5), (128, 800), (10, 128)]", "[(16, 784), (10, 16)]"],
    ["W1, b1, W2, b2, W3, b3, W4, b4 = params", "W3, b3, W4, b4 = params"],
    ["convolution(convolution(X, W1, b1), W2, b2)", "X"],
]
STALE = [
    ["@jax.jit  # compiled once", "FIRST = []\n\n\n@jax.jit  # compiled once"],
    ["(params)\n\n\n@jax.jit\ndef sgd", "(FIRST[0])\n\n\n@jax.jit\ndef sgd"],
    ["    grads = map(", "    FIRST[:] = device_params[:1]\n    grads = map("],
]
MEANS = [
    ["np.concatenate([lenet(X, params).argmax(1) == y for", "np.mean([(lenet(X, params).argmax(1) == y).mean() for"],
    ["data_iter]).mean()", "data_iter])"],
]
OWN_SPLIT = ["split_and_load(y, devices)\n", "[y[i :: len(devices)] for i in range(len(devices))]\n"]
WRONG_JAX = {
    "one gradient": ("sum", "process 0", [["sum(jax.device_put(x, data[0].device) for x in data)", "data[0]"]]),
    "what jit has kept": ("update", "only the first", STALE),
    "mean accuracy": ("accuracy", "0.5893", MEANS),
    "size of a shard": ("update", "2 times", [["lr, len(X))", "lr, len(Xs[0]))"]]),
    "labels of others": ("update", "labels", [OWN_SPLIT]),
    "the whole batch": ("devices", "whole", [["np.array_split(data, len(devices))", "[data] * len(devices)"]]),
}


def check(tmp_path, texts, engine="torch"):
    """{case: its report}"""
    folders = [tmp_path / str(i) for i in range(len(texts))]
    for folder, text in zip(folders, texts.values()):
        folder.mkdir()
        (folder / "step.py").write_text(text)
        assert files.engine(str(folder / "step.py")) == engine
    module, imported = {"torch": ("pytorch_step", "torch._dynamo"), "jax": ("jax_step", "jax")}[engine]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
    child = [sys.executable, "-c", CHILD.format(imported=imported, module=module), *map(str, folders)]
    subprocess.run(child, env=env, check=True, timeout=600)
    return {case: Report(**json.loads((f / "found.json").read_text())) for case, f in zip(texts, folders)}


def some(table, slow, fast=4):
    """The first cases are in the normal suite."""
    return dict([*table.items()][fast:] if slow else [*table.items()][:fast])


parts = pytest.mark.parametrize("slow", [False, pytest.param(True, marks=pytest.mark.slow)])


def assert_named(reports, table):
    for case, (claim, reason, *_) in table.items():
        wrong = [item for item in reports[case].claims.items() if item[1]]
        assert reports[case].verdict and wrong[0][0] == claim and reason in wrong[0][1], (case, wrong)


@torch
@parts
def test_wrong_steps_are_named(tmp_path, slow):
    wrong = some(WRONG, slow)
    assert_named(check(tmp_path, {case: text for case, (*_, text) in wrong.items()}), wrong)


@torch
@parts
def test_right_steps_are_not_accused(tmp_path, slow):
    for case, report in check(tmp_path, some(RIGHT_STEPS, slow, fast=1)).items():
        assert not report.verdict and bool(report.how) == (case == "normalization in DDP"), (case, report.claims)
        for note in report.notes:  # both are near float64, and rounding explains more
            several, one, bound = (float(number) for number in re.findall(r"\d\.\de-\d\d", note))
            assert 0 < one < bound / 8 and 0 < several < bound / 8, case


@jax
@parts
def test_steps_in_jax_are_judged(tmp_path, slow):
    wrong = some(WRONG_JAX, slow, fast=3)
    texts = {case: changed("jax/scratch", *SMALL, *edits) for case, (*_, edits) in wrong.items()}
    reports = check(tmp_path, {**texts, "right": changed("jax/scratch", *([] if slow else SMALL))}, "jax")
    assert not reports.pop("right").verdict
    assert_named(reports, wrong)


def test_the_engine_is_what_a_file_imports(tmp_path):
    path = tmp_path / "step.py"
    path.write_text("import mxnet as mx\nimport torch\ndef train_batch(X, y, device_params, ctx, lr): ...\n")
    assert files.engine(str(path)) is None and files.engine("scratch") is None
    path.write_text("from torch import nn\n")
    with pytest.raises(UsageError, match="must define train_batch"):
        files.engine(str(path))


@torch
def test_the_command_needs_no_mxnet_and_is_not_confused_by_other_files(tmp_path):
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages/mxnet.py").write_text("raise ImportError('not installed')")
    (tmp_path / "random.py").write_text("raise ImportError('a file of the user')")
    (tmp_path / "step.py").write_text(changed("pytorch/scratch", (SUM, "")))
    path = os.pathsep.join([str(tmp_path / "packages"), os.environ.get("PYTHONPATH", "")])
    done = gluon_mgpu("check", tmp_path / "step.py", env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 1 and "does not take the same step" in done.stdout.splitlines()[-1], done.stderr
