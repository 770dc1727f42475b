"""One training step, on CPU contexts: against one device, the other implementation, and NumPy in float64."""

import mxnet as mx
import numpy as np
import pytest
from mxnet import autograd, nd

from gluon_mgpu import highlevel, scratch

LR = 0.2


def contexts(n):
    return [mx.cpu(i) for i in range(n)]


@pytest.fixture
def params():
    """Parameters large enough that every layer matters, biases included."""
    mx.random.seed(7)
    params = scratch.init_params(scale=0.1)
    for b in params[1::2]:
        b[:] = nd.random.normal(scale=0.1, shape=b.shape)
    return params


def batch(n, seed=3):
    rng = np.random.default_rng(seed)
    return nd.array(rng.random((n, 1, 28, 28))), nd.array(rng.integers(0, 10, n))


def replicas(impl, ctx, params, **options):
    if impl == "scratch":
        return scratch.Replicas(ctx, params=params)
    made = highlevel.Replicas(ctx, **options)
    for p, value in zip(made.net.collect_params().values(), params):
        p.set_data(value)
    return made


def values(made, what="data"):
    """[[array of each parameter] of each device]"""
    of = made.parameters if what == "data" else made.gradients
    return [list(of(device).values()) for device in range(len(made.ctx))]


IMPLS = ["scratch", "highlevel"]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("examples, devices", [(64, 2), (64, 3), (64, 4), (96, 5), (3, 5)])
def test_a_step_on_several_devices_is_the_step_on_one(impl, examples, devices, params):
    X, y = batch(examples)
    one, several = replicas(impl, contexts(1), params), replicas(impl, contexts(devices), params)
    loss_one = np.concatenate([shard.asnumpy() for shard in one.train_batch(X, y, LR)])
    loss_several = np.concatenate([shard.asnumpy() for shard in several.train_batch(X, y, LR)])
    np.testing.assert_allclose(loss_several, loss_one, rtol=1e-5)
    for expected, found, before in zip(values(one)[0], values(several)[0], params):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
        assert np.abs(found - before.asnumpy()).max() > 1e-4  # the step moved it


@pytest.mark.parametrize("impl", IMPLS)
def test_a_device_left_without_an_example_adds_nothing_after_a_step_that_used_it(impl, params):
    one, several = replicas(impl, contexts(1), params), replicas(impl, contexts(3), params)
    for examples in (6, 2, 5, 1):
        X, y = batch(examples, seed=examples)
        one.train_batch(X, y, LR)
        several.train_batch(X, y, LR)
    for expected, found in zip(values(one)[0], values(several)[0]):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("devices", [1, 3])
def test_scratch_and_highlevel_agree_in_losses_summed_gradients_and_updated_parameters(devices, params):
    X, y = batch(48)
    a, b = (replicas(impl, contexts(devices), params) for impl in IMPLS)
    for shard_a, shard_b in zip(a.train_batch(X, y, LR), b.train_batch(X, y, LR)):
        np.testing.assert_allclose(shard_a.asnumpy(), shard_b.asnumpy(), rtol=1e-5)
    for what in ("grad", "data"):  # the gradients summed over the devices
        for on_a, on_b in zip(values(a, what), values(b, what)):
            for array_a, array_b in zip(on_a, on_b):
                np.testing.assert_allclose(array_a, array_b, rtol=1e-4, atol=1e-5 * np.abs(array_a).max())


def test_scratch_and_highlevel_agree_in_every_gradient_of_every_device_before_they_are_summed(params):
    ctx = contexts(2)
    X, y = batch(32)
    by_gluon = replicas("highlevel", ctx, params)
    Xs, ys = highlevel.split_and_load(X, ctx), highlevel.split_and_load(y, ctx)
    highlevel.forward_backward(by_gluon.net, Xs, ys)
    by_hand = [scratch.get_params(params, c) for c in ctx]
    with autograd.record():
        losses = [scratch.loss(scratch.lenet(X_c, W), y_c) for X_c, y_c, W in zip(Xs, ys, by_hand)]
    for shard_loss in losses:
        shard_loss.backward()
    for W, grads in zip(by_hand, values(by_gluon, "grad")):
        for p, grad in zip(W, grads):
            np.testing.assert_allclose(p.grad.asnumpy(), grad, rtol=1e-4, atol=1e-5 * np.abs(grad).max())


@pytest.mark.parametrize("module", [scratch, highlevel])
def test_replicas_that_draw_their_own_parameters_are_equal_on_every_device_before_and_after_a_step(module):
    mx.random.seed(1)
    made = module.Replicas(contexts(3))
    for _ in range(2):
        first, *others = values(made)
        assert min(np.ptp(weights) for weights in first[::2]) > 0.03  # drawn, not constant
        for other in others:
            for a, b in zip(first, other):
                np.testing.assert_array_equal(a, b)
        made.train_batch(*batch(32), LR)


def test_one_seed_draws_the_same_parameters_in_both_implementations_on_any_number_of_devices():
    drawn = []
    for module in (scratch, highlevel):
        for devices in (1, 3):
            mx.random.seed(5)
            drawn.append(values(module.Replicas(contexts(devices)))[0])
    for others in drawn[1:]:
        for a, b in zip(drawn[0], others):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("impl", IMPLS)
def test_replicas_stay_equal_bit_for_bit_after_every_step(impl, params):
    made = replicas(impl, contexts(3), params)
    for step in range(5):
        made.train_batch(*batch(32 + step, seed=step), LR)
        first, *others = values(made)
        for other in others:
            for a, b in zip(first, other):
                np.testing.assert_array_equal(a, b)


def test_an_imperative_net_takes_the_same_step_as_a_hybridized_one(params):
    X, y = batch(32)
    graph, eager = (replicas("highlevel", contexts(2), params, hybridize=h) for h in (True, False))
    graph.train_batch(X, y, LR)
    eager.train_batch(X, y, LR)
    for a, b in zip(values(graph)[0], values(eager)[0]):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def lenet_float64(X, params):
    """LeNet in NumPy, float64, from the definitions of its layers."""

    def convolve(X, W, b):
        windows = np.lib.stride_tricks.sliding_window_view(X, W.shape[2:], (2, 3))
        return np.einsum("nihwyx,oiyx->nohw", windows, W, optimize=True) + b[:, None, None]

    def pool(X):
        n, c, h, w = X.shape
        return X[:, :, : h // 2 * 2, : w // 2 * 2].reshape(n, c, h // 2, 2, w // 2, 2).mean((3, 5))

    W1, b1, W2, b2, W3, b3, W4, b4 = params
    h = pool(np.maximum(convolve(X, W1, b1), 0))
    h = pool(np.maximum(convolve(h, W2, b2), 0)).reshape(len(X), -1)
    return np.maximum(h @ W3.T + b3, 0) @ W4.T + b4


def losses_float64(X, y, params):
    scores = lenet_float64(X, params)
    return np.log(np.exp(scores).sum(1)) - scores[np.arange(len(y)), y]


def test_losses_and_gradients_agree_with_numerical_differentiation_in_float64(params):
    X, y = batch(4)
    made = replicas("scratch", contexts(2), params)
    losses = np.concatenate([shard.asnumpy() for shard in made.train_batch(X, y, LR)])
    exact = [p.asnumpy().astype(np.float64) for p in params]
    X, y = X.asnumpy().astype(np.float64), y.asnumpy().astype(int)
    np.testing.assert_allclose(losses, losses_float64(X, y, exact), rtol=1e-5)
    rng, step = np.random.default_rng(0), 1e-6
    for values_, gradient in zip(exact, values(made, "grad")[0]):
        for index in rng.choice(values_.size, min(12, values_.size), replace=False):
            at = np.unravel_index(index, values_.shape)
            kept, sums = values_[at], []
            for moved in (kept + step, kept - step):
                values_[at] = moved
                sums.append(losses_float64(X, y, exact).sum())
            values_[at] = kept
            numerical = (sums[0] - sums[1]) / (2 * step)
            assert gradient[at] == pytest.approx(numerical, rel=1e-3, abs=1e-4 * float(np.abs(gradient).max()))


def test_sgd_divides_the_summed_gradient_by_the_global_batch():
    p = nd.array([1.0, -2.0, 3.0])
    p.attach_grad()
    p.grad[:] = nd.array([8.0, 4.0, -2.0])
    scratch.sgd([p], lr=0.5, batch_size=4)
    np.testing.assert_array_equal(p.asnumpy(), [0.0, -2.5, 3.25])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("devices", [1, 3])
def test_accuracy_is_the_share_that_numpy_counts_on_any_number_of_devices(impl, devices, params):
    X, _ = batch(50)
    scores = lenet_float64(X.asnumpy().astype(np.float64), [p.asnumpy().astype(np.float64) for p in params])
    y = scores.argmax(1)
    y[:20] = (y[:20] + 1) % 10  # 30 of 50 right
    made = replicas(impl, contexts(devices), params)
    data_iter = [(X[a:b], nd.array(y[a:b])) for a, b in ((0, 24), (24, 48), (48, 50))]
    assert made.evaluate_accuracy(data_iter) == 0.6


class TestWhatTheNotebooksPrinted:
    def test_a_copied_bias_and_its_gradient_are_20_zeros_on_the_device_they_were_copied_to(self):
        new_params = scratch.get_params(scratch.init_params(), mx.cpu(1))
        for b1 in (new_params[1], new_params[1].grad):
            assert b1.context == mx.cpu(1)
            np.testing.assert_array_equal(b1.asnumpy(), np.zeros(20))

    def test_allreduce_leaves_the_sum_on_every_device(self):
        data = [nd.ones((1, 2), ctx=mx.cpu(i)) * (i + 1) for i in range(2)]
        scratch.allreduce(data)
        for i, array in enumerate(data):
            assert array.context == mx.cpu(i)
            np.testing.assert_array_equal(array.asnumpy(), [[3, 3]])

    @pytest.mark.parametrize("module", [scratch, highlevel])
    def test_a_6x4_batch_on_2_devices_is_split_in_rows_0_to_2_and_3_to_5(self, module):
        data = np.arange(24).reshape(6, 4)
        first, second = module.split_and_load(nd.array(data), contexts(2))
        np.testing.assert_array_equal(first.asnumpy(), data[:3])
        np.testing.assert_array_equal(second.asnumpy(), data[3:])
        assert [first.context, second.context] == contexts(2)

    @pytest.mark.parametrize("module", [scratch, highlevel])
    def test_a_4x5_batch_on_4_devices_leaves_one_row_on_each(self, module):
        data = np.arange(20).reshape(4, 5)
        for row, shard in zip(data, module.split_and_load(nd.array(data), contexts(4))):
            np.testing.assert_array_equal(shard.asnumpy(), row[None])

    def test_the_first_convolution_is_the_same_on_every_device_and_its_gradient_is_not(self, params):
        made = replicas("highlevel", contexts(4), params)
        X, y = batch(16)
        highlevel.forward_backward(
            made.net, highlevel.split_and_load(X, made.ctx), highlevel.split_and_load(y, made.ctx)
        )
        weight = made.net.collect_params()["cnn_conv0_weight"]
        for c in made.ctx[1:]:
            np.testing.assert_array_equal(weight.data(c).asnumpy(), weight.data(made.ctx[0]).asnumpy())
            assert np.abs(weight.grad(c).asnumpy() - weight.grad(made.ctx[0]).asnumpy()).max() > 1e-3


@pytest.mark.parametrize("module", [scratch, highlevel])
@pytest.mark.parametrize("examples, sizes", [(96, [20, 19, 19, 19, 19]), (7, [2, 2, 1, 1, 1]), (3, [1, 1, 1])])
def test_no_example_is_dropped_and_shards_differ_by_at_most_one(module, examples, sizes):
    data = np.arange(examples, dtype=np.float32)
    shards = module.split_and_load(nd.array(data), contexts(5))
    assert [len(shard) for shard in shards] == sizes
    np.testing.assert_array_equal(np.concatenate([shard.asnumpy() for shard in shards]), data)


def test_max_pooling_keeps_the_largest_of_each_window():
    net = highlevel.lenet("max")
    highlevel.initialize(net, contexts(1))
    X = nd.random.uniform(shape=(2, 20, 26, 26))
    expected = X.asnumpy().reshape(2, 20, 13, 2, 13, 2).max((3, 5))
    np.testing.assert_array_equal(net[1](X).asnumpy(), expected)
