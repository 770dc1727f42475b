"""Converted networks compute the same scores and gradients; what cannot be converted is refused and leaves no file."""

import ast
import contextlib
import importlib.util
import re
import sys
import textwrap

import mxnet as mx
import numpy as np
import pytest
import reference
from conversions import GLUON, ONNX, PYTORCH, TARGETS, files, in_forks, needs
from mxnet import autograd, gluon, nd, npx
from mxnet.gluon import nn, rnn
from runs import call

from gluon_mgpu import convert, train
from gluon_mgpu.commands.convert import convert as command
from gluon_mgpu.convert import exported, operators
from gluon_mgpu.data import datasets
from gluon_mgpu.support.errors import Error, UsageError
from gluon_mgpu.training import checkpoint
from gluon_mgpu.training.models import LENET_NAMES


@pytest.fixture(autouse=True)
def forked(request, pytorch):
    """Conversions run in forks, except in one test: as for users, in processes of their own."""
    with contextlib.nullcontext() if "the_command_converts" in request.node.name else in_forks(pytorch):
        yield


@pytest.fixture(scope="module")
def lenet(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "lenet"
    train("scratch", 1, 30, 0.4, epochs=4, out=folder, dataset="synthetic", device="cpu", seed=0, limit=600)
    return folder


SLOW = [pytest.param(*to.values, marks=[*to.marks, pytest.mark.slow]) for to in (PYTORCH, ONNX)]


@pytest.mark.parametrize("to", TARGETS)
def test_the_command_converts_a_run_to_a_network_that_gives_the_scores_of_the_run(to, lenet, tmp_path, capfd):
    status, out, err = call(capfd, command, lenet, "--to", to, tmp_path / "net")
    assert (status, err) == (0, ""), err
    files = {tmp_path / f"net{suffix}" for suffix in convert.TARGETS[to].SUFFIXES}
    assert {*tmp_path.iterdir()} == files and all(str(file) in out for file in files)
    given = convert.from_run(lenet)
    found = np.concatenate([output for [output] in convert.TARGETS[to].outputs(given, str(tmp_path / "net"))])
    arrays, _ = checkpoint.load(lenet / "checkpoint.npz")
    images = datasets.synthetic(600, 100, 0).test_images / 255
    expected = reference.scores([arrays[name].astype(np.float64) for name in LENET_NAMES], images)
    reference.assert_close(found, expected, reference.additions(1))


STEPS = """
assert not any(module.training for module in net.modules())
import numpy as np, torch

net.train()
trained = {name: p for name, p in net.named_parameters() if p.requires_grad}
optimizer, found = torch.optim.SGD(trained.values(), lr=0.1), {}
given = np.load("batches.npz")
for X, y in zip(given["X"], given["y"]):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(net(torch.from_numpy(X)), torch.from_numpy(y).long()).backward()
    found.update({f"first {name}": p.grad.clone() for name, p in trained.items() if f"first {name}" not in found})
    optimizer.step()
np.savez("found.npz", **found, **{name: p.detach() for name, p in trained.items()})
"""


def assert_trains_alike(pytorch, folder, net, X, y):
    """folder/net.py, loaded as its docstring says, has the first gradients and, after a step on each batch of X and y,
    the parameters of a Gluon network that gluon.Trainer trains. PyTorch takes the mean of the losses."""
    np.savez(folder / "batches.npz", X=X, y=y)
    loading = textwrap.dedent(ast.get_docstring(ast.parse((folder / "net.py").read_text())).partition(":\n")[2])
    done = pytorch.run([sys.executable, "-c", loading + STEPS], folder=folder)
    assert done.status == 0, done.err
    trainer, expected = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}), {}
    # Gluon names a layer's parameters after their first owner.
    trained = {name.replace("embedding0_bias", "dense2_bias"): p for name, p in net.collect_params().items()}
    trained = {name: p for name, p in trained.items() if p.grad_req != "null"}
    for batch, labels in zip(X, y):
        with autograd.record():
            loss = gluon.loss.SoftmaxCrossEntropyLoss()(net(nd.array(batch)), nd.array(labels))
        loss.backward()
        expected = {**{f"first {name}": p.grad().asnumpy() / len(batch) for name, p in trained.items()}, **expected}
        trainer.step(len(batch))
    expected.update({name: p.data().asnumpy() for name, p in trained.items()})
    found = np.load(folder / "found.npz")
    assert len(found.files) == len(expected)
    for name, array in expected.items():
        name = re.sub(r"\w+?_(\w+)_", r"\1.", name).replace("beta", "bias")
        name = re.sub("gamma|alpha", "weight", name)
        assert np.linalg.norm(found[name] - array) < 1e-4 * np.linalg.norm(array), name


def layers(x):
    """A network with every operator that the lessons lack."""
    s = mx.sym
    x = s.Convolution(x, kernel=(3, 2), num_filter=8, pad=(1, 0), dilate=(1, 2), num_group=2, no_bias=True, name="conv")
    x = s.InstanceNorm(s.Deconvolution(x, kernel=(2, 3), stride=(2, 1), adj=(1, 0), num_filter=12, num_group=4))
    x = s.GroupNorm(s.swapaxes(x, dim1=2, dim2=3), num_groups=3)
    x = s.Pad(
        s.Pad(x, mode="reflect", pad_width=(0, 0, 0, 0, 2, 0, 1, 3)), mode="edge", pad_width=(0, 0, 0, 0, 1, 1, 0, 0)
    )
    for kind in ("sigmoid", "tanh", "softrelu", "softsign"):
        x = s.Activation(x, act_type=kind) + 0.5
    kinds = ("leaky", "elu", "gelu", "selu", "prelu")
    x = s.concat(*(s.LeakyReLU(x - 0.7, act_type=kind, slope=0.3) for kind in kinds))
    x = s.BatchNorm(x, fix_gamma=False, use_global_stats=True, eps=0.01, name="train")  # an attribute of nn.Module
    average = {"pool_type": "avg", "kernel": (3, 3), "stride": (2, 2), "pad": (1, 1)}
    x = s.Pooling(x, count_include_pad=False, **average) * s.Pooling(x, pooling_convention="full", **average)
    x = s.Dropout(s.clip(x, a_min=-0.5, a_max=2.5)) / 2
    y = s.mean(x, axis=(2, 3), keepdims=True) + s.Pooling(x, global_pool=True, pool_type="max", kernel=(1, 1))
    y = s.FullyConnected(s.transpose(y, axes=(0, 2, 3, 1)), num_hidden=12, flatten=False, name="1 class")
    y = s.broadcast_mul(s.LayerNorm(y, name="norm"), s.exp(y))
    y = s.FullyConnected(s.Reshape(y, shape=(0, -1)), num_hidden=12, name='x"); import os #\n')
    return s.log_softmax(y) - s.softmax(s.BatchNorm(y, name="class"), axis=1)


@needs("pytorch")
@pytest.mark.slow
def test_every_layer_is_converted_and_no_text_of_the_graph_gets_into_the_code(tmp_path):
    given = convert.from_files(*files(tmp_path, layers(mx.sym.var("data")), data=(1, 4, 9, 9)), (4, 9, 9))
    convert.save(given, "pytorch", str(tmp_path / "net"))  # compares the scores
    tree = ast.parse((tmp_path / "net.py").read_text())
    assert {node.name for node in ast.walk(tree) if isinstance(node, ast.alias)} == {"torch", "nn", "functional"}
    called = {ast.unparse(node.func).split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert called <= {"self", "nn", "F", "torch", "super()", "super", "x", "y", "z"}
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert {"conv", "train_", "layer1_class", "class_", "x____import_os"} <= names


ATTRIBUTES = [("_plus_scalar", "scalar", "__import__('os')"), ("_plus_scalar", "scalar", "inf")]
ATTRIBUTES += [("transpose", "axes", "(0, exit())"), ("softmax", "axis", "1) or exit(")]
ATTRIBUTES += [("Pooling", "pool_type", "rm"), ("Activation", "act_type", "relu(x) or exit")]


@pytest.mark.parametrize("op, key, text", ATTRIBUTES)
def test_other_attributes_than_numbers_and_known_words_are_refused(op, key, text):
    node = operators.Node(op, {key: text}, [[(1, 4, 9, 9)]], [[(1, 4, 9, 9)]], [])
    with pytest.raises(exported.Unsupported, match=key):
        node.code("x")


def language_model():
    """Predicts the next of 50 words; one layer is called twice, and others have the same parameters."""
    net = nn.HybridSequential(prefix="language_")
    with net.name_scope():
        words, hidden = nn.Embedding(50, 8), nn.Dense(8, "tanh", in_units=8)
        net.add(words, nn.GroupNorm(3), nn.PReLU(in_channels=6), nn.HybridLambda(lambda F, x: F.mean(x, axis=1)))
        net.add(nn.BatchNorm())
        net.add(hidden, nn.Dropout(0), hidden, nn.Dense(8, "relu", in_units=8, use_bias=False, params=hidden.params))
        net.add(nn.Dense(50, in_units=8, params=words.params))
    net.initialize(mx.init.Normal(0.5))
    return net


@needs("pytorch")
@pytest.mark.slow
def test_the_module_is_loaded_as_its_docstring_says_shares_parameters_and_trains_with_equal_gradients(
    pytorch, tmp_path
):
    net, random = language_model(), np.random.default_rng(0)
    X, y = random.integers(50, size=(2, 30, 6)).astype(np.float32), random.integers(50, size=(2, 30))
    net.hybridize()
    net(nd.array(X[0]))
    net.export(str(tmp_path / "language"))
    net.hybridize(False)  # PReLU's gradient is wrong in a hybridized network
    files = tmp_path / "language-symbol.json", tmp_path / "language-0000.params"
    given = check(files, tmp_path, (6,), to=["onnx"])
    convert.save(given, "pytorch", str(tmp_path / "net"))
    assert_trains_alike(pytorch, tmp_path, net, X, y)


def gluon_files(folder, block, *inputs):
    """The files of a block that was applied to arrays."""
    block.initialize(mx.init.Xavier())
    block.hybridize()
    block(*inputs)
    block.export(str(folder / "net"))
    return folder / "net-symbol.json", folder / "net-0000.params"


def save(given, folder, to=("pytorch", "onnx")):
    """Converts a network. The conversion compares the scores with MXNet's."""
    for target in to:
        if all(map(importlib.util.find_spec, convert.TARGETS[target].PACKAGES)):
            convert.save(given, target, str(folder / f"converted_to_{target}"))


def check(files, folder, *shapes, **options):
    """Converts a network, and returns it."""
    given = convert.from_files(*files, *shapes)
    save(given, folder, **options)
    return given


class Recurrent(gluon.HybridBlock):
    def __init__(self):
        super().__init__()
        self.layers = [rnn.LSTM(5, 2, "NTC", bidirectional=True), rnn.GRU(4, layout="NTC"), rnn.RNN(3, layout="NTC")]
        for layer in self.layers:
            self.register_child(layer)

    def hybrid_forward(self, F, x, state):
        for layer in self.layers[:2]:
            x = layer(x)
        x, states = self.layers[2](x, [F.expand_dims(state, 0)])
        return x, states[0]


class Numbers(gluon.HybridBlock):
    """A network of mx.np."""

    def __init__(self):
        super().__init__()
        self.conv, self.dense = nn.Conv2D(4, 3, activation="relu"), nn.Dense(6)

    def hybrid_forward(self, F, x):
        y = F.np.tanh(self.dense(F.npx.reshape(self.conv(x), (-2, -1)))) * 2 - 0.5
        y = F.np.concatenate([y, F.np.sqrt(F.np.abs(y))], axis=1) / F.np.sum(F.np.square(y), axis=1, keepdims=True)
        return y, F.np.where(y > 0, y, 1 / (y - 1)), F.np.matmul(y, F.np.transpose(F.np.ones((3, 12)))), F.np.mean(x)


@pytest.mark.slow
def test_recurrent_networks_are_converted(tmp_path):
    check(gluon_files(tmp_path, Recurrent(), nd.ones((2, 6, 7)), nd.ones((2, 3))), tmp_path, (6, 7), (3,))


@pytest.mark.slow
def test_networks_exported_under_set_np_are_converted_to_every_format(tmp_path):
    npx.set_np()
    try:
        files = gluon_files(tmp_path, Numbers(), mx.np.ones((2, 3, 8, 8)))
    finally:
        npx.reset_np()
    check(files, tmp_path, (3, 8, 8), to=convert.TARGETS)


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.slow
def test_labels_are_dropped_and_float16_becomes_float32(to, tmp_path):
    x = mx.sym.FullyConnected(mx.sym.Cast(mx.sym.var("data"), dtype="float16"), num_hidden=3, name="fc")
    label = mx.sym.Reshape(mx.sym.var("label"), shape=(-1,))
    module = mx.mod.Module(mx.sym.SoftmaxOutput(mx.sym.Cast(x, dtype="float32"), label), label_names=["label"])
    module.bind([("data", (2, 6))], [("label", (2,))])
    module.init_params(mx.init.Normal())
    module.save_checkpoint(str(tmp_path / "net"), 1)
    symbol, params = tmp_path / "net-symbol.json", tmp_path / "net-0001.params"
    nd.save(str(params), {name: array.astype("float16") for name, array in nd.load(str(params)).items()})
    given = check((symbol, params), tmp_path, (6,), to=[to])
    assert given.inputs == ["data"] and given.symbol.list_inputs() == ["data", *given.params]


@pytest.mark.slow
def test_pooling_resizing_and_splitting_give_mxnets_shape_for_every_image_size(tmp_path):
    s, outputs = mx.sym, []
    x = s.Convolution(s.var("data"), kernel=(1, 1), num_filter=2)
    for kind in ("max", "avg"):
        options = {"pool_type": kind, "pooling_convention": "full", "count_include_pad": False}
        outputs.append(s.Pooling(x, kernel=(2, 2), stride=(3, 3), **options))
        outputs.append(s.Pooling(x, kernel=(2, 3), stride=(2, 2), pad=(1, 1), **options))
        outputs.append(s.Pooling(x, kernel=(3, 3), stride=(2, 2), pad=(1, 1), **options))
    for kind in ("max", "sum", "lp"):
        outputs.append(s.Pooling(x, kernel=(3, 3), stride=(2, 2), pad=(2, 2), pool_type=kind, p_value=2))
    for mode in ("odd_scale", "to_even_down", "to_odd_up"):
        scales = {"scale_height": 2.0, "scale_width": 0.5} if mode == "odd_scale" else {}
        outputs.append(s.contrib.BilinearResize2D(x, mode=mode, **scales))
    outputs += [*s.split_v2(x, (3, 5), axis=3), s.Correlation(x, x * x, max_displacement=2, pad_size=1)]
    x = s.Group(outputs)
    given = convert.from_files(*files(tmp_path, x, data=(1, 4, 9, 9)), (4, 9, 9))
    for height in range(8, 14):
        X = (np.random.default_rng(0).random((3, 4, height, height + 1), np.float32),)
        given.samples.append(exported.Sample(X, given.predict(X)))
    save(given, tmp_path)


@pytest.mark.parametrize("shape", [(2, 324), (2, 162, 2)])
def test_a_network_with_a_fixed_batch_size_is_refused(shape, tmp_path):
    x = mx.sym.Dropout(mx.sym.Reshape(mx.sym.var("data"), shape=shape))
    with pytest.raises(UsageError, match="batch of 2"):
        convert.from_files(*files(tmp_path, x, data=(2, 4, 9, 9)), (4, 9, 9))


@pytest.mark.parametrize("to", [GLUON, *SLOW])
def test_other_scores_leave_no_file_without_a_larger_tolerance_and_existing_files_stay(to, lenet, tmp_path):
    given = convert.from_run(lenet)
    given.samples = [exported.Sample(X, [Y * 1.0001 for Y in Ys]) for X, Ys in given.samples]
    with pytest.raises(Error, match="by 0.0001 "):
        convert.save(given, to, str(tmp_path / "net"))
    assert list(tmp_path.iterdir()) == []
    for suffix in convert.TARGETS[to].SUFFIXES:
        (tmp_path / f"a{suffix}").write_text("mine")
        for prefix in ("a", "", "none/net"):
            with pytest.raises(UsageError, match=f"{tmp_path}/{prefix}"):
                convert.save(given, to, f"{tmp_path}/{prefix}")
        [left] = tmp_path.iterdir()
        assert left.read_text() == "mine"
        left.unlink()
    convert.save(given, to, str(tmp_path / "net"), tolerance=0.001)
    with pytest.raises(Error, match="/proc/net: cannot be written"):
        convert.save(given, to, "/proc/net")


def test_wrong_commands_get_one_line(lenet, tmp_path, capfd, monkeypatch):
    symbol, params = files(tmp_path, mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=2), data=(1, 4, 9, 9))
    (tmp_path / "text").write_text("text")
    out = ("--to", "gluon", tmp_path / "net")
    given = ("--input", "4,9,9", *out)
    for arguments, expected in (
        ((symbol, params, *out), "input"),
        ((symbol, params, "--input", "4", "--input", "9", *out), "'data'"),
        ((symbol, params, "--input", "4,x", *out), "'4,x' is not a shape"),
        ((symbol, tmp_path / "none", *given), "none: does not exist"),
        ((tmp_path / "text", params, *given), "text"),
        ((symbol, tmp_path / "text", *given), "text"),
        ((tmp_path / "none", *out), "not a run"),
        ((lenet, "--to", "pytorch", tmp_path / "my-net"), "my-net"),
    ):
        status, printed, err = call(capfd, command, *arguments)
        assert (status, printed, err.count("\n")) == (2, "", 1) and expected in err, err
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxruntime" else name)
    with pytest.raises(UsageError, match="to='onnx'.*onnxruntime") as raised:
        convert.check_prefix("onnx", str(tmp_path / "net"))
    assert "torch" not in str(raised.value)
