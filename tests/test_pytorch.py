"""The programs in docs/pytorch train as scratch does, and the page shows how they differ."""

import ast
import importlib.util
import sys
from itertools import combinations

import pytest
import twins
from runs import ROOT, finished

FOLDER = ROOT / "docs/pytorch"
PROGRAMS = ("scratch", "ddp", "fsdp")


@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="PyTorch is an extra: pytorch")
@pytest.mark.parametrize("name", PROGRAMS)
def test_after_20_steps_a_program_has_the_parameters_of_scratch(name, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    out = tmp_path / "params.npz"
    options = [*twins.OPTIONS, "--out", out]
    done = finished(*torchrun, FOLDER / f"{name}.py", *options, env=twins.without_mxnet(tmp_path))
    assert done.returncode == 0, done.stderr
    twins.assert_trained_as_scratch(out)


def test_the_programs_differ_only_in_the_functions_that_the_page_is_about():
    trees = [ast.parse((FOLDER / f"{name}.py").read_text()) for name in PROGRAMS]
    functions = [[node for node in tree.body if isinstance(node, ast.FunctionDef)] for tree in trees]
    codes = [{node.name: ast.unparse(node) for node in nodes} for nodes in functions]
    names = {name for code in codes for name in code}
    differing = [{name for name in names if a.get(name) != b.get(name)} for a, b in combinations(codes, 2)]
    own = {"init_params", "lenet", "sgd", "train_batch", "train"}
    assert differing == [own, own, {"train"}]
