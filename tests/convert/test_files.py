"""Graph files of other people: names of inputs and outputs, old attributes, tolerance, messages, and the code."""

import functools
import json
import operator
import os
import runpy
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from conversions import ONNX, PYTORCH, files, needs
from mxnet import nd
from mxnet import symbol as s
from runs import call

from gluon_mgpu import convert
from gluon_mgpu.commands.convert import convert as command
from gluon_mgpu.convert import exported, operators, to_gluon
from gluon_mgpu.support.errors import Error, UsageError

pytestmark = pytest.mark.slow
X = s.var("data")


def test_an_output_near_zero_may_differ_by_the_rounding_of_typical_outputs():
    samples = [exported.Sample((np.zeros((3, 1)),), [np.array([[1.0], [-2.0], [1e-9]])])]
    given = exported.Exported({}, {}, ["data"], samples)
    assert given.relative_error([[np.array([[1.0], [-2.0], [2e-9]])]]) < 1e-8
    assert given.relative_error([[np.array([[1.0], [-2.0], [0.01]])]]) > 1e-3
    assert given.relative_error([[np.array([[1.0], [-2.0], [np.nan]])]]) != given.relative_error(
        [[samples[0].outputs[0]]]
    )


def test_a_graph_is_cut_at_a_named_output_which_messages_suggest(tmp_path, capfd):
    hidden = s.FullyConnected(X, num_hidden=4, name="hidden_é")
    loss = s.MakeLoss(s.CTCLoss(s.reshape(s.FullyConnected(hidden, num_hidden=8), (2, -1, 4)), s.var("label")))
    symbol, params = files(tmp_path, loss, data=(3, 6), label=(3, 2))
    with pytest.raises(UsageError, match="'label'.*--output"):
        convert.from_files(symbol, params, (6,))
    symbol.write_text(symbol.read_text().replace("CTCLoss", "WarpCTC"))  # which MXNet does not know
    for outputs, message in ((), "WarpCTC.*--output"), (["hiden"], "hiden"):
        with pytest.raises(UsageError, match=message):
            convert.from_files(symbol, params, (6,), outputs=outputs)
    options = ["--input", "data=6", "--output", "hidden_é", "--to", "gluon"]
    status, _, err = call(capfd, command, symbol, params, *options, tmp_path / "net")
    assert (status, err) == (0, "")
    given = convert.from_files(symbol, params, (6,), outputs=["hidden_é_output"])
    assert given.inputs == ["data"] and given.outputs == ["hidden_é_output"]


def test_scores_are_not_accepted_if_mxnet_gives_others_in_float64(tmp_path, monkeypatch):
    x = s.sin(s.FullyConnected(X, num_hidden=2, name="fc") * 1e8)  # magnifies rounding
    given = convert.from_files(*files(tmp_path, x), (6,)).compute()
    exact = [[Y.astype(np.float32) for Y in outputs] for _, outputs in given.in_float64().samples]
    monkeypatch.setattr(to_gluon, "outputs", lambda *_: exact)
    with pytest.raises(Error, match="float64.*--tolerance"):
        convert.save(given, "gluon", str(tmp_path / "net"))
    monkeypatch.setattr(convert, "MOST_ROUNDING", 9)
    convert.save(given, "gluon", str(tmp_path / "net"))


@needs("onnx")
def test_outputs_have_mxnets_names_in_onnx(tmp_path):
    import onnxruntime

    x = s.Group([s.FullyConnected(X, num_hidden=2, name="cls"), s.FullyConnected(X, num_hidden=4, name="box"), X])
    convert.save(convert.from_files(*files(tmp_path, x), (6,)), "onnx", str(tmp_path / "net"))
    names = [output.name for output in onnxruntime.InferenceSession(tmp_path / "net.onnx").get_outputs()]
    assert names[:2] == ["cls_output", "box_output"] and len(set(names)) == 3


@needs("onnx")
def test_a_failure_of_onnx_runtime_gets_one_line_and_leaves_no_file(tmp_path, monkeypatch):
    given = convert.from_files(*files(tmp_path, s.FullyConnected(X, num_hidden=2)), (6,))
    monkeypatch.setattr("onnxruntime.InferenceSession", lambda *_, **__: 1 / 0)
    with pytest.raises(Error) as error:
        convert.save(given, "onnx", str(tmp_path / "net"))
    assert "\n" not in str(error.value) and not (tmp_path / "net.onnx").exists()


@needs("pytorch")
def test_a_rule_that_writes_wrong_code_gets_one_line_and_leaves_no_file(tmp_path, monkeypatch):
    for rules in (operators.RULES, operators.SIMPLE_RULES):
        monkeypatch.setitem(rules, "relu", "{0} +")
    given = convert.from_files(*files(tmp_path, s.relu(s.FullyConnected(X, num_hidden=2))), (6,))
    with pytest.raises(Error) as error:
        convert.save(given, "pytorch", str(tmp_path / "net"))
    assert "\n" not in str(error.value) and not (tmp_path / "net.py").exists()


def lstm():
    states = {"state": s.var("h"), "state_cell": s.var("c"), "parameters": s.var("rnn_parameters")}
    return s.RNN(X, mode="lstm", state_size=4, num_layers=1, **states)


def old_layers():
    x = s.LeakyReLU(s.Convolution(X, kernel=(3, 3), num_filter=2, name="conv"), act_type="prelu")
    x = s.UpSampling(s.BatchNorm(s.BatchNorm(x), axis=-3), scale=2, sample_type="nearest")
    return s.log_softmax(s.MakeLoss(s.LayerNorm(s.Reshape(x, shape=(0, -1)))))


ATTRIBUTES = {  # without effect, or written defaults
    "LeakyReLU": {"lower_bound": "0.125", "upper_bound": "0.334", "slope": "0.25"},
    "UpSampling": {"multi_input_mode": "concat", "num_filter": "0", "workspace": "512"},
    "Reshape": {"target_shape": "(0, 0)", "keep_highest": "False", "reverse": "0"},
    "MakeLoss": {"grad_scale": "1.0", "normalization": "null", "valid_thresh": "0.0"},
    "BatchNorm": {"output_mean_var": "0", "use_global_stats": "0", "cudnn_off": "0"},
    "LayerNorm": {"output_mean_var": "0"},
    "log_softmax": {"use_length": "0", "temperature": "None"},
}
CELL, _ = mx.rnn.GRUCell(4, prefix="gru_").unroll(2, s.Reshape(X, shape=(1, 2, 3)), merge_outputs=True)
PACKED = s.RNN(
    X,
    s.var("rnn_parameters"),
    s.zeros((2, 0, 4)),
    sequence_length=s.var("size"),
    mode="gru",
    state_size=4,
    num_layers=1,
    bidirectional=True,
    use_sequence_length=True,
)
SPARSE = s.broadcast_add(
    s.dot(X, s._internal._square_sum(s.var("v", shape=(6, 2)), axis=1, keepdims=True)),
    s.sum(s.contrib.SparseEmbedding(s.var("word"), s.var("table"), input_dim=9, output_dim=2), axis=1, keepdims=True),
)
SYNC = s.contrib.SyncBatchNorm(X, key="norm", fix_gamma=False)
LENGTHS = s.SequenceMask(X, s.var("size"), use_sequence_length=True, axis=1), s.softmax(s.sum(X, 2), axis=1)
WORDS = s.swapaxes(s.Embedding(X, input_dim=9, output_dim=4), dim1=0, dim2=1)
LSTM = {"data": (5, 2, 3), "h": (1, 2, 4), "c": (1, 2, 4)}
LARGEST = [(1, 2, 4), (1, 2, 4), (10, 2, 3)]
ONE = s.FullyConnected(s.Reshape(X, shape=(1, 2, 3)), num_hidden=4)
MASKED = s.broadcast_mul(WORDS, s.expand_dims(s.var("mask"), 2))
# {what is special: the network, its inputs with a batch, the shapes given for them, the last inputs of the check}
NETWORKS = {
    "old attributes": (old_layers(), {"data": (2, 3, 8, 8)}, {"data": (3, 8, 8)}, [(2, 3, 8, 8)]),
    "batch on axis 1": (lstm(), LSTM, {"data": (5, "n", 3), "h": (1, "n", 4), "c": (1, "n", 4)}, LARGEST),
    "batch on axis 1, found": (lstm(), LSTM, {"data": (5, 3), "h": (1, 4), "c": (1, 4)}, LARGEST),
    "lengths": (s.Group(LENGTHS), {"data": (2, 5, 3), "size": (2,)}, {"data": (5, 3), "size": ()}, [(2, 10, 6), (2,)]),
    "one example": (ONE, {"data": (1, 6)}, {"data": (6,)}, [(1, 6)]),
    "one example, with begin_state": (CELL, {"data": (1, 6)}, {"data": (6,)}, [(1, 6)]),
    "lengths of an RNN": (
        PACKED,
        {"data": (5, 2, 3), "size": (2,)},
        {"data": (5, "n", 3), "size": ()},
        [(10, 2, 3), (2,)],
    ),
    "sparse": (SPARSE, {"data": (2, 6), "word": (2,)}, {"data": (6,), "word": ()}, [(2, 6), (2,)]),
    "SyncBatchNorm": (SYNC, {"data": (2, 3, 8, 8)}, {"data": (3, 8, 8)}, [(2, 3, 16, 24)]),
    "different ranks": (MASKED, {"data": (2, 7), "mask": (7, 2)}, {"data": (7,), "mask": (7, "n")}, [(2, 14), (14, 2)]),
}


@pytest.mark.parametrize("to", [PYTORCH, ONNX])
@pytest.mark.parametrize("kind", NETWORKS)
def test_a_network_is_converted_for_all_sizes_that_it_accepts(kind, to, tmp_path):
    network, shapes, inputs, largest = NETWORKS[kind]
    given = convert.from_files(*files(tmp_path, network, ATTRIBUTES, **shapes), inputs=inputs)
    report = convert.save(given, to, str(tmp_path / "net"))
    assert [array.shape for array in given.samples[-1].inputs] == largest
    assert ("one example" in report) == kind.startswith("one example") and given.compute().nearly_constant() == []


def test_inputs_are_drawn_for_what_the_network_does_with_them(tmp_path):
    x = s.broadcast_add(X, s.expand_dims(s.Embedding(s.contrib.arange_like(X, axis=1), input_dim=90, output_dim=8), 0))
    given = convert.from_files(*files(tmp_path, x, data=(2, 12, 8)), (12, 8)).compute()
    values = np.concatenate([inputs[0].ravel() for inputs, _ in given.samples])
    assert values.min() < 0 and values.max() > 200 and not np.array_equal(values, np.round(values))
    positive = convert.from_files(*files(tmp_path, s.sqrt(X)), (6,)).compute()
    assert all(np.isfinite(Y).all() for _, [Y] in positive.samples)


def test_channels_are_not_grown_even_if_nothing_fixes_them(tmp_path):
    given = convert.from_files(*files(tmp_path, X * 2, data=(2, 3, 8, 8)), (3, 8, 8))
    assert {inputs[0].shape[1] for inputs, _ in given.samples} == {3}
    assert len({inputs[0].shape[2:] for inputs, _ in given.samples}) == 2


@needs("pytorch")
def test_the_report_names_outputs_that_hardly_depend_on_the_inputs(tmp_path):
    constant = s.elemwise_add(X * 1e-9, s.ones_like(X), name="constant")
    x = s.Group([constant, s.elemwise_add(X, s.ones_like(X), name="varying")])
    report = convert.save(convert.from_files(*files(tmp_path, x), (6,)), "pytorch", str(tmp_path / "net"))
    assert "constant_output" in report and "varying_output" not in report


def test_gamma_that_mxnet_ignores_may_be_missing(tmp_path):
    symbol, params = files(tmp_path, s.BatchNorm(X, fix_gamma=True, name="norm"))
    nd.save(str(params), {name: array for name, array in nd.load(str(params)).items() if "gamma" not in name})
    given = convert.from_files(symbol, params, (6,))
    assert given.inputs == ["data"] and given.params["norm_gamma"].tolist() == [1] * 6


@pytest.mark.parametrize("to", [PYTORCH, ONNX])
def test_parameters_and_constants_can_be_outputs(to, tmp_path):
    weight, fixed = s.var("weight", shape=(3, 6)), s.var("fixed", shape=(2, 3), init="Constant_fixed")
    anchors = s.contrib.MultiBoxPrior(s.reshape(X, (-1, 1, 2, 3)), sizes=(0.5,))
    x = s.Group([s.FullyConnected(X, weight=weight, num_hidden=3, no_bias=True, name="fc"), weight, fixed, anchors])
    given = convert.from_files(*files(tmp_path, x), (6,))
    convert.save(given, to, str(tmp_path / "net"))
    if to == "pytorch":
        found = runpy.run_path(str(tmp_path / "net.py"))["Net"]()
        assert {name for name, _ in found.named_parameters()} == {"fc.weight"}


BOXES = s.contrib.box_nms(s.concat(X, X * 2, dim=1, name="all_boxes"), name="nms")
ANCHORS = s.contrib.MultiBoxPrior(X, sizes=(0.5,), name="anchors")
SCORES = s.softmax(s.reshape(s.slice_axis(X, axis=1, begin=0, end=2), (0, 2, -1)), axis=1, name="scores")
SHIFTS = s.flatten(s.slice_axis(X, axis=1, begin=2, end=6), name="shifts")
DETECTOR = s.contrib.MultiBoxDetection(SCORES, SHIFTS, ANCHORS, name="nms")
QUANTIZED = s.contrib.quantize_v2(s.relu(X), min_calib_range=0, max_calib_range=1, name="small")[0]
# {what is wrong: a network, the shape of its input with a batch, and words of the one line that says it}
WRONG = {
    "a batch of 2": (s.concat(X, s.zeros((2, 3)), dim=1), (2, 4), ["a batch of 2"]),
    "quantized": (QUANTIZED, (2, 4), ["small", "quantized"]),
    "boxes": (s.slice_axis(BOXES, axis=1, begin=0, end=3), (2, 5, 6), ["nms", "--output all_boxes converts"]),
    "anchors and boxes": (
        s.slice_axis(DETECTOR, axis=1, begin=0, end=3),
        (2, 6, 4, 4),
        ["nms", "--output scores --output shifts --output anchors converts"],
    ),
    "ties": (s.topk(s.relu(X, name="before"), k=8, name="best"), (2, 12), ["best", "equal numbers", "--output before"]),
}


@needs("pytorch")
@pytest.mark.parametrize("what", WRONG)
def test_a_message_names_the_layer_and_where_to_cut(what, tmp_path):
    network, shape, words = WRONG[what]
    symbol, params = files(tmp_path, network, data=shape)
    with pytest.raises(Error) as error:
        convert.save(convert.from_files(symbol, params, shape[1:]), "pytorch", str(tmp_path / "net"))
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)
    assert not any(word in str(error.value) for word in ("tolerance", "MultiBoxPrior"))  # they would not help
    assert not (tmp_path / "net.py").exists()


@needs("pytorch")
def test_a_failure_of_pytorch_names_the_layer(tmp_path, monkeypatch):
    x = s.FullyConnected(X, num_hidden=2, name="conv7")
    monkeypatch.setitem(operators.RULES, "square", "{0}.reshape(7, 7)")
    with pytest.raises(Error, match="self.conv7") as error:
        convert.save(convert.from_files(*files(tmp_path, s.square(x)), (6,)), "pytorch", str(tmp_path / "net"))
    assert "\n" not in str(error.value)


@needs("pytorch")
def test_only_an_installed_module_is_hidden(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    for folder in ("folder", "package"):
        Path(folder).mkdir()
    for file in ("package/__init__.py", "mine.py"):
        Path(file).write_text("")
    assert convert.check_prefix("pytorch", "folder")
    for prefix, word in ("mine", "exists"), ("torch", "installed"), ("package", "package"):
        with pytest.raises(UsageError, match=word) as error:
            convert.check_prefix("pytorch", prefix)
        assert ("installed" in str(error.value)) == (prefix == "torch")


@needs("pytorch")
def test_all_operators_that_cannot_be_converted_are_listed_with_a_reason_before_anything_is_computed(tmp_path):
    x = s.contrib.fft(X, name="waves")
    given = convert.from_files(*files(tmp_path, s.contrib.ifft(x, name="back"), data=(2, 6)), (6,))
    given.predict = None  # computing would fail
    with pytest.raises(UsageError) as error:
        convert.save(given, "pytorch", str(tmp_path / "net"))
    assert all(word in str(error.value) for word in ("waves", "back", "supported")) and "\n" not in str(error.value)


@pytest.mark.parametrize("shape", [(3,), (3, 1, 1), (3, 4), (3, 4, 2)])
def test_softmax_output_divides_by_all_classes_of_an_example(shape, tmp_path):
    given = convert.from_files(*files(tmp_path, s.SoftmaxOutput(X, name="classes"), data=(2, *shape)), shape).compute()
    for [inputs], [found] in given.samples:
        powers = np.exp(inputs.astype(np.float64) - inputs.max())
        total = powers.sum(axis=tuple(range(1, powers.ndim)), keepdims=True)
        np.testing.assert_allclose(found, powers / total, rtol=1e-5, atol=1e-30)


# A place in the graph of relu (node 1) and FullyConnected (node 4), and its value
DAMAGE = [
    (("nodes", 1, "inputs", 0), [4, 0, 0]),  # a cycle
    (("nodes", 4, "inputs", 0, 1), 7),  # an output that does not exist
    (("nodes", 4, "attrs", "num_hidden"), 2),  # not text
    (("nodes", 0, "name"), None),
]


@pytest.mark.parametrize("place, value", DAMAGE)
def test_a_damaged_graph_is_refused(place, value, tmp_path):
    symbol, params = files(tmp_path, s.FullyConnected(s.relu(X), num_hidden=2))
    graph = json.loads(symbol.read_text())
    functools.reduce(operator.getitem, place[:-1], graph)[place[-1]] = value
    symbol.write_text(json.dumps(graph))
    with pytest.raises(UsageError, match="not the graph"):
        convert.from_files(symbol, params, (6,))


@pytest.mark.parametrize("kind", ["float64", "float16", "int8"])
def test_parameters_keep_their_type_except_floating_point_numbers(kind, tmp_path):
    symbol, params = files(tmp_path, s.FullyConnected(X, num_hidden=2, name="fc"))
    before = nd.load(str(params))
    nd.save(str(params), {**before, "arg:fc_bias": nd.array([1, 0], dtype=kind)})
    bias = convert.from_files(symbol, params, (6,)).params["fc_bias"]
    assert bias.dtype == ("float32" if "float" in kind else kind) and bias.tolist() == [1, 0]


def test_a_truncated_file_or_one_with_a_damaged_name_or_without_names_is_refused(tmp_path):
    symbol, params = files(tmp_path, s.FullyConnected(X, num_hidden=2, name="fc"))
    content = params.read_bytes()
    damaged = content.replace(b"fc_bias", b"fc_\xff\xffas")
    for wrong in (damaged, *(content[:length] for length in range(0, len(content), 5))):
        params.write_bytes(wrong)
        with pytest.raises(UsageError, match=str(params)) as refused:
            convert.from_files(symbol, params, (6,))
        assert "\n" not in str(refused.value)
    nd.save(str(params), [nd.ones(2)])
    with pytest.raises(UsageError):
        convert.from_files(symbol, params, (6,))


@pytest.mark.parametrize("name, lowest", [("which", 0), ("length", 1)])
def test_indices_and_lengths_are_drawn_for_the_default_axis(name, lowest, tmp_path):
    classes = s.pick(X, s.var("which")), s.softmax(X, s.cast(s.var("length"), "int32"), use_length=True)
    given = convert.from_files(
        *files(tmp_path, classes[lowest], data=(2, 4, 50), **{name: (2, 4)}), inputs={"data": (4, 50), name: (4,)}
    )
    drawn = np.concatenate([sample.inputs[given.inputs.index(name)].ravel() for sample in given.samples])
    assert drawn.min() >= lowest and drawn.max() > 25


def test_float64_accepts_rounding_but_no_other_difference(tmp_path, monkeypatch):
    x = s.broadcast_mul(s.sum(s.broadcast_sub(X + 1e7, s.var("shift", shape=(1, 1))), axis=1), s.ones((1,)))
    given = convert.from_files(*files(tmp_path, x), (6,)).compute()
    given.params["shift"] = np.array([[1e7]], np.float32)  # cancels all but a few digits
    given.samples = [exported.Sample(inputs, given.predict(inputs)) for inputs, _ in given.samples]
    exact = [[np.sum(np.float64(inputs[0]), axis=1)] for inputs, _ in given.samples]
    assert given.relative_error(exact) > convert.TOLERANCE
    monkeypatch.setattr(to_gluon, "outputs", lambda *_: [[1.05 * Y] for [Y] in exact])
    with pytest.raises(Error, match="scores differ"):
        convert.save(given, "gluon", str(tmp_path / "net"))
    twice = [[2 * Y - X] for [X], (_, [Y]) in zip(exact, given.samples)]  # it is twice as far off
    for name, found in (("exact", exact), ("twice", twice)):
        monkeypatch.setattr(to_gluon, "outputs", lambda *_, found=found: found)
        convert.save(given, "gluon", str(tmp_path / name))


@needs("pytorch")
def test_nan_and_int8_are_said(tmp_path):
    given = convert.from_files(*files(tmp_path, s.FullyConnected(X, num_hidden=2, name="fc")), (6,))
    given.params["fc_weight"] = np.full_like(given.params["fc_weight"], np.nan)
    assert "NaN: fc_weight" in convert.save(given, "gluon", str(tmp_path / "nan"))
    given.params["fc_weight"] = np.ones((2, 6), np.int8)
    given.samples = [exported.Sample(inputs, []) for inputs, _ in given.samples]
    with pytest.raises(Error, match="int8: fc_weight"):
        convert.save(given, "gluon", str(tmp_path / "int8"))


@needs("pytorch")
def test_statistics_that_mxnet_does_not_update_stay_in_training_and_lines_are_short(tmp_path):
    x = s.BatchNorm(s.Pad(X, mode="constant", pad_width=(0,) * 8), use_global_stats=True, fix_gamma=False, name="norm")
    x = s.concat(*(s.Activation(x, act_type="relu", name=f"a_long_name_of_a_layer_{k}") + k for k in range(9)), dim=1)
    given = convert.from_files(*files(tmp_path, x, data=(2, 3, 8, 8)), (3, 8, 8))
    convert.save(given, "pytorch", str(tmp_path / "net"))
    code = (tmp_path / "net.py").read_text()
    assert "pad" not in code and max(map(len, code.splitlines())) <= 120
    net = runpy.run_path(str(tmp_path / "net.py"))["Net"]()
    assert net.training and not net.norm.training and not net.train().norm.training


def test_computing_leaves_the_parameters_unchanged(tmp_path):
    x = s.Convolution(s.Convolution(X, kernel=(3, 3), num_filter=32, name="first"), kernel=(3, 3), num_filter=32)
    given = convert.from_files(*files(tmp_path, x, data=(1, 16, 9, 9)), (16, 9, 9))
    before = {name: array.copy() for name, array in given.params.items()}
    given.compute()
    given.predict(given.samples[0].inputs)
    assert all(np.array_equal(array, given.params[name]) for name, array in before.items())


def test_ctrl_c_and_files_of_others_leave_no_half_of_a_network(tmp_path, monkeypatch):
    network = convert.from_files(*files(tmp_path, s.FullyConnected(X, num_hidden=3)), (6,))
    before = {*tmp_path.iterdir()}
    rename = os.replace

    def interrupted(source, target):
        if target == tmp_path / "net-0000.params":
            raise KeyboardInterrupt
        rename(source, target)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(os, "replace", interrupted)
        convert.save(network, "gluon", str(tmp_path / "net"))
    assert {*tmp_path.iterdir()} == before

    compared, other = convert._compared_scores, tmp_path / "net-0000.params"
    monkeypatch.setattr(convert, "_compared_scores", lambda *given: other.write_text("other") and compared(*given))
    with pytest.raises(Error):
        convert.save(network, "gluon", str(tmp_path / "net"))
    assert {*tmp_path.iterdir()} == {*before, other} and other.read_text() == "other"
