"""The programs for PyTorch and for JAX train as the reference does."""

import importlib
import importlib.util
import os
import re
import sys
import textwrap
from contextlib import nullcontext
from functools import cache

import numpy as np
import pytest
import reference
from runs import ROOT, finished

from gluon_mgpu import check, scratch
from gluon_mgpu.data import batches, datasets
from gluon_mgpu.support import subprocesses

SIZE, STEPS, LR = 256, 8, 0.02
HYBRID = 64, 20, 0.01  # the batch size, number of steps and learning rate of the programs called hybrid
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
OPTIONS = f"--dataset synthetic --limit {SIZE * STEPS} --epochs 1 --lr {LR}".split()


@cache
def trained(size, steps, lr):
    """The parameters after these steps in float64, and the largest change of each array in each step."""
    data, n = datasets.load("synthetic", limit=size * steps), size * steps
    order = np.arange(n) if (size, steps, lr) == HYBRID else batches.shuffled(n, seed=1, epoch=1)
    given = [(data.train_images[chosen] / 255, data.train_labels[chosen]) for chosen in np.split(order, steps)]
    path = [reference.initial(), *(params for _, _, params in reference.steps(reference.initial(), given, lr))]
    changes = [[np.abs(a - b).max() for a, b in zip(*pair)] for pair in zip(path, path[1:])]
    params = path[-1]
    return params, np.array(changes)


def assert_trained_as_the_reference(found, size=SIZE, steps=STEPS, lr=LR):
    """Fail if parameters differ from the reference's by more than rounding can explain."""
    expected, changes = trained(size, steps, lr)
    # As in reference.assert_close: a sum of n numbers has a relative error of at most n * EPSILON, in each step.
    rounding = reference.EPSILON * reference.additions(size) * changes.sum(0)
    found = list(found)
    assert len(found) == len(expected)
    for a, b, most in zip(found, expected, rounding):
        assert np.abs(a - b).max() <= most


def run(folder, command, program, device="cpu"):
    """Run a twin without MXNet. Returns what it printed, once its parameters are checked."""
    (folder / "mxnet.py").write_text("raise ImportError('the programs run without MXNet')")
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    environment = {**subprocesses.users_environment(), "PYTHONPATH": path}
    environment["XLA_FLAGS"] = "--xla_backend_optimization_level=0"  # JAX compiles for longer than it computes
    environment.pop("LD_PRELOAD", None)  # tests/two_devices.c is for MXNet
    is_hybrid = program.endswith("hybrid.py")
    options = ["--dataset", "synthetic"] if is_hybrid else OPTIONS
    words = [ROOT / "docs" / program, *options, "--device", device, "--out", folder / "params.npz"]
    done = subprocesses.run([*command, *map(str, words)], env=environment, folder=folder, seconds=300)
    assert done.status == 0, done.err
    assert_trained_as_the_reference(np.load(folder / "params.npz").values(), *(HYBRID if is_hybrid else ()))
    [difference] = re.findall(r"^largest difference from one device .*: (\S+)$", done.out, re.MULTILINE)
    assert 0 < float(difference) < 1e-6
    return done.out


def shapes_of(lines):
    """The shapes in lines such as "f32[32,10] f32[10]"."""
    return {tuple(map(int, shape.split(","))) for line in lines for shape in re.findall(r"\[(.*?)\]", line)}


ROWS, COLUMNS = "[[0, 1], [2, 3]]", "[[0, 2], [1, 3]]"
needs_jax = pytest.mark.skipif(not importlib.util.find_spec("jax"), reason="JAX is an extra: jax")
needs_torch = pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="PyTorch is an extra: pytorch")
slow = pytest.mark.slow


@needs_torch
@pytest.mark.parametrize("name", ["ddp", *(pytest.param(name, marks=slow) for name in ("scratch", "fsdp"))])
def test_after_8_steps_a_program_for_pytorch_has_the_parameters_of_the_reference(name, tmp_path):
    run(tmp_path, TORCHRUN, f"pytorch/{name}.py")


@needs_jax
@pytest.mark.parametrize("name", ["sharding", pytest.param("scratch", marks=slow)])
def test_after_8_steps_a_program_for_jax_has_the_parameters_of_the_reference(name, tmp_path):
    printed = run(tmp_path, [sys.executable], f"jax/{name}.py")
    if name == "sharding":  # the compiler inserts sums of all gradients
        lines = [line.split("all-reduce of ")[1] for line in printed.splitlines() if "all-reduce" in line]
        shapes = [f"f32[{','.join(map(str, shape))}]" for weight in scratch.SHAPES for shape in (weight, weight[:1])]
        assert sorted(" ".join(lines).split()) == sorted(shapes)


@needs_torch
@slow
def test_after_20_steps_a_mesh_of_processes_in_pytorch_has_the_parameters_of_the_reference(tmp_path):
    run(tmp_path, [*TORCHRUN[:-1], "4"], "pytorch/hybrid.py")


@needs_jax
def test_after_20_steps_a_mesh_in_jax_has_the_parameters_of_the_reference_and_sums_in_rows_and_columns(tmp_path):
    printed = run(tmp_path, [sys.executable], "jax/hybrid.py")
    sums = re.findall(r"^all-reduce of (.*) over (.*)$", printed, re.MULTILINE)
    rows, columns = ([found for found, groups in sums if groups == over] for over in (ROWS, COLUMNS))
    parts = [(20, 1, 3, 3), (20,), (50, 20, 5, 5), (50,), (64, 800), (64,), (10, 64), (10,)]  # on each device
    assert shapes_of(rows) == {(32, 10), (32, 800)}  # of the 32 examples of a row, forward and backward
    assert shapes_of(columns) == {*parts} and len(rows) + len(columns) == len(sums)


@needs_torch
@slow
def test_check_accepts_a_mesh_with_a_reference_and_finds_a_gradient_that_is_summed_twice(monkeypatch):
    torch = importlib.import_module("torch")
    monkeypatch.syspath_prepend(ROOT / "docs/pytorch")
    program = importlib.import_module("hybrid")

    def twice(state, batch):
        for p in state[0].parameters():  # a hook: of each device of a row, although these are equal
            if not hasattr(p, "placements"):
                p.register_hook(lambda grad: 2 * grad)
        program.train_batch(*batch, *state)

    for step, is_same in ((lambda state, batch: program.train_batch(*batch, *state), True), (twice, False)):
        report = check.parallel(
            make=lambda rank, world: program.init_net(LR),
            step=step,
            batch=lambda i, n: (torch.rand(n, 1, 28, 28), torch.randint(10, (n,))),
            processes=(4,),
            divide="none",
            reference=lambda state, batch: program.train_batch(*batch, *state),
            seconds=300,
        )
        assert report.same == is_same, report.explain()


@needs_torch
@slow
def test_the_page_s_accumulation_with_no_sync_takes_the_step_of_a_whole_batch():
    torch = importlib.import_module("torch")
    [code] = re.findall(r"```python\n(for i, \(X_part.*?)```", (ROOT / "docs/pytorch.md").read_text(), re.DOTALL)
    ddp, functional = importlib.import_module("torch.nn.parallel"), importlib.import_module("torch.nn.functional")

    def make(rank, world):
        torch.manual_seed(1)
        net = ddp.DistributedDataParallel(torch.nn.Linear(5, 3))
        return net, torch.optim.SGD(net.parameters(), lr=LR)

    def accumulate(state, batch):
        (net, trainer), (X, y), dist = state, batch, torch.distributed
        own = [array.tensor_split(dist.get_world_size())[dist.get_rank()] for array in batch]
        parts = [*zip(*[array.split(2) for array in own])]
        exec(code, {"F": functional, "nullcontext": nullcontext, **locals()})
        trainer.zero_grad()

    def plain(state, batch):
        net, trainer = state
        functional.cross_entropy(net(batch[0]), batch[1]).backward()
        trainer.step()
        trainer.zero_grad()

    report = check.parallel(
        make=make,
        step=accumulate,
        batch=lambda i, n: (torch.rand(n, 5), torch.randint(3, (n,))),
        processes=(2,),
        divide="none",
        reference=plain,
    )
    assert report.same, report.explain()


@needs_torch
@slow
def test_the_page_s_answer_to_the_exercises_by_hand_is_correct(tmp_path):
    page, program = (ROOT / "docs/rings.md").read_text(), (ROOT / "docs/pytorch/by_hand.py").read_text()
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


@needs_jax
@pytest.mark.parametrize("name", ["sharding", pytest.param("scratch", marks=slow)])
def test_a_last_batch_that_jax_cannot_divide_is_refused_in_one_line(name):
    done = finished(sys.executable, ROOT / f"docs/jax/{name}.py", "--dataset", "synthetic", "--limit", "257")
    assert done.returncode == 1 and done.stderr.startswith("--limit 257: ") and done.stderr.count("\n") == 1
