"""Layers of a converted network have MXNet's names, and groups of them that occur several times become classes."""

import builtins
import runpy

import numpy as np
import pytest
from conversions import files, needs
from mxnet import rnn
from mxnet import symbol as s

from gluon_mgpu import convert
from gluon_mgpu.convert import to_pytorch

X = s.var("data")


def unit(x, name, channels=4, stride=1):
    """A residual block. name: of its layers, which may contain {} for the layer's number."""
    options = {"kernel": (3, 3), "pad": (1, 1), "num_filter": channels}
    y = s.Convolution(x, stride=(stride, stride), name=name.format("conv0"), **options)
    y = s.Activation(s.BatchNorm(y, name=name.format("bn0")), act_type="relu")
    if stride > 1:
        x = s.Convolution(x, kernel=(1, 1), stride=(2, 2), num_filter=channels, name=name.format("short"))
    return s.Activation(s.Convolution(y, name=name.format("conv1"), **options) + x, act_type="relu")


def residual():
    """Two blocks are equal, two differ only in numbers, and names show the stages."""
    x = s.Convolution(X, kernel=(3, 3), pad=(1, 1), num_filter=4, name="net_stem")
    x = unit(unit(x, "net_stage1_a_{}"), "net_stage1_b_{}")
    x = unit(unit(x, "net_stage2_unit1_{}", 8, 2), "net_stage2_unit2_{}", 8)
    x = unit(x, "net_stage3_{}", 12, 2)
    return s.FullyConnected(s.Pooling(x, global_pool=True, kernel=(1, 1)), num_hidden=3, name="net_fc"), {
        "data": (3, 8, 8)
    }


def tagger():
    h, c = s.zeros((2, 0, 5)), s.zeros((2, 0, 5))
    x = s.swapaxes(s.Embedding(X, input_dim=9, output_dim=4, name="net_words"), dim1=0, dim2=1)
    x = s.RNN(x, s.var("net_lstm_parameters"), h, c, mode="lstm", state_size=5, num_layers=1, bidirectional=True)
    return s.FullyConnected(s.swapaxes(x, dim1=0, dim2=1), num_hidden=3, flatten=False, name="net_tags"), {"data": (6,)}


def encoder():
    """The mask is computed inside the first of the graph's equal blocks."""
    x = s.Embedding(X, input_dim=9, output_dim=4, name="net_words")
    mask = s.expand_dims(s.var("mask"), 1)
    for k in range(3):
        query, key, value = (
            s.FullyConnected(x, num_hidden=4, flatten=False, name=f"net_cell{k}_{name}")
            for name in ("query", "key", "value")
        )
        weights = s.softmax(s.broadcast_mul(s.batch_dot(query, key, transpose_b=True), mask))
        x = s.LayerNorm(x + s.batch_dot(weights, value), name=f"net_cell{k}_norm")
    return x, {"data": (6,), "mask": (6,)}


KEYS = {
    residual: {
        "stem.weight": "stem_weight",
        "stage1.1.conv1.bias": "stage1_b_conv1_bias",
        "stage2.0.short.weight": "stage2_unit1_short_weight",
        "stage2.1.conv0.norm.running_mean": "stage2_unit2_bn0_moving_mean",
        "stage3.conv0.conv.weight": "stage3_conv0_weight",
    },
    tagger: {"words.weight": "words_weight", "lstm.weight_ih_l0": "lstm_parameters[0:80]", "tags.bias": "tags_bias"},
    encoder: {"words.weight": "words_weight", "cell.2.norm.weight": "cell2_norm_gamma"},
}


REPEATED = [(residual, 3), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((tagger, 0), (encoder, 1)))]


@needs("pytorch")
@pytest.mark.parametrize("build, classes", REPEATED)
def test_repeated_blocks_become_classes_and_keys_have_the_names_of_the_parameters(build, classes, tmp_path):
    import torch
    from safetensors import safe_open
    from safetensors.torch import load_model

    symbol, shapes = build()
    written = files(tmp_path, symbol, **{name: (2, *shape) for name, shape in shapes.items()})
    given = convert.from_files(*written, inputs=shapes).compute()
    to_pytorch.write(given, str(tmp_path / "net"))
    net = runpy.run_path(str(tmp_path / "net.py"))["Net"]()
    load_model(net, tmp_path / "net.safetensors")
    net.eval()
    with torch.no_grad():
        found = [[net(*map(torch.from_numpy, inputs)).numpy()] for inputs, _ in given.samples]
    assert given.relative_error(found) < 1e-5
    state = net.state_dict()
    with safe_open(tmp_path / "net.safetensors", "np") as file:
        names = file.metadata()
    assert {key: names[key] for key in KEYS[build]} == {key: f"net_{name}" for key, name in KEYS[build].items()}
    for key, name in names.items():
        name, _, part = name.partition("[")  # a part of an RNN's parameters
        array = given.params[name].ravel()
        start, end = map(int, part[:-1].split(":")) if part else (0, array.size)
        assert np.array_equal(state[key].ravel(), array[start:end])
    code = (tmp_path / "net.py").read_text()
    assert code.count("\nclass ") == classes + 1 and "transpose(0, 1)" not in code


@needs("pytorch")
def test_blocks_that_share_layers_are_not_repeated(tmp_path):
    weight, bias = s.var("weight", shape=(4, 6)), s.var("bias")
    x = X
    for k in range(2):
        y = s.FullyConnected(x, weight=weight, bias=bias, num_hidden=4, name=f"cell{k}_a")
        y = s.FullyConnected(s.sigmoid(y), num_hidden=6, name=f"cell{k}_b")
        x = x + s.tanh(y)
    convert.save(convert.from_files(*files(tmp_path, x), (6,)), "pytorch", str(tmp_path / "net"))
    assert (tmp_path / "net.py").read_text().count("\nclass ") == 1


def unrolled(steps):
    """A stack of two bidirectional layers, and a layer for each step."""
    stack = rnn.SequentialRNNCell()
    for k in range(2):
        cells = [rnn.LSTMCell(4, prefix=f"{side}{k}_") for side in ("left", "right")]
        stack.add(rnn.BidirectionalCell(*cells, output_prefix=f"both{k}_"))
        stack.add(rnn.DropoutCell(0.5))
    outputs, _ = stack.unroll(steps, X, layout="NTC", merge_outputs=False)
    weights = {"weight": s.var("tag_weight"), "bias": s.var("tag_bias")}
    return s.stack(*(s.FullyConnected(x, num_hidden=3, **weights) for x in outputs), axis=1)


@needs("pytorch")
def test_time_steps_of_an_unrolled_cell_become_loops(tmp_path):
    lines = []
    for steps in (4, 9):
        folder = tmp_path / str(steps)
        folder.mkdir()
        given = convert.from_files(*files(folder, unrolled(steps), data=(2, steps, 5)), (steps, 5))
        convert.save(given, "pytorch", str(folder / "net"))
        lines.append((folder / "net.py").read_text().count("\n"))
        names = {name for name, _ in runpy.run_path(str(folder / "net.py"))["Net"]().named_children()}
        assert names == {"left0", "right0", "left1", "right1", "tag"}
    assert lines[0] == lines[1] < 100


@needs("pytorch")
@pytest.mark.slow
def test_a_first_time_step_that_differs_stays_before_the_loop(tmp_path):
    def layer(x, name, bias):
        options = {"bias": s.var(f"{name}_bias")} if bias else {"no_bias": True}
        return s.FullyConnected(x, s.var(f"{name}_weight"), num_hidden=4, **options)

    outputs = []
    for x in s.split(X, 6, axis=1, squeeze_axis=True):
        y = layer(x, "x2h", True)
        outputs.append(s.tanh(y + layer(outputs[-1], "h2h", False) if outputs else y))
    given = convert.from_files(*files(tmp_path, s.concat(*outputs, dim=1), data=(2, 6, 5)), (6, 5))
    convert.save(given, "pytorch", str(tmp_path / "net"))
    assert (tmp_path / "net.py").read_text().count("self.h2h(") == 1


@needs("pytorch")
@pytest.mark.slow
def test_a_last_time_step_that_differs_stays_after_the_loop(tmp_path):
    """Nothing needs the last state of a cell with zoneout."""
    cell = rnn.ZoneoutCell(rnn.GRUCell(4, prefix="gru_"), zoneout_outputs=0.2, zoneout_states=0.2)
    outputs, _ = cell.unroll(6, X, layout="NTC", merge_outputs=True)
    given = convert.from_files(*files(tmp_path, outputs, data=(2, 6, 5)), (6, 5))
    convert.save(given, "pytorch", str(tmp_path / "net"))
    assert (tmp_path / "net.py").read_text().count("self.h2h(") == 2


@needs("pytorch")
@pytest.mark.slow
def test_layers_that_differ_at_each_time_step_are_a_list(tmp_path):
    weight = s.var("x2h_weight")
    steps = s.split(X, 6, axis=1, squeeze_axis=True)
    outputs = [s.FullyConnected(x, weight, num_hidden=4, no_bias=True) for x in steps]
    outputs = [s.BatchNorm(x, name=f"t{k}_norm", fix_gamma=False) for k, x in enumerate(outputs)]
    code, net = written(tmp_path, s.concat(*outputs, dim=1), 6, 5)
    assert len(net().t_norm) == 6 and code.count("x2h(") == code.count("BatchNorm") == 1


@needs("pytorch")
@pytest.mark.slow
def test_code_has_no_steps_without_effect_and_no_variables_named_like_functions_of_python(tmp_path):
    image = s.pad(s.tile(X, (1, 1, 1, 1)), mode="constant", pad_width=(0, 0, 0, 0, 0, 0, 1, 2))
    total = s.sum(s.LeakyReLU(image, slope=0), axis=(1, 2), name="sum")
    y = s.FullyConnected(total, num_hidden=4, name="fc") * s.sigmoid(s.FullyConnected(total, num_hidden=4, name="gate"))
    given = convert.from_files(*files(tmp_path, y, data=(2, 3, 4, 5)), (3, 4, 5))
    convert.save(given, "pytorch", str(tmp_path / "net"))
    code = (tmp_path / "net.py").read_text()
    assert "F.pad(x, (1, 2))" in code and "tile" not in code and "leaky" not in code
    assert "fc * torch.sigmoid(self.gate(" in code
    assert not {*dir(builtins)} & {*runpy.run_path(str(tmp_path / "net.py"))["Net"].forward.__code__.co_varnames}


@needs("pytorch")
@pytest.mark.slow
def test_convolutions_with_normalization_and_activation_are_one_class_with_defaults(tmp_path):
    x = X
    for k, (channels, size) in enumerate([(4, 3), (8, 3), (8, 3), (6, 1)]):
        options = {"kernel": (size, size), "pad": (size // 2, size // 2), "no_bias": k == 3}
        x = s.Convolution(x, num_filter=channels, name=f"conv{k}", **options)
        x = s.Activation(s.BatchNorm(x, name=f"norm{k}"), act_type="relu")
    convert.save(
        convert.from_files(*files(tmp_path, x, data=(2, 3, 8, 8)), (3, 8, 8)), "pytorch", str(tmp_path / "net")
    )
    code = (tmp_path / "net.py").read_text()
    assert code.count("\nclass ") == 2 and "ConvNormAct(4, 8)" in code


def written(folder, network, *shape):
    """The code that is written for a network, and its class."""
    given = convert.from_files(*files(folder, network, data=(2, *shape)), shape)
    convert.save(given, "pytorch", str(folder / "net"))
    return (folder / "net.py").read_text(), runpy.run_path(str(folder / "net.py"))["Net"]


def branches(*sizes):
    """A network that joins branches with outputs of these sizes."""
    outputs = []
    for k, size in enumerate(sizes):
        y = s.Activation(s.FullyConnected(X, num_hidden=8, name=f"first{k}"), act_type="relu")
        outputs.append(s.FullyConnected(y, num_hidden=size, name=f"second{k}"))
    return s.concat(*outputs, dim=1)


@needs("pytorch")
@pytest.mark.slow
def test_parallel_branches_of_one_value_become_one_class(tmp_path):
    code, _ = written(tmp_path, branches(1, 2, 3, 4), 6)
    assert code.count("\nclass ") == 2 and code.count("nn.Linear(") == 2


@needs("pytorch")
@pytest.mark.slow
def test_equal_branches_become_a_list_of_blocks(tmp_path):
    code, net = written(tmp_path, branches(*[3] * 6), 6)
    [(_, blocks)] = net().named_children()
    assert len(blocks) == 6 and code.count("nn.Linear(") == 2


@needs("pytorch")
@pytest.mark.slow
def test_parallel_towers_of_blocks_with_a_mask_keep_their_own_lists_of_blocks(tmp_path):
    mask, towers = s.expand_dims(s.var("mask"), 1), []
    for t in range(3):
        x = X
        for k in range(2):
            name = f"tower{t}_cell{k}"
            query, value = (
                s.FullyConnected(x, num_hidden=4, flatten=False, name=f"{name}_{part}") for part in ("query", "value")
            )
            weights = s.softmax(s.broadcast_mul(s.batch_dot(query, value, transpose_b=True), mask))
            x = s.LayerNorm(x + s.batch_dot(weights, value), name=f"{name}_norm")
        y = s.relu(s.FullyConnected(x, num_hidden=8, flatten=False, name=f"head{t}_first"))
        towers.append(x + s.FullyConnected(y, num_hidden=4, flatten=False, name=f"head{t}_second"))
    written = files(tmp_path, s.concat(*towers, dim=-1), data=(2, 6, 4), mask=(2, 6))
    convert.save(convert.from_files(*written, inputs={"data": (6, 4), "mask": (6,)}), "pytorch", str(tmp_path / "net"))
    children = runpy.run_path(str(tmp_path / "net.py"))["Net"]().named_children()
    assert {name: len(blocks) for name, blocks in children if name.startswith("tower")} == dict(
        tower0=2, tower1=2, tower2=2
    )


@needs("pytorch")
@pytest.mark.slow
@pytest.mark.parametrize("codes", [[(0, -4, -1, 4, 0, 0), (0, 0, -4, 2, 2, 0, 0)], [(0, 3, 2, 2, 5, 7)]])
def test_channels_that_are_moved_into_pixels_are_a_pixel_shuffle(codes, tmp_path):
    x = s.Convolution(X, kernel=(3, 3), pad=(1, 1), num_filter=12)
    for shape in codes:
        x = s.reshape(x, shape)
    code, _ = written(tmp_path, s.reshape(s.transpose(x, (0, 1, 4, 2, 5, 3)), (0, 0, -3, -3)), 3, 5, 7)
    assert "F.pixel_shuffle(" in code and ".reshape(" not in code


@needs("pytorch")
@pytest.mark.slow
def test_another_transpose_between_two_reshapes_is_no_pixel_shuffle(tmp_path):
    x = s.reshape(s.Convolution(X, kernel=(3, 3), pad=(1, 1), num_filter=12), (0, 2, 3, 2, 5, 7))
    code, _ = written(tmp_path, s.reshape(s.transpose(x, (0, 1, 4, 2, 5, 3)), (0, 0, -3, -3)), 3, 5, 7)
    assert "pixel_shuffle" not in code


@needs("pytorch")
@pytest.mark.slow
def test_the_name_of_the_network_is_left_out_even_if_a_layer_lacks_it(tmp_path):
    x = X
    for k in range(20):
        x = s.FullyConnected(x, num_hidden=4, name=f"net0_features_fc{k}")
    _, net = written(tmp_path, s.FullyConnected(x, num_hidden=3, name="net0_output"), 6)
    assert {name for name, _ in net().named_children()} == {*(f"fc{k}" for k in range(20)), "output"}


@needs("pytorch")
@pytest.mark.slow
def test_what_several_layers_compute_alike_is_computed_once_but_random_numbers_are_not(tmp_path):
    y = s.FullyConnected(X, num_hidden=6, name="fc") * s.exp(X) + s.sqrt(s.exp(X))
    code, _ = written(tmp_path, s.Dropout(y, p=0.5) + s.Dropout(y, p=0.5), 6)
    assert code.count("torch.exp(") == 1 and code.count("F.dropout(") == 2
