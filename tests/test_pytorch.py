"""The programs in docs/pytorch train as scratch does, and the page shows how they differ."""

import ast
import importlib.util
import os
import sys
from functools import cache
from itertools import combinations

import mxnet as mx
import numpy as np
import pytest
from lenet64 import EPSILON, additions
from mxnet import nd
from runs import ROOT, finished

from gluon_mgpu import scratch
from gluon_mgpu.data import batches, datasets
from gluon_mgpu.runtime import engine

FOLDER = ROOT / "docs/pytorch"
PROGRAMS = ("scratch", "ddp", "fsdp")
SIZE, STEPS, LR = 256, 20, 0.02
needs_torch = pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="PyTorch is an extra: pytorch")


def initial():
    """The parameters that the programs draw."""
    rng, params = np.random.default_rng(1), []
    for shape in [(20, 1, 3, 3), (50, 20, 5, 5), (128, 800), (10, 128)]:
        params += [rng.normal(0, 0.1, shape).astype(np.float32), np.zeros(shape[0], np.float32)]
    return params


@cache
def trained_by_scratch():
    """The parameters after 20 steps on two contexts, and the largest change of each array in each step."""
    data, ctx = datasets.load("synthetic", limit=SIZE * STEPS), [mx.cpu(0), mx.cpu(1)]
    replicas = [scratch.get_params([nd.array(p) for p in initial()], c) for c in ctx]
    order = batches.shuffled(SIZE * STEPS, seed=1, epoch=1)
    now, changes = initial(), []
    for X, y in batches.batches(data.train_images, data.train_labels, SIZE, order):
        scratch.train_batch(X, y, replicas, ctx, LR)
        before, now = now, [p.asnumpy() for p in replicas[0]]
        changes.append([np.abs(a - b).max() for a, b in zip(now, before)])
    return now, np.array(changes)


@needs_torch
@pytest.mark.parametrize("name", PROGRAMS)
def test_after_20_steps_a_program_has_the_parameters_of_scratch(name, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = f"--dataset synthetic --limit {SIZE * STEPS} --epochs 1 --lr {LR} --out {tmp_path}/params.npz".split()
    (tmp_path / "mxnet.py").write_text("raise ImportError('the programs run without MXNet')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = finished(*torchrun, FOLDER / f"{name}.py", *options, env={**engine.users_environment(), "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    found = np.load(tmp_path / "params.npz").values()
    expected, changes = trained_by_scratch()
    # As in lenet64.assert_close: a sum of n numbers has a relative error of at most n * EPSILON, in each step.
    rounding = EPSILON * additions(SIZE) * changes.sum(0)
    for a, b, most in zip(found, expected, rounding):
        assert np.abs(a - b).max() <= most


def test_the_programs_differ_only_in_the_functions_that_the_page_is_about():
    trees = [ast.parse((FOLDER / f"{name}.py").read_text()) for name in PROGRAMS]
    functions = [[node for node in tree.body if isinstance(node, ast.FunctionDef)] for tree in trees]
    codes = [{node.name: ast.unparse(node) for node in nodes} for nodes in functions]
    names = {name for code in codes for name in code}
    differing = [{name for name in names if a.get(name) != b.get(name)} for a, b in combinations(codes, 2)]
    own = {"init_params", "lenet", "sgd", "train_batch", "train"}
    assert differing == [own, own, {"train"}]
