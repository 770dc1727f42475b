"""Converted networks compute the same scores and gradients; what cannot be converted is refused and leaves no file."""

import ast
import importlib.util
import re
import subprocess
import sys

import lenet64
import mxnet as mx
import numpy as np
import pytest
import small_networks  # noqa: F401 (registers the network "normalized")
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn
from printed import call

from gluon_mgpu import convert, evaluate, highlevel, scratch
from gluon_mgpu.commands.convert import convert as command
from gluon_mgpu.convert import operators
from gluon_mgpu.runtime.errors import Error, UsageError
from gluon_mgpu.training import checkpoint, datasets
from gluon_mgpu.training.replicas import LENET


def needs(to):
    packages = convert.TARGETS[to].PACKAGES
    return pytest.mark.skipif(
        not all(map(importlib.util.find_spec, packages)), reason=f"waits for pip install {' '.join(packages)}"
    )


TARGETS = GLUON, PYTORCH, ONNX = [pytest.param(to, marks=needs(to)) for to in convert.TARGETS]
COMMON = {"dataset": "synthetic", "device": "cpu", "seed": 0, "limit": 600}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    scratch.train(1, 30, 0.2, epochs=4, momentum=0.5, out=folder / "lenet", **COMMON)
    highlevel.train(1, 30, 0.1, epochs=2, model="normalized", out=folder / "normalized", **COMMON)
    return folder


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("run", ["lenet", "normalized"])
def test_a_converted_run_gives_the_scores_of_the_run(run, to, runs, tmp_path, capfd):
    status, out, err = call(capfd, command, runs / run, "--to", to, tmp_path / "net")
    assert (status, err) == (0, ""), err
    files = {tmp_path / f"net{suffix}" for suffix in convert.TARGETS[to].SUFFIXES}
    assert {*tmp_path.iterdir()} == files and all(str(file) in out for file in files)
    given = convert.from_run(runs / run)
    found = convert.TARGETS[to].scores(given, str(tmp_path / "net"))
    arrays, _ = checkpoint.load(runs / run / "checkpoint.npz")
    if run == "lenet":
        images = datasets.synthetic(600, 100, 0).test_images / 255
        expected = lenet64.scores([arrays[name].astype(np.float64) for name in LENET], images)
        lenet64.assert_close(found, expected, lenet64.additions(1))
    else:
        assert max(np.abs(array).max() for name, array in arrays.items() if "running_mean" in name) > 0.1
        np.testing.assert_allclose(found, given.expected, atol=1e-5 * np.abs(found).max())


STEPS = """
import sys
import numpy as np, torch
from safetensors.torch import load_model
from net import Net

net = Net()
load_model(net, "net.safetensors")
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


def steps(folder, X, y):
    """First gradients and final parameters of folder/net.py, trained on batches X, y: {PyTorch's name: array}."""
    np.savez(folder / "batches.npz", X=X, y=y)
    subprocess.run([sys.executable, "-c", STEPS], cwd=folder, check=True, timeout=120)
    return np.load(folder / "found.npz")


def assert_close(found, expected):
    """expected: {MXNet's name: array}."""
    assert len(found.files) == len(expected)
    for name, array in expected.items():
        name = re.sub(r"\w+?_(\w+)_", r"\1.", name).replace("beta", "bias")
        name = re.sub("gamma|alpha", "weight", name)
        assert np.linalg.norm(found[name] - array) < 1e-4 * np.linalg.norm(array), name


@needs("pytorch")
@pytest.mark.parametrize("run", ["lenet", "normalized"])
def test_the_pytorch_module_continues_training_with_equal_gradients(run, runs, tmp_path):
    convert.save(convert.from_run(runs / run), "pytorch", str(tmp_path / "net"))
    data = datasets.synthetic(600, 100, 0)
    X, y = data.train_images[:90].reshape(3, 30, 1, 28, 28) / np.float32(255), data.train_labels[:90].reshape(3, 30)
    found = steps(tmp_path, X, y)
    replicas = evaluate.load(runs / run, "highlevel", device="cpu").replicas
    expected = {}
    for batch, labels in zip(X, y):
        replicas.train_batch(nd.array(batch), nd.array(labels), 0.1)
        expected = {**{f"first {p.name}": p.grad().asnumpy() / 30 for p in replicas.trained}, **expected}
    expected.update({p.name: p.data().asnumpy() for p in replicas.trained})
    assert_close(found, expected)


def layers(x):
    """A network of every operator that the lessons do not have."""
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


def exported(symbol, folder):
    """The files of a network with random parameters and input data (n, 4, 9, 9)."""
    shapes, _, running = symbol.infer_shape(data=(1, 4, 9, 9))
    arrays = {f"arg:{name}": shape for name, shape in zip(symbol.list_arguments(), shapes) if name != "data"}
    arrays |= {f"aux:{name}": shape for name, shape in zip(symbol.list_auxiliary_states(), running)}
    random = np.random.default_rng(1)
    nd.save(str(folder / "n-0000.params"), {k: nd.array(random.random(shape) + 0.1) for k, shape in arrays.items()})
    symbol.save(str(folder / "n-symbol.json"))
    return folder / "n-symbol.json", folder / "n-0000.params"


@needs("pytorch")
def test_every_layer_is_converted_and_no_text_of_the_graph_gets_into_the_code(tmp_path):
    given = convert.from_files(*exported(layers(mx.sym.var("data")), tmp_path), (4, 9, 9))
    convert.save(given, "pytorch", str(tmp_path / "net"))  # compares the scores
    tree = ast.parse((tmp_path / "net.py").read_text())
    assert {node.name for node in ast.walk(tree) if isinstance(node, ast.alias)} == {"torch", "nn", "functional"}
    called = {ast.unparse(node.func).split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert called <= {"self", "nn", "F", "torch", "super()", "super", "x", "y", "z"}
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert {"conv", "train_", "layer1_class", "class_", "x____import_os"} <= names


ATTRIBUTES = [("_plus_scalar", "scalar", "__import__('os')"), ("_plus_scalar", "scalar", "inf")]
ATTRIBUTES += [("transpose", "axes", "(0, exit())"), ("softmax", "axis", "1) or exit(")]
ATTRIBUTES += [("Pooling", "pool_type", "sum"), ("Activation", "act_type", "relu(x) or exit")]


@pytest.mark.parametrize("op, key, text", ATTRIBUTES)
def test_other_attributes_than_numbers_and_known_words_are_refused(op, key, text):
    node = operators.Node(0, {"op": op, "name": "it\n", "attrs": {key: text}}, "it", [0], (1, 4, 9, 9), [], [])
    with pytest.raises(UsageError, match=rf"^'{op}' layer 'it\\n' cannot be converted to PyTorch: [^\n]*$"):
        node.code("x")


def language_model():
    """Predicts the next of 50 words, with the same parameters for several layers."""
    net = nn.HybridSequential(prefix="language_")
    with net.name_scope():
        words, hidden = nn.Embedding(50, 8), nn.Dense(8, "tanh", in_units=8)
        net.add(words, nn.GroupNorm(3), nn.PReLU(in_channels=6), nn.HybridLambda(lambda F, x: F.mean(x, axis=1)))
        net.add(hidden, nn.Dropout(0), hidden, nn.Dense(8, "relu", in_units=8, use_bias=False, params=hidden.params))
        net.add(nn.Dense(50, in_units=8, params=words.params))
    net.initialize(mx.init.Normal(0.5))
    return net


@needs("pytorch")
def test_layers_with_the_same_parameters_still_have_them_in_pytorch_and_train_with_equal_gradients(tmp_path):
    net, random = language_model(), np.random.default_rng(0)
    X, y = random.integers(50, size=(2, 30, 6)).astype(np.float32), random.integers(50, size=(2, 30))
    net.hybridize()
    net(nd.array(X[0]))
    net.export(str(tmp_path / "language"))
    net.hybridize(False)  # hybridized, PReLU has a wrong gradient
    files = tmp_path / "language-symbol.json", tmp_path / "language-0000.params"
    convert.save(convert.from_files(*files, (6,)), "pytorch", str(tmp_path / "net"))
    found, expected = steps(tmp_path, X, y), {}
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    # Gluon names the last layer's bias after the parameters' first owner
    params = {name.replace("embedding0_bias", "dense2_bias"): p for name, p in net.collect_params().items()}
    for batch, labels in zip(X, y):
        with autograd.record():
            loss = gluon.loss.SoftmaxCrossEntropyLoss()(net(nd.array(batch)), nd.array(labels))
        loss.backward()
        expected = {**{f"first {name}": p.grad().asnumpy() / 30 for name, p in params.items()}, **expected}
        trainer.step(30)
    expected.update({name: p.data().asnumpy() for name, p in params.items()})
    assert_close(found, expected)


@needs("onnx")
def test_onnx_has_layers_of_one_dimension_slopes_per_channel_and_no_unused_constants(tmp_path):
    import onnx

    s = mx.sym
    x = s.InstanceNorm(s.Deconvolution(s.var("data"), kernel=(2, 3), num_filter=6, num_group=2, no_bias=False))
    x = s.Convolution(s.Reshape(x, shape=(0, 0, -1)), kernel=(5,), num_filter=3, layout="NCW")
    x = s.LayerNorm(s.LeakyReLU(x, act_type="prelu"))
    convert.save(convert.from_files(*exported(x, tmp_path), (4, 9, 9)), "onnx", str(tmp_path / "net"))
    graph = onnx.load(tmp_path / "net.onnx").graph
    assert {array.name for array in graph.initializer} <= {name for node in graph.node for name in node.input}


@pytest.mark.parametrize("to", [PYTORCH, ONNX])
def test_a_layer_without_equivalent_is_refused_by_name(to, tmp_path):
    groups = mx.sym.GroupNorm(mx.sym.var("data"), num_groups=2, name="groups")
    given = convert.from_files(*exported(mx.sym.LRN(groups, nsize=3, name="local"), tmp_path), (4, 9, 9))
    layer = {"pytorch": "'LRN' layer 'local'", "onnx": "'GroupNorm' layer 'groups'"}[to]
    with pytest.raises(UsageError, match=f"^{layer} cannot be converted to "):
        convert.save(given, to, str(tmp_path / "net"))


@pytest.mark.parametrize("to", TARGETS)
def test_other_scores_leave_no_file_and_existing_files_stay(to, runs, tmp_path):
    given = convert.from_run(runs / "lenet")
    given.expected = given.expected * 1.0001
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


def test_wrong_commands_get_one_line(runs, tmp_path, capfd, monkeypatch):
    symbol, params = exported(mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=2), tmp_path)
    (tmp_path / "text").write_text("text")
    out = ("--to", "gluon", tmp_path / "net")
    for arguments, expected in (
        ((runs / "lenet", "--input", "1,28,28", *out), "--input"),
        ((symbol, params, *out), "--input"),
        ((symbol, params, "--input", "4,x", *out), "--input: '4,x'"),
        ((symbol, params, "--input", "4,5", *out), "--input 4,5: "),
        ((symbol, tmp_path / "none", "--input", "4,9,9", *out), "none does not exist"),
        ((tmp_path / "text", params, "--input", "4,9,9", *out), "text"),
        ((symbol, tmp_path / "text", "--input", "4,9,9", *out), "text"),
        ((tmp_path / "none", *out), "is not a run"),
        ((runs / "lenet", "--to", "pytorch", tmp_path / "my-net"), "my-net"),
    ):
        status, printed, err = call(capfd, command, *arguments)
        assert (status, printed, err.count("\n")) == (2, "", 1) and expected in err, err
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="to=onnx.*onnxruntime"):
        convert.check_prefix("onnx", str(tmp_path / "net"))
