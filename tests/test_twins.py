"""The twins of scratch, programs for PyTorch and for JAX, train as scratch does; the pages show how they differ."""

import ast
import importlib.util
import json
import os
import re
import sys
import textwrap
from functools import cache
from itertools import combinations

import mxnet as mx
import numpy as np
import pytest
from lenet64 import EPSILON, additions
from mxnet import nd
from runs import ROOT, finished

from gluon_mgpu import check, scratch
from gluon_mgpu.data import batches, datasets
from gluon_mgpu.support import subprocesses

SIZE, STEPS, LR = 256, 8, 0.02
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
# Runs programs as torchrun does, one after the other. Arguments: a folder, in which each writes what it prints, options
# and the programs.
LAUNCH = """
import json, os, runpy, socket, sys
import torch, torch._dynamo  # which takes seconds, and which the first optimizer would import in each process
torch.set_num_threads(1)
folder, options, *programs = sys.argv[1:]
sys.path.insert(0, folder)
for program in programs:
    name, children = os.path.join(folder, os.path.basename(program)), []
    with socket.create_server(("", 0)) as free:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
    os.environ.update(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    for rank in range(2):
        children.append(os.fork())
        if not children[-1]:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
            os.dup2(os.open(f"{name}.{rank}", os.O_WRONLY | os.O_CREAT), 1)
            sys.argv = [program, *json.loads(options), "--out", f"{name}.npz"]
            runpy.run_path(program, run_name="__main__")
            sys.stdout.flush()
            os._exit(0)
    if any(os.waitpid(child, 0)[1] for child in children):
        sys.exit(f"{program} failed")
"""
OPTIONS = f"--dataset synthetic --limit {SIZE * STEPS} --epochs 1 --lr {LR}".split()


def initial():
    """The parameters that the programs draw."""
    rng, params = np.random.default_rng(1), []
    for shape in [(20, 1, 3, 3), (50, 20, 5, 5), (128, 800), (10, 128)]:
        params += [rng.normal(0, 0.1, shape).astype(np.float32), np.zeros(shape[0], np.float32)]
    return params


@cache
def trained_by_scratch():
    """The parameters after 8 steps on two contexts, and the largest change of each array in each step."""
    data, ctx = datasets.load("synthetic", limit=SIZE * STEPS), [mx.cpu(0), mx.cpu(1)]
    replicas = [scratch.get_params([nd.array(p) for p in initial()], c) for c in ctx]
    order = batches.shuffled(SIZE * STEPS, seed=1, epoch=1)
    now, changes = initial(), []
    for X, y in batches.batches(data.train_images, data.train_labels, SIZE, order):
        scratch.train_batch(X, y, replicas, ctx, LR)
        before, now = now, [p.asnumpy() for p in replicas[0]]
        changes.append([np.abs(a - b).max() for a, b in zip(now, before)])
    return now, np.array(changes)


def assert_trained_as_scratch(file):
    """Fail if the parameters in an .npz file differ from scratch's by more than rounding can explain."""
    expected, changes = trained_by_scratch()
    # As in lenet64.assert_close: a sum of n numbers has a relative error of at most n * EPSILON, in each step.
    rounding = EPSILON * additions(SIZE) * changes.sum(0)
    for a, b, most in zip(np.load(file).values(), expected, rounding):
        assert np.abs(a - b).max() <= most


def functions(path):
    """{name: code} of the functions in a file."""
    nodes = ast.parse((ROOT / path).read_text()).body
    return {node.name: ast.unparse(node) for node in nodes if isinstance(node, ast.FunctionDef)}


def without_mxnet(folder):
    (folder / "mxnet.py").write_text("raise ImportError('the programs run without MXNet')")
    return folder


def assert_says_how_far_it_is_from_one_device(printed):
    [difference] = re.findall(r"^largest difference from one device .*: (\S+)$", printed, re.MULTILINE)
    assert 0 < float(difference) < 1e-6


@pytest.fixture(scope="module")
def trained_by_pytorch(pytorch, tmp_path_factory):
    """The folder in which the programs for PyTorch have run."""
    folder = without_mxnet(tmp_path_factory.mktemp("pytorch"))
    programs = [ROOT / f"docs/pytorch/{name}.py" for name in PYTORCH]
    options = json.dumps([*OPTIONS, "--device", "cpu"])
    done = pytorch.run([sys.executable, "-c", LAUNCH, folder, options, *programs])
    assert done.status == 0, done.err
    return folder


PYTORCH = ["scratch", "ddp", "fsdp"]


@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="PyTorch is an extra: pytorch")
@pytest.mark.parametrize("name", PYTORCH)
def test_after_8_steps_a_program_for_pytorch_has_the_parameters_of_scratch(name, trained_by_pytorch):
    assert_trained_as_scratch(trained_by_pytorch / f"{name}.py.npz")
    assert_says_how_far_it_is_from_one_device((trained_by_pytorch / f"{name}.py.0").read_text())


def run(tmp_path, command, program):
    """Run a twin without MXNet. Returns what it printed, once its parameters are checked."""
    path = os.pathsep.join([str(without_mxnet(tmp_path)), os.environ.get("PYTHONPATH", "")])
    out, environment = tmp_path / "params.npz", {**subprocesses.users_environment(), "PYTHONPATH": path}
    environment["XLA_FLAGS"] = "--xla_backend_optimization_level=0"  # JAX compiles for longer than it computes
    environment.pop("LD_PRELOAD", None)  # tests/two_devices.c is for MXNet
    options = [*OPTIONS, "--device", "cpu", "--out", out]
    done = finished(*command, ROOT / "docs" / program, *options, env=environment)
    assert done.returncode == 0, done.stderr
    assert_trained_as_scratch(out)
    assert_says_how_far_it_is_from_one_device(done.stdout)
    return done.stdout


@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="PyTorch is an extra: pytorch")
@pytest.mark.slow
def test_torchrun_starts_the_programs_for_pytorch(tmp_path):
    run(tmp_path, TORCHRUN, "pytorch/scratch.py")


@pytest.mark.skipif(not importlib.util.find_spec("jax"), reason="JAX is an extra: jax")
@pytest.mark.parametrize("name", ["scratch", "sharding"])
def test_after_8_steps_a_program_for_jax_has_the_parameters_of_scratch(name, tmp_path):
    printed = run(tmp_path, [sys.executable], f"jax/{name}.py")
    if name == "sharding":  # the compiler inserts sums of all gradients
        lines = [line.split("all-reduce of ")[1] for line in printed.splitlines() if "all-reduce" in line]
        shapes = [f"f32[{','.join(map(str, shape))}]" for weight in scratch.SHAPES for shape in (weight, weight[:1])]
        assert sorted(" ".join(lines).split()) == sorted(shapes)


def test_the_programs_for_pytorch_differ_only_in_the_functions_that_the_page_is_about():
    codes = [functions(f"docs/pytorch/{name}.py") for name in ("scratch", "ddp", "fsdp")]
    names = {name for code in codes for name in code}
    differing = [{name for name in names if a.get(name) != b.get(name)} for a, b in combinations(codes, 2)]
    own = {"init_params", "init_net", "lenet", "sgd", "train_batch", "full", "difference", "train"}
    assert differing == [own, own, {"init_net", "full"}]


def test_the_program_for_jax_has_the_functions_of_scratch_in_at_most_110_lines():
    assert functions("gluon_mgpu/scratch.py").keys() <= functions("docs/jax/scratch.py").keys()
    assert len((ROOT / "docs/jax/scratch.py").read_text().splitlines()) <= 110


@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="PyTorch is an extra: pytorch")
@pytest.mark.slow
def test_the_page_s_answer_to_the_exercises_by_hand_is_correct(tmp_path):
    page, program = (ROOT / "docs/pytorch.md").read_text(), (ROOT / "docs/pytorch/by_hand.py").read_text()
    answer = textwrap.dedent(re.search(r"```python\n( +class Buckets:.*?)```", page, re.DOTALL)[1])
    file = tmp_path / "by_hand.py"
    results = []
    for wait in ("\n            self.sums[-1][2].wait()", ""):  # at once: no overlap; and in `finish`
        code = answer.replace("all_reduce(vector)))", f"all_reduce(vector))){wait}")
        code = code.replace("            work.wait()\n", "") if wait else code
        head, rest = program.split("class Buckets:")
        file.write_text(head + code + "\n\nclass " + rest.partition("\n\nclass ")[2])
        lines = finished(*TORCHRUN, file).stdout.splitlines()[-2:]
        results.append([line.endswith("correct") for line in lines])
    assert results == [[True, False], [True, True]]
    assert check.compare_file(str(file), (2,)).same


@pytest.mark.skipif(not importlib.util.find_spec("jax"), reason="JAX is an extra: jax")
@pytest.mark.parametrize("name", ["scratch", "sharding"])
def test_a_last_batch_that_jax_cannot_divide_is_refused_in_one_line(name):
    done = finished(sys.executable, ROOT / f"docs/jax/{name}.py", "--dataset", "synthetic", "--limit", "257")
    assert done.returncode == 1 and done.stderr.startswith("--limit 257: ") and done.stderr.count("\n") == 1
