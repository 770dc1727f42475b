"""A converted network trains as MXNet does: the same parameters, with the same gradients."""

import json
import runpy

import mxnet as mx
import numpy as np
import pytest
from conversions import files, needs
from mxnet import autograd, gluon
from mxnet import symbol as s

from gluon_mgpu import convert
from gluon_mgpu.convert import gradients, operators
from gluon_mgpu.convert.graph import in_float64
from gluon_mgpu.support.errors import Error

X = s.var("data")
RATE, MOMENTUM, DECAY = 0.05, 0.9, 0.01


def dense(x, name, units=6, **options):
    return s.FullyConnected(x, num_hidden=units, flatten=False, name=name, **options)


def scaled():
    """Parameters that are reshaped, sliced, tiled, and put through a function."""
    x = s.broadcast_mul(dense(X, "fc"), s.exp(s.reshape(s.var("scale", shape=(6,)), (1, 6))))
    bias = s.tile(s.slice_axis(s.var("bias", shape=(5,)), axis=0, begin=1, end=4), 2)
    return s.broadcast_add(x, s.expand_dims(bias, 0))


def normalized():
    """Weight normalization."""
    v = s.var("v", shape=(6, 6))
    weight = s.broadcast_mul(s.var("g", shape=(6, 1)), s.broadcast_div(v, s.norm(v, axis=1, keepdims=True)))
    return dense(X, "fc", weight=weight, no_bias=True)


def tied():
    """A matrix, and its transpose."""
    w = s.var("w", shape=(4, 6))
    return dense(s.tanh(dense(X, "encode", 4, weight=w)), "decode", weight=s.transpose(w))


def straight_through():
    y = dense(X, "fc")
    return dense(y + s.BlockGrad(s.round(y) - y), "out")


def reversed_gradient():
    return s.Group([dense(X, "label"), dense(s.contrib.gradientmultiplier(dense(X, "fc"), scalar=-0.5), "domain")])


def constant():
    """A constant is multiplied, and is the weight of an embedding."""
    table = s.var("table", shape=(6, 6), init="Constant_table")
    x = s.dot(dense(X, "fc"), s.var("adjacency", shape=(6, 6), init="Constant_adjacency"))
    return s.broadcast_add(x, s.sum(s.Embedding(s.floor(s.relu(X)), table, input_dim=6, output_dim=6), axis=1))


def frozen():
    return dense(s.relu(dense(X, "first", weight=s.var("first_weight", lr_mult=0.0))), "second")


def convolutional():
    x = s.reshape(X, (-1, 1, 2, 3))
    for k, fixed in enumerate((True, False)):
        x = s.Convolution(x, kernel=(3, 3), pad=(1, 1), num_filter=4, name=f"conv{k}")
        x = s.LeakyReLU(s.BatchNorm(x, fix_gamma=fixed, name=f"norm{k}"), act_type="leaky", name=f"slope{k}")
    return x


def unrolled():
    cell = gluon.rnn.LSTMCell(4, input_size=2, prefix="lstm_")
    x = s.reshape(X, (-1, 3, 2))
    zeros = s.slice_axis(s.zeros_like(X), axis=1, begin=0, end=4)
    return cell.unroll(3, x, layout="NTC", merge_outputs=True, begin_state=[zeros, zeros])[0]


def recurrent():
    """Gluon's LSTM, whose parameters are packed."""
    lstm = gluon.rnn.LSTM(4, bidirectional=True, input_size=2, layout="NTC", prefix="lstm_")
    return lstm(s.reshape(X, (-1, 3, 2)))


def deep():
    """Two layers: MXNet's float64 gradients of the first one read memory that nothing has written."""
    lstm = gluon.rnn.LSTM(4, num_layers=2, input_size=2, layout="NTC", prefix="lstm_")
    return lstm(s.reshape(X, (-1, 3, 2)))


def shared():
    """A layer that is called twice, and an embedding that is also the output's weight."""
    weight = s.var("word", shape=(6, 4))
    x = s.sum(s.Embedding(s.floor(s.relu(X)), weight, input_dim=6, output_dim=4), axis=1)
    for _ in range(2):
        x = s.tanh(dense(x, "same", 4, weight=s.var("same_weight"), bias=s.var("same_bias")))
    return dense(s.Dropout(x, p=0.0), "out", weight=weight)


def attention():
    x = s.reshape(X, (-1, 3, 2))
    query, key, value = (dense(x, name, 4) for name in ("query", "key", "value"))
    y = s.batch_dot(s.softmax(s.batch_dot(query, key, transpose_b=True) / 2), value)
    return s.LayerNorm(dense(y, "out", 2) + x, name="norm")


NETWORKS = [scaled, constant, straight_through, normalized, tied, reversed_gradient]
NETWORKS += [frozen, convolutional, unrolled, recurrent, deep, shared, attention]
# The parameters that MXNet does not train
FIXED = {constant: {"table", "adjacency"}, frozen: {"first_weight"}, convolutional: {"norm0_gamma"}}


def mxnets(symbol, given, inputs, heads, fixed, dtype):
    """The parameters after one step for each array of inputs, from MXNet's gradients and the definition of SGD.

    dtype: float64 if possible, because in float32, oneDNN computes a wrong gradient of a bias whose weight needs none.
    """
    values = {name: mx.nd.array(array, dtype=dtype) for name, array in given.params.items()}
    trained = {*symbol.list_arguments()} - {"data"} - fixed
    momenta = {name: np.zeros(values[name].shape) for name in trained}
    for X in inputs:
        values["data"] = mx.nd.array(X, dtype=dtype)
        for name in trained:
            values[name].attach_grad()
        with autograd.record():
            outputs = mx.nd.CachedOp(symbol)(*(values[name] for name in symbol.list_inputs()))
        autograd.backward(outputs, [mx.nd.array(head, dtype=dtype) for head in heads])
        for name in trained:
            change = values[name].grad.asnumpy() + DECAY * values[name].asnumpy()
            momenta[name] = MOMENTUM * momenta[name] + change
            values[name] = mx.nd.array(values[name].asnumpy() - RATE * momenta[name], dtype=dtype)
    return {name: array.asnumpy() for name, array in values.items()}


def pytorchs(folder, inputs, heads):
    import torch
    from safetensors import safe_open
    from safetensors.torch import load_model

    net = runpy.run_path(str(folder / "net.py"))["Net"]()
    load_model(net, folder / "net.safetensors")
    net.double()
    optimizer = torch.optim.SGD(net.parameters(), RATE, MOMENTUM, weight_decay=DECAY)
    for X in inputs:
        optimizer.zero_grad()
        outputs = net(torch.from_numpy(X).double())
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        torch.autograd.backward(outputs, [torch.from_numpy(head).double() for head in heads])
        optimizer.step()
    with safe_open(folder / "net.safetensors", "np") as file:
        return [(name, net.state_dict()[key].numpy()) for key, name in file.metadata().items()]


@pytest.mark.slow
def test_gradients_of_several_recurrent_layers_are_computed_in_float32(tmp_path):
    for build, dtype in ((deep, "float32"), (recurrent, "float64")):
        gradients.write_reference(convert.from_files(*files(tmp_path, build(), data=(8, 6)), (6,)), tmp_path / "net")
        assert json.loads((tmp_path / "net.gradients/mxnet.json").read_text())["dtype"] == dtype
        with np.load(tmp_path / "net.gradients/inputs.npz") as arrays:
            assert {array.dtype for array in arrays.values()} == {np.dtype(dtype)}


@pytest.mark.slow
def test_gradients_of_what_mxnet_computes_in_float32_may_differ_as_in_float32(tmp_path):
    """MXNet resizes float64 numbers in float32."""
    resized = s.contrib.BilinearResize2D(s.reshape(X, (-1, 1, 2, 3)), height=3, width=5)
    network = convert.from_files(*files(tmp_path, dense(resized, "out"), data=(8, 6)), (6,))
    gradients.write_reference(network, tmp_path / "net")
    settings = json.loads((tmp_path / "net.gradients/mxnet.json").read_text())
    assert (settings["dtype"], settings["precision"]) == ("float64", "float32")
    rows = np.random.default_rng(0).random((1, 1, 2, 3))
    by_hand = rows[..., 0, 0] / 3 + rows[..., 0, 1] * 2 / 3  # the second of four columns, with aligned corners
    found = mx.nd.contrib.BilinearResize2D(mx.nd.array(rows, dtype="float64"), height=3, width=4)[0, 0, 0, 1].asscalar()
    assert 0 < abs(found - by_hand.item()) < 1e-6


@pytest.mark.slow
def test_computing_gradients_leaves_large_parameters_and_running_statistics_unchanged(tmp_path):
    x = s.reshape(s.BatchNorm(dense(X, "fc", 300)), (-1, 12, 5, 5))
    network = convert.from_files(
        *files(tmp_path, s.Convolution(x, kernel=(3, 3), num_filter=640), data=(8, 300)), (300,)
    )
    network.params["fc_weight"] = np.asfortranarray(network.params["fc_weight"])
    before = {name: array.copy() for name, array in network.params.items()}
    assert sum(array.size > gradients.LARGE for array in before.values()) == 2
    gradients.write_reference(network, tmp_path / "net", ["float32"])
    assert np.linalg.norm(np.load(tmp_path / "net.gradients/mxnet 0.npy")) > 0
    assert all(np.array_equal(array, network.params[name]) for name, array in before.items())
    assert all(array.flags.writeable for array in network.params.values())


@needs("pytorch")
@pytest.mark.parametrize(
    "build", [*NETWORKS[:1], *(pytest.param(build, marks=pytest.mark.slow) for build in NETWORKS[1:])]
)
def test_two_steps_of_sgd_give_mxnets_parameters_and_running_statistics(build, tmp_path):
    symbol = build()
    given = convert.from_files(*files(tmp_path, symbol, data=(8, 6)), (6,))
    convert.save(given, "pytorch", str(tmp_path / "net"))
    random = np.random.default_rng(1)
    inputs = random.normal(0, 2, (2, 8, 6)).astype(np.float32)
    heads = [random.normal(0, 0.1, Y.shape).astype(np.float32) for Y in given.predict([inputs[0]])]
    dtype, graph = ("float32", given.graph) if build is deep else ("float64", given.graph.rewritten(in_float64))
    expected = mxnets(graph.symbol(), given, inputs, heads, FIXED.get(build, set()), dtype)
    found = pytorchs(tmp_path, inputs, heads)
    assert {name.partition("[")[0] for name, _ in found} == {*given.params}
    for name, array in found:
        # PyTorch multiplies the variance of n numbers by n / (n - 1); here, n is 8 * 2 * 3
        tolerance = 2 / 47 if name.endswith("moving_var") else 1e-6  # of float32 attributes
        rounding = 1e-5 if build is deep else 1e-6
        np.testing.assert_allclose(array, expected[name], rtol=tolerance, atol=rounding, err_msg=name)


@needs("pytorch")
@pytest.mark.slow
@pytest.mark.parametrize(
    "build, operator, code", [(straight_through, "BlockGrad", "{0}"), (reversed_gradient, "gradientmultiplier", "{0}")]
)
def test_a_network_that_would_train_differently_is_refused_and_the_parameter_named(
    build, operator, code, tmp_path, monkeypatch
):
    monkeypatch.setitem(operators.RULES, operator, code)
    monkeypatch.setitem(operators.SIMPLE_RULES, operator, code)
    given = convert.from_files(*files(tmp_path, build()), (6,))
    with pytest.raises(Error, match="fc_weight.*--tolerance"):
        convert.save(given, "pytorch", str(tmp_path / "net"))
    assert not (tmp_path / "net.py").exists()
    convert.save(given, "pytorch", str(tmp_path / "net"), tolerance=2.1)  # the largest possible difference is 2
    assert (tmp_path / "net.py").exists()


def detector():
    """Anchors, which MXNet computes only in float32, with predicted offsets, beside the scores of classes."""
    x = s.reshape(dense(X, "fc"), (-1, 1, 2, 3))
    offsets = s.contrib.gradientmultiplier(s.Convolution(x, kernel=(1, 1), num_filter=12, name="box"), scalar=0.5)
    anchors = s.contrib.MultiBoxPrior(x, sizes=(0.5, 0.2), ratios=(1, 2))
    boxes = s.broadcast_add(s.reshape(s.transpose(offsets, axes=(0, 2, 3, 1)), (0, -1, 4)), anchors)
    return [boxes, s.Convolution(x, kernel=(1, 1), num_filter=2, name="score")]


def partly():
    """MXNet has no gradient of a sum with argmax_channel, PyTorch has."""
    places = s.reshape(s.argmax_channel(X), (-1, 1))
    return s.broadcast_add(dense(X, "deep", 2), places, name="partly")


@needs("pytorch")
@pytest.mark.slow
@pytest.mark.parametrize("options", [{"act_type": "selu"}, {"act_type": "prelu", "gamma": s.var("slope", shape=(6,))}])
def test_activations_whose_gradient_mxnet_computes_wrongly_are_converted(options, tmp_path):
    x = dense(s.LeakyReLU(dense(X, "first"), **options), "second")
    convert.save(convert.from_files(*files(tmp_path, x), (6,)), "pytorch", str(tmp_path / "net"))


@needs("pytorch")
@pytest.mark.slow
@pytest.mark.parametrize("more", [list, lambda: [s.argmax(X, axis=1)], lambda: [partly()]])
def test_gradients_of_some_outputs_are_compared_if_others_have_none_or_none_in_float64(more, tmp_path, monkeypatch):
    given = convert.from_files(*files(tmp_path, s.Group([*detector(), *more()])), (6,))
    report = convert.save(given, "pytorch", str(tmp_path / "net"))
    assert ("partly" in report) == ("partly_output" in given.outputs)
    for rules in (operators.RULES, operators.SIMPLE_RULES):
        monkeypatch.setitem(rules, "gradientmultiplier", "{0}")
    with pytest.raises(Error, match="box_weight"):
        convert.save(given, "pytorch", str(tmp_path / "wrong"))
