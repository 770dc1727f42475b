"""The programs in docs/jax train as scratch does, and have its functions."""

import ast
import importlib.util
import sys

import pytest
import twins
from runs import ROOT, finished

from gluon_mgpu import scratch

FOLDER = ROOT / "docs/jax"
needs_jax = pytest.mark.skipif(not importlib.util.find_spec("jax"), reason="JAX is an extra: jax")


def run(name, folder):
    options = [*twins.OPTIONS, "--out", folder / "params.npz"]
    done = finished(sys.executable, FOLDER / f"{name}.py", *options, env=twins.without_mxnet(folder))
    assert done.returncode == 0, done.stderr
    twins.assert_trained_as_scratch(folder / "params.npz")
    return done.stdout


@needs_jax
def test_after_20_steps_the_program_has_the_parameters_of_scratch(tmp_path):
    run("scratch", tmp_path)


@needs_jax
def test_the_compiler_inserts_sums_of_all_gradients_and_the_parameters_are_those_of_scratch(tmp_path):
    printed = run("sharding", tmp_path)
    lines = [line.split("all-reduce of ")[1] for line in printed.splitlines() if "all-reduce" in line]
    shapes = [f"f32[{','.join(map(str, shape))}]" for weight in scratch.SHAPES for shape in (weight, weight[:1])]
    assert sorted(" ".join(lines).split()) == sorted(shapes)


def test_the_program_has_the_functions_of_scratch_in_at_most_100_lines():
    text = (FOLDER / "scratch.py").read_text()
    functions = [node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    lesson = ast.parse((ROOT / "gluon_mgpu/scratch.py").read_text())
    assert {node.name for node in lesson.body if isinstance(node, ast.FunctionDef)} <= {*functions}
    assert len(text.splitlines()) <= 100
