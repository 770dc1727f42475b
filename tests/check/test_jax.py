"""Steps in JAX: wrong ones are named, right ones are not accused."""

import importlib.util
import subprocess
import sys

import pytest
from runs import ROOT

from gluon_mgpu import check
from gluon_mgpu.check.judge import DIFFERENT, SAME

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("jax"), reason="JAX is an extra: jax")
SCRATCH = (ROOT / "docs/jax/scratch.py").read_text()
# A smaller network, because JAX compiles for seconds
SMALL = [
    ["[(20, 1, 3, 3), (50, 20, 5, 5), (128, 800), (10, 128)]", "[(16, 784), (10, 16)]"],
    ["W1, b1, W2, b2, W3, b3, W4, b4 = params", "W3, b3, W4, b4 = params"],
    ["convolution(convolution(X, W1, b1), W2, b2)", "X"],
]
OWN_BATCH = "def example_batch(n):\n    return np.random.rand(n, 12), np.random.randint(0, 10, n)\n\n\n"
OWN_DATA = [*SMALL, ["(16, 784)", "(16, 12)"], ["def init_params", f"{OWN_BATCH}def init_params"]]
STALE = [
    ["@jax.jit  # compiled once", "FIRST = []\n\n\n@jax.jit  # compiled once"],
    ["(params)\n\n\n@jax.jit\ndef sgd", "(FIRST[0])\n\n\n@jax.jit\ndef sgd"],
    ["    grads = map(", "    FIRST[:] = device_params[:1]\n    grads = map("],
]
MEANS = [
    ["np.concatenate([lenet(X, params).argmax(1) == y for", "np.mean([(lenet(X, params).argmax(1) == y).mean() for"],
    ["data_iter]).mean()", "data_iter])"],
]
WRONG = {
    "one gradient": ("update", "device 0", [["sum(jax.device_put(x, data[0].device) for x in data)", "data[0]"]]),
    "what jit has kept": ("update", "leaves behind", STALE),
    "mean accuracy": ("accuracy", "0.5893", MEANS),
    "the whole batch": ("devices", "whole", [["np.array_split(data, len(devices))", "[data] * len(devices)"]]),
}
# The form of docs/jax/sharding.py
SHARDED = """
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P


def example_batch(n):
    return np.random.rand(n, 12).astype(np.float32), np.random.randint(5, size=n)


def init_params():
    rng = np.random.default_rng(1)
    W1, W2 = (jnp.float32(rng.normal(0, 0.3, shape)) for shape in [(12, 8), (8, 5)])
    return {"W1": W1, "b1": jnp.zeros(8), "W2": W2}


def loss(params, X, y):
    scores = jnp.tanh(X @ params["W1"] + params["b1"]) @ params["W2"]
    return -jnp.take_along_axis(jax.nn.log_softmax(scores), y[:, None], axis=1).mean()


@jax.jit
def train_batch(X, y, params, lr):
    grads = jax.grad(loss)(params, X, y)
    return jax.tree.map(lambda p, g: p - lr * g, params, grads)
"""
JIT, GRADS = "@jax.jit\n", "    grads = jax.grad(loss)(params, X, y)\n"
SHARD_MAP = """mesh = Mesh(np.array(jax.devices()), ("data",))
specs = {"in_specs": (P("data"), P("data"), P(), P()), "out_specs": P(), "check_vma": False}


@jax.jit
@jax.shard_map(mesh=mesh, **specs)
"""
SUMMED = GRADS + "    grads = jax.lax.pmean(grads, 'data')\n"
PMAP = """@functools.partial(jax.pmap, axis_name="data", in_axes=(0, 0, None, None), out_axes=None)
def step(X, y, params, lr):
"""
NOISE = "    X = X + 0.3 * jax.random.normal(jax.random.key(4), X.shape, X.dtype)\n"
RETURN = "    return [sgd(params, of_device"
UNREACHED = """    COUNT.append(len(devices))
    if len(COUNT) > 50:
        return device_params
"""


def changed(text, *edits):
    """A text with edits (old, new)."""
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    return text


def shard_map(*edits):
    return changed(SHARDED, [JIT, SHARD_MAP.replace("@jax.shard_map(", "@functools.partial(jax.shard_map, ")], *edits)


def pmap(mean):
    take = "    k = jax.device_count()\n    parts = (a.reshape(k, -1, *a.shape[1:]) for a in (X, y))\n"
    body = f"{PMAP}{GRADS}{mean}    return jax.tree.map(lambda p, g: p - lr * g, params, grads)\n\n\n"
    step = f"def train_batch(X, y, params, lr):\n{take}    return step(*parts, params, lr)\n"
    return changed(SHARDED[: SHARDED.index(JIT)] + body + step, ["import jax\n", "import functools\nimport jax\n"])


@pytest.fixture
def compared(tmp_path):
    def compared(text):
        (tmp_path / "step.py").write_text(text)
        return check.compare_file(str(tmp_path / "step.py"), (2,), steps=2)

    return compared


@pytest.mark.slow
@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_step_is_named(compared, case):
    claim, reason, edits = WRONG[case]
    report = compared(changed(SCRATCH, *SMALL, *edits))
    assert reason in report.claims[claim] and reason in report.verdict


FUNCTOOLS = ["import jax\n", "import functools\nimport jax\n"]
RIGHT = {
    "sharding": SHARDED,
    "scratch": changed(SCRATCH, *OWN_DATA),
    "images": SCRATCH,
    "shard_map": shard_map([GRADS, SUMMED], FUNCTOOLS),
    "pmap": pmap("    grads = jax.lax.pmean(grads, 'data')\n"),
    "noise of the whole batch": changed(SHARDED, [GRADS, NOISE + GRADS]),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (i > 0)) for i, case in enumerate(RIGHT)]
)
def test_a_right_step_is_not_accused(compared, case):
    report = compared(RIGHT[case])
    assert report.status == SAME, report.explain()


# after imports: what is no number, and what no step changes
CONSTANTS = {
    "none": "",
    "text and a key": 'CLASSES = np.array(["shirt", "coat"])\nKEY = jax.random.key(0)\n',
    "limits": 'BEST, LAST, K = float("inf"), float("nan"), jax.device_count()\n',
}


@pytest.mark.parametrize(
    "case", ["limits", *(pytest.param(case, marks=pytest.mark.slow) for case in ("none", "text and a key"))]
)
def test_constants_of_a_file_give_no_warning(compared, case):
    report = compared(SHARDED + CONSTANTS[case])
    assert report.status == SAME and "warning" not in report.explain(), report.explain()


@pytest.mark.slow
def test_the_docs_form_with_shardings_can_be_checked():
    assert check.compare_file(str(ROOT / "docs/jax/sharding.py"), (2,), steps=1).status == SAME


SUMMED_BUT_W2 = GRADS + "    grads = {**jax.lax.pmean(grads, 'data'), 'W2': grads['W2']}\n"
SAME_KEY = ["    return jax.grad", f"{NOISE}    return jax.grad"]
WRONG_SHARDINGS = {
    "shard_map without a sum of W2": (shard_map([GRADS, SUMMED_BUT_W2], FUNCTOOLS), "for W2;"),
    "shard_map with sums of means": (shard_map([GRADS, SUMMED.replace("pmean", "psum")], FUNCTOOLS), "2 times"),
    "pmap without a sum": (pmap(""), ""),
    "the same key on each device": (changed(SCRATCH, *SMALL, SAME_KEY), "same random numbers"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", WRONG_SHARDINGS)
def test_a_wrong_step_with_shardings_or_keys_is_named(compared, case):
    text, reason = WRONG_SHARDINGS[case]
    report = compared(text)
    assert report.status == DIFFERENT and reason in report.verdict, report.explain()
    assert "DDP" not in report.verdict


@pytest.mark.slow
def test_what_the_file_keeps_and_lines_that_do_not_run_are_noted(compared):
    text = changed(
        SCRATCH, *OWN_DATA, [RETURN, UNREACHED + RETURN], ["def init_params", "COUNT = []\n\n\ndef init_params"]
    )
    line = text[: text.index("return device_params")].count("\n") + 1
    report = compared(text)
    assert report.status == SAME and any(f"line {line}" in note for note in report.notes)
    assert any("COUNT" in note for note in report.notes)


@pytest.mark.slow
def test_a_process_that_has_started_jax_is_refused(tmp_path):
    (tmp_path / "step.py").write_text(SHARDED)
    program = "import jax; jax.numpy.zeros(1)\nfrom gluon_mgpu import check\ncheck.compare_file('step.py')"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert "JAX has started" in done.stderr.splitlines()[-1]
