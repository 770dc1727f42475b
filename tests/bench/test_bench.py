"""The benchmarks measure the same training with every implementation, and their tables compare what they say.

mxnet is imported here, so torch is not: it runs in separate processes.
"""

import importlib.util
import io
import sys
import time
from contextlib import contextmanager

import numpy as np
import pytest
from bench import grids, mxnet_points, timeline, timing
from bench.grids import TUNED, Point
from mxnet import nd
from reference import EPSILON, additions
from runs import ROOT, program

from gluon_mgpu import highlevel
from gluon_mgpu.compat import startup
from gluon_mgpu.data import datasets
from gluon_mgpu.support.errors import Error, UsageError
from gluon_mgpu.training.models import read_arrays

TORCH = pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="make torch installs PyTorch")


def point(impl, workers=1, **options):
    return Point(impl, "lenet", 32, 2 // workers, workers, **options)


OTHERS = [point(TUNED), point("layer-wise partitioning"), point("scratch", 2)]
SLOW = [pytest.param(other, marks=pytest.mark.slow) for other in OTHERS]
SLOW += [pytest.param(point("PyTorch, channels_last", 2), marks=[pytest.mark.slow, TORCH])]


@pytest.mark.parametrize("subject", [point("scratch"), *SLOW], ids=str)
def test_every_implementation_is_measured_on_the_same_training(subject):
    one = next(mxnet_points.results(Point("scratch", "lenet", 32, 1), steps=1))
    with grids.taking_turns(subject, 1) as turn:
        other = turn()
        assert turn()["loss"] == other["loss"]
    assert other["loss"] == pytest.approx(one["loss"], rel=additions(32) * EPSILON) and other["step_ms"] > 0.1


@pytest.mark.slow
def test_the_notebooks_code_is_measured_with_mxnets_own_settings():
    with grids.taking_turns(point("notebook"), 1) as turn:
        assert turn()["step_ms"] > 0.1
    with pytest.raises(Error):  # here, mxnet is imported already
        startup.use_stock_settings()


def test_tables_and_pictures_compare_the_examples_per_second_of_the_same_round(monkeypatch):
    times = zip(grids.GRIDS["partition"].points, [[60, 30], [20, 5], *[[9, 9]] * 3])
    found = {point: iter(ms) for point, ms in times}

    @contextmanager
    def taking_turns(point, steps):
        yield lambda: {"step_ms": next(found[point]), "loss": None}

    monkeypatch.setattr(grids, "taking_turns", taking_turns)
    result = grids.measure_grid("partition", rounds=2, steps=1)
    row = grids.table(result).splitlines()[5]
    assert [*filter(None, map(str.strip, row.split("  ")))] == [
        *("network partitioning, 2 contexts", "12.50 (5.00-20.00)", "20480", "4.50 (3.00-6.00)")
    ]
    grids.draw(result, file := io.BytesIO())
    assert file.getvalue().startswith(b"\x89PNG")
    found[Point("data parallelism", contexts=1)] = iter([4])
    [only] = grids.measure_grid("partition", 1, 1, only=["data parallelism, 1 thread"])["points"]
    assert only["step_ms"] == [4]
    with pytest.raises(UsageError):
        grids.measure_grid("partition", 1, 1, only=["nothing"])
    half = {"batch_size": 128, "step_ms": [60, 30]}
    assert grids.ratios({**half, "batch_size": 256}, half) == [0.5, 0.5]


def test_the_time_until_a_call_returns_excludes_the_wait():
    times = next(timing.calls_of(lambda: None, lambda: time.sleep(0.05), 4))
    assert times["returns ms"] < times["done ms"] >= 50 and 50 / 4 <= times["step_ms"] < times["done ms"]


def test_a_recording_has_each_operator_of_each_step_on_each_context():
    model = mxnet_points.create(point("scratch"))
    with timeline.recorded() as spans:
        for _ in range(3):
            model.step(nd.ones((16, 1, 28, 28)), nd.zeros(16), 0.1)
    for context in range(2):
        names = [operator for of, operator, *_ in spans if of == context]
        expected = {"Convolution": 2, "_backward_Convolution": 2, "FullyConnected": 2, "Pooling": 2, "sgd_update": 8}
        assert {name: names.count(name) for name in expected} == {name: 3 * n for name, n in expected.items()}
        assert 0 < timeline.busy(spans, context, 2) <= 1


PYTORCHS = """
    import sys
    import numpy as np
    import torch
    scripts, file = sys.argv[1:]
    sys.path.append(scripts)
    from bench import torch_points
    assert "mxnet" not in sys.modules
    X, y, *params = np.load(file).values()
    net = torch_points.network("resnet18").double()
    torch_points.load(net, dict(enumerate(params)))
    losses = torch.nn.functional.cross_entropy(net(torch.from_numpy(X)), torch.from_numpy(y).long(), reduction="none")
    print(*losses.tolist())
"""


@TORCH
@pytest.mark.slow
def test_pytorchs_resnet_is_ours(pytorch, tmp_path):
    """In float64, its losses are ours, in training."""
    made, rng = mxnet_points.create(Point("highlevel", "resnet18", 4, 1)), np.random.default_rng(0)
    state = read_arrays(made)
    made.load({n: p + 0.1 * rng.standard_normal(p.shape, np.float32) * n.endswith("bias") for n, p in state.items()})
    made.net.cast("float64")
    images, labels = datasets.synthetic(4, 1, seed=3)[1:3]
    X, y = nd.array(images / 255, dtype="float64"), nd.array(labels, dtype="float64")
    [losses] = highlevel.forward_backward(made.net, [X], [y])
    params = [p.data() for p in made.net.collect_params().values() if p.grad_req != "null"]
    np.savez(tmp_path / "ours.npz", *[array.asnumpy() for array in (X, y, *params)])
    done = pytorch.run([sys.executable, "-c", program(PYTORCHS), ROOT / "scripts", tmp_path / "ours.npz"])
    assert done.status == 0, done.err
    np.testing.assert_allclose([*map(float, done.out.split())], losses.asnumpy(), rtol=0, atol=1e-12)
