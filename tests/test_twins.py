"""The programs for PyTorch and for JAX train as the reference does, and have the functions that the pages explain."""

import ast
import importlib.util
import os
import re
import sys
import textwrap
from functools import cache
from itertools import combinations

import numpy as np
import pytest
import reference
from runs import ROOT, finished

from gluon_mgpu import check, scratch
from gluon_mgpu.data import batches, datasets
from gluon_mgpu.support import subprocesses

SIZE, STEPS, LR = 256, 8, 0.02
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
OPTIONS = f"--dataset synthetic --limit {SIZE * STEPS} --epochs 1 --lr {LR}".split()


@cache
def trained():
    """The parameters after 8 steps in float64, and the largest change of each array in each step."""
    data, order = datasets.load("synthetic", limit=SIZE * STEPS), batches.shuffled(SIZE * STEPS, seed=1, epoch=1)
    given = [(data.train_images[chosen] / 255, data.train_labels[chosen]) for chosen in np.split(order, STEPS)]
    path = [reference.initial(), *(params for _, _, params in reference.steps(reference.initial(), given, LR))]
    changes = [[np.abs(a - b).max() for a, b in zip(*pair)] for pair in zip(path, path[1:])]
    params = path[-1]
    return params, np.array(changes)


def assert_trained_as_the_reference(file):
    """Fail if the parameters in an .npz file differ from the reference's by more than rounding can explain."""
    expected, changes = trained()
    # As in reference.assert_close: a sum of n numbers has a relative error of at most n * EPSILON, in each step.
    rounding = reference.EPSILON * reference.additions(SIZE) * changes.sum(0)
    for a, b, most in zip(np.load(file).values(), expected, rounding):
        assert np.abs(a - b).max() <= most


def functions(path):
    """{name: code} of the functions in a file."""
    nodes = ast.parse((ROOT / path).read_text()).body
    return {node.name: ast.unparse(node) for node in nodes if isinstance(node, ast.FunctionDef)}


def run(folder, command, program, device="cpu"):
    """Run a twin without MXNet. Returns what it printed, once its parameters are checked."""
    (folder / "mxnet.py").write_text("raise ImportError('the programs run without MXNet')")
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    environment = {**subprocesses.users_environment(), "PYTHONPATH": path}
    environment["XLA_FLAGS"] = "--xla_backend_optimization_level=0"  # JAX compiles for longer than it computes
    environment.pop("LD_PRELOAD", None)  # tests/two_devices.c is for MXNet
    words = [ROOT / "docs" / program, *OPTIONS, "--device", device, "--out", folder / "params.npz"]
    done = subprocesses.run([*command, *map(str, words)], env=environment, folder=folder, seconds=300)
    assert done.status == 0, done.err
    assert_trained_as_the_reference(folder / "params.npz")
    [difference] = re.findall(r"^largest difference from one device .*: (\S+)$", done.out, re.MULTILINE)
    assert 0 < float(difference) < 1e-6
    return done.out


needs_torch = pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="PyTorch is an extra: pytorch")


@needs_torch
@pytest.mark.parametrize("name", ["scratch", "ddp", "fsdp"])
def test_after_8_steps_a_program_for_pytorch_has_the_parameters_of_the_reference(name, tmp_path):
    run(tmp_path, TORCHRUN, f"pytorch/{name}.py")


@pytest.mark.skipif(not importlib.util.find_spec("jax"), reason="JAX is an extra: jax")
@pytest.mark.parametrize("name", ["scratch", "sharding"])
def test_after_8_steps_a_program_for_jax_has_the_parameters_of_the_reference(name, tmp_path):
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


@needs_torch
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
