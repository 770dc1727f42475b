"""What a step does beyond the notebook's: against NumPy, the other implementation, and the plain step."""

import json
import time

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, nd

from gluon_mgpu import highlevel, scratch
from gluon_mgpu.training import checkpoint, datasets, loop, records
from gluon_mgpu.training.settings import Settings

IMPLS = [scratch, highlevel]
BEYOND = {
    "momentum": {"momentum": 0.9},
    "weight decay": {"weight_decay": 0.1},
    "clipping": {"clip_norm": 0.05},
    "accumulation": {"accumulate": 3},
    "shares": {"shares": (5, 2, 1)},
    "all": {"momentum": 0.5, "weight_decay": 0.01, "clip_norm": 0.1, "accumulate": 2, "shares": (1, 3, 2)},
}


def batch(n, seed):
    rng = np.random.default_rng(seed)
    return nd.array(rng.random((n, 1, 28, 28))), nd.array(rng.integers(0, 10, n))


@pytest.fixture
def start():
    """LeNet's parameters by name, large enough that every layer matters."""
    mx.random.seed(7)
    params = scratch.init_params(scale=0.1)
    for b in params[1::2]:
        b[:] = nd.random.normal(scale=0.1, shape=b.shape)
    return {name: p.asnumpy() for name, p in zip(checkpoint.LENET, params)}


def replicas(module, devices, start, **settings):
    made = module.Replicas([mx.cpu(i) for i in range(devices)], Settings(**settings))
    made.load(start, {name: np.zeros_like(p) for name, p in start.items()} if settings.get("momentum") else {})
    return made


def gradients(parameters, X, y):
    """Mean gradient of the batch on one device, by MXNet's autograd alone."""
    params = scratch.get_params([nd.array(p) for p in parameters.values()], mx.cpu(0))
    with autograd.record():
        losses = scratch.loss(scratch.lenet(X, params), y)
    losses.backward()
    return {name: p.grad.asnumpy().astype(np.float64) / len(y) for name, p in zip(parameters, params)}


def numpy_steps(start, batches, lr, momentum=0.0, weight_decay=0.0, clip_norm=None, **_):
    """The update rules in NumPy, float64."""
    parameters = {name: p.astype(np.float64) for name, p in start.items()}
    velocities = {name: np.zeros_like(p) for name, p in parameters.items()}
    for X, y in batches:
        grads = gradients(parameters, X, y)
        norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
        scale = min(1.0, clip_norm / norm) if clip_norm else 1.0
        for name, p in parameters.items():
            velocities[name] = momentum * velocities[name] - lr * (scale * grads[name] + weight_decay * p)
            parameters[name] = p + velocities[name]
    return parameters, norm


@pytest.mark.parametrize("module", IMPLS)
@pytest.mark.parametrize("settings", BEYOND.values(), ids=BEYOND)
def test_steps_on_three_devices_follow_the_update_rule_in_numpy_for_the_whole_batch(module, settings, start):
    batches = [batch(n, seed=n) for n in (48, 31, 2, 50)]  # 2: fewer examples than devices
    expected, norm = numpy_steps(start, batches, lr=0.2, **settings)
    assert norm > 2 * settings.get("clip_norm", 0)  # clipping is at work
    made = replicas(module, 3, start, **settings)
    for X, y in batches:
        made.train_batch(X, y, 0.2)
    for name, found in made.parameters().items():
        moved = np.abs(expected[name] - start[name]).max()
        np.testing.assert_allclose(found, expected[name], rtol=1e-4, atol=1e-3 * moved)


@pytest.mark.parametrize("settings", BEYOND.values(), ids=BEYOND)
def test_scratch_and_highlevel_take_the_same_steps_and_remember_the_same_velocities(settings, start):
    a, b = (replicas(module, 3, start, **settings) for module in IMPLS)
    for n in (48, 31, 2, 50):
        a.train_batch(*batch(n, seed=n), 0.2)
        b.train_batch(*batch(n, seed=n), 0.2)
    for of_a, of_b in ((a.parameters(), b.parameters()), (a.velocities(), b.velocities())):
        assert of_a.keys() == of_b.keys()
        for name in of_a:
            np.testing.assert_allclose(of_a[name], of_b[name], rtol=1e-3, atol=1e-4 * np.abs(of_a[name]).max())
    assert bool(a.velocities()) == ("momentum" in settings)


def on_each(made, ctx):
    return [list(made.parameters(device).values()) for device in range(len(ctx))]


@pytest.mark.parametrize("module", IMPLS)
@pytest.mark.parametrize("settings", BEYOND.values(), ids=BEYOND)
def test_replicas_stay_equal_bit_for_bit_beyond_the_notebooks_step_too(module, settings, start):
    made = replicas(module, 3, start, **settings)
    for n in (48, 2, 31):
        made.train_batch(*batch(n, seed=n), 0.2)
        first, *others = on_each(made, made.ctx)
        for other in others:
            for p, q in zip(first, other):
                np.testing.assert_array_equal(p, q)


@pytest.mark.parametrize("module", IMPLS)
def test_a_gradient_below_the_clip_norm_is_left_as_it_is(module, start):
    plain, clipped = replicas(module, 2, start), replicas(module, 2, start, clip_norm=1e6)
    for made in (plain, clipped):
        made.train_batch(*batch(32, seed=1), 0.2)
    for name, p in plain.parameters().items():
        np.testing.assert_array_equal(p, clipped.parameters()[name])


@pytest.mark.parametrize("module", IMPLS)
def test_shares_of_80_and_20_put_80_and_20_of_100_examples_on_the_devices(module):
    data, ctx = nd.arange(100), [mx.cpu(0), mx.cpu(1)]
    first, second = module.split_and_load(data, ctx, (80, 20))
    assert [first.context, second.context] == ctx
    np.testing.assert_array_equal(first.asnumpy(), np.arange(80))
    np.testing.assert_array_equal(second.asnumpy(), np.arange(80, 100))


@pytest.mark.parametrize("module", IMPLS)
def test_scores_come_in_the_order_of_the_batch_however_it_is_shared(module, start):
    X, _ = batch(37, seed=1)
    scores = [
        np.concatenate([shard.asnumpy() for shard in replicas(module, n, start, shares=shares).predict(X)])
        for n, shares in ((1, None), (3, None), (3, (9, 1, 3)))
    ]
    for other in scores[1:]:
        np.testing.assert_allclose(other, scores[0], rtol=1e-4, atol=1e-5)


class TestResNet18:
    def test_it_has_the_layers_and_the_parameters_of_resnet_18(self):
        made = highlevel.Replicas([mx.cpu(0)], Settings(model="resnet18"))
        weights = {name: a.shape for name, a in made.parameters().items() if a.ndim > 1}
        stages = [(64, 64), (128, 64), (256, 128), (512, 256)]  # (channels, channels of the stage before)
        expected = [(64, 1, 3, 3)]
        for channels, before in stages:
            shortcut = [(channels, before, 1, 1)] if channels != before else []
            expected += [(channels, before, 3, 3), (channels, channels, 3, 3), *shortcut]
            expected += 2 * [(channels, channels, 3, 3)]
        assert list(weights.values()) == [*expected, (10, 512)]
        trained = sum(p.size for n, p in made.parameters().items() if "running" not in n)
        weights_alone = sum(int(np.prod(shape)) for shape in weights.values())
        biases = sum(shape[0] for shape in weights.values())
        batch_norms = 2 * (64 * 5 + 4 * (128 + 256 + 512))
        assert trained == weights_alone + biases + batch_norms

    def test_its_shapes_are_those_of_the_variant_for_28x28_images(self):
        net = highlevel.resnet18()
        highlevel.initialize(net, [mx.cpu(0)], hybridize=False)
        X, shapes = nd.zeros((2, 1, 28, 28)), []
        for layer in net:
            X = layer(X)
            shapes.append(X.shape[1:])
        after_blocks = [(64, 28, 28)] * 2 + [(128, 14, 14)] * 2 + [(256, 7, 7)] * 2 + [(512, 4, 4)] * 2
        assert shapes == [*[(64, 28, 28)] * 3, *after_blocks, (512, 1, 1), (512,), (10,)]

    def test_a_residual_block_adds_its_input(self):
        block = highlevel.Residual(3)
        block.initialize(mx.init.Zero())
        X = nd.random.normal(shape=(2, 3, 5, 5))
        np.testing.assert_array_equal(block(X).asnumpy(), np.maximum(X.asnumpy(), 0))

    @pytest.mark.parametrize("hybridize", [True, False])
    def test_replicas_stay_equal_and_running_statistics_are_means_weighted_by_examples(self, hybridize):
        ctx, (X, y) = [mx.cpu(i) for i in range(2)], batch(8, seed=2)
        mx.random.seed(0)
        made = highlevel.Replicas(ctx, Settings(model="resnet18", shares=(3, 1)), hybridize)
        expected = {}
        for part, weight in ((slice(0, 6), 0.75), (slice(6, 8), 0.25)):
            mx.random.seed(0)
            alone = highlevel.Replicas([mx.cpu(0)], Settings(model="resnet18"), hybridize=False)
            alone.train_batch(X[part], y[part], 0.1)
            for name, p in alone.parameters().items():
                if "running" in name:
                    expected[name] = expected.get(name, 0) + weight * p
        made.train_batch(X, y, 0.1)
        assert len(expected) == 2 * 17  # one after the stem, two a block
        for name, p in expected.items():
            np.testing.assert_allclose(made.parameters()[name], p, rtol=1e-3, atol=1e-6)
        for n in (5, 1, 8):
            made.train_batch(X[:n], y[:n], 0.1)
        first, second = on_each(made, ctx)
        for p, q in zip(first, second):
            np.testing.assert_array_equal(p, q)

    def test_hybridized_and_not_it_keeps_the_same_running_statistics_over_steps(self):
        left = []
        for hybridize in (True, False):
            mx.random.seed(0)
            made = highlevel.Replicas([mx.cpu(0), mx.cpu(1)], Settings(model="resnet18"), hybridize)
            for n in range(3):
                made.train_batch(*batch(8, seed=n), 0.01)
            left.append(made.parameters())
        for name, p in left[0].items():
            if "running" in name:
                np.testing.assert_allclose(p, left[1][name], rtol=1e-2, atol=1e-4)


class TestSharesAuto:
    """One CPU context is made slower: it computes its shard's scores four times."""

    @pytest.fixture
    def slow(self, monkeypatch):
        lenet = scratch.lenet

        def four_times_on_the_second_context(X, params):
            scores = lenet(X, params)
            if X.context == mx.cpu(1):
                for _ in range(3):
                    scores = scores + 0 * lenet(X, params)
            return scores

        monkeypatch.setattr(scratch, "lenet", four_times_on_the_second_context)

    def measured(self):
        ctx, data = [mx.cpu(0), mx.cpu(1)], datasets.synthetic(256, 100, seed=0)
        settings = Settings(dataset="synthetic", shares="auto")
        return loop.measured_shares(lambda s: scratch.Replicas(ctx, s), ctx, settings, data)

    def test_it_gives_the_slower_device_less_and_says_so(self, slow, capsys):
        shares = self.measured()
        assert f"--shares auto measured the devices and chose {shares[0]},{shares[1]}" in capsys.readouterr().err
        assert sum(shares) == 100 and 60 < shares[0] < 95  # 80 where both have a core of their own

    @pytest.mark.slow  # a time, which wants the cores for itself
    def test_a_step_with_its_shares_takes_less_time_than_with_even_ones(self, slow):
        shares = self.measured()
        X, y = batch(256, seed=0)
        made = {s: scratch.Replicas([mx.cpu(0), mx.cpu(1)], Settings(shares=s)) for s in (None, shares)}
        times = {s: [] for s in made}
        for _ in range(12):
            for s, replicas in made.items():  # in turn
                nd.waitall()
                start = time.perf_counter()
                replicas.train_batch(X, y, 0.1)
                nd.waitall()
                times[s].append(time.perf_counter() - start)
        # about 0.6 where both have a core of their own
        assert np.median(times[shares][2:]) < 0.9 * np.median(times[None][2:]), times

    def test_the_first_step_of_a_device_does_not_count(self):
        class ColdOnTheSecond:
            """The second device takes long for its first step of any size, and as long as the first one afterwards."""

            def __init__(self, _):
                self.seen = set()

            def forward_backward(self, X, y, shares):
                cold = shares not in self.seen
                self.seen.add(shares)
                return [Ready(0.1), Ready(0.5 if cold else 0.1)]

        class Ready:
            def __init__(self, seconds):
                self.at = time.perf_counter() + seconds

            def wait_to_read(self):
                time.sleep(max(0, self.at - time.perf_counter()))

        data = datasets.synthetic(256, 100, seed=0)
        ctx = [mx.cpu(0), mx.cpu(1)]
        shares = loop.measured_shares(ColdOnTheSecond, ctx, Settings(shares="auto"), data)
        assert 40 <= shares[0] <= 60

    def test_a_run_keeps_the_shares_that_it_chose_and_is_resumed_with_them(self, slow, tmp_path, capsys):
        options = {"dataset": "synthetic", "limit": 300, "seed": 1, "device": "cpu"}
        scratch.train(2, 64, 0.1, epochs=1, shares="auto", out=tmp_path, **options)
        chosen = json.loads((tmp_path / "config.json").read_text())["shares"]
        assert chosen[0] > chosen[1]
        assert records.options(tmp_path)["shares"] == tuple(chosen)
