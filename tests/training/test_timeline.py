"""The recorded timeline, compared with counts of the network's layers, made-up profiles and a run without recording."""

import gc
import json
import os
from collections import Counter

import mxnet as mx
import numpy as np
import pytest
from mxnet import nd

from gluon_mgpu import highlevel, implementations, scratch
from gluon_mgpu.runtime.errors import UsageError
from gluon_mgpu.training import checkpoint, timeline

CTX = [mx.cpu(0), mx.cpu(1)]
SIZE = 32
RECORDED = timeline.STEPS + timeline.AROUND
NEEDED = timeline.WARM_UP + RECORDED
MODULES = {"scratch": scratch, "highlevel": highlevel}


def train(module, batch_size=SIZE, **options):
    """Train for one epoch, with as many steps as a recording needs."""
    gc.collect()  # otherwise, freeing other tests' networks would be recorded too
    nd.waitall()
    options = {"dataset": "synthetic", "limit": NEEDED * batch_size, "epochs": 1, "seed": 0, **options}
    implementations.train(module, 2, batch_size, 0.01, device="cpu", **options)


@pytest.fixture(scope="module", params=MODULES)
def run(request, tmp_path_factory):
    """(lesson module, folder of a run with a recording)"""
    module, folder = MODULES[request.param], tmp_path_factory.mktemp("timeline")
    options = {"tune": False, "hybridize": False} if module is highlevel else {}
    train(module, out=folder / "recorded", profile=folder / "profile.json", **options)
    train(module, out=folder / "plain", **options)
    return module, folder


def counts(file, context):
    """How often each (operator, phase) ran on a context."""
    trace = json.loads(file.read_text())
    pid = trace["otherData"]["contexts"][str(context)]
    return Counter((e["name"], e["cat"]) for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == pid)


def test_a_recording_leaves_a_trace_and_a_picture_and_the_same_bits(run):
    _, folder = run
    plain, recorded = (checkpoint.load(folder / name / "checkpoint.npz")[0] for name in ("plain", "recorded"))
    np.testing.assert_equal(recorded, plain)
    assert (folder / "profile.png").read_bytes().startswith(b"\x89PNG")
    trace = json.loads((folder / "profile.json").read_text(), parse_constant=pytest.fail)
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"]
    assert names == ["cpu(0)", "cpu(1)", "steps"]
    assert [e["name"] for e in trace["traceEvents"] if e.get("cat") == "step"] == [f"step {i}" for i in range(1, 6)]
    for event in (e for e in trace["traceEvents"] if e["ph"] == "X"):
        assert type(event["ts"]) is type(event["dur"]) is int and event["ts"] >= 0 and event["dur"] >= 0


def test_each_context_runs_each_layer_once_per_step_and_every_operator_has_its_phase(run):
    module, folder = run
    for c in CTX:
        found = counts(folder / "profile.json", c)
        for layer, number in {"Convolution": 2, "Pooling": 2, "Activation": 3, "FullyConnected": 2}.items():
            assert found[layer, "forward"] == number * RECORDED, (c, layer)
        for layer in ("Convolution", "FullyConnected"):
            assert found[f"_backward_{layer}", "backward"] == 2 * RECORDED, (c, layer)
        arrays, updates = (8, "sgd_update") if module is scratch else (2, "multi_sgd_update")  # Gluon: 4 per call
        assert found[updates, "update"] == arrays * RECORDED
    # The sum of each of 8 arrays goes to the other device; the second device's shards of X and y come from the host.
    if module is scratch:
        copies = [counts(folder / "profile.json", c)["CopyCPU2CPU", "allreduce"] for c in CTX]
        assert sum(copies) == (8 + 8 + 2) * RECORDED


FORWARD = {"Convolution", "BatchNorm", "Activation", "Pooling", "Flatten", "FullyConnected"}
FORWARD |= {"log_softmax", "pick", "_mul_scalar", "mean", "elemwise_add", "broadcast_add"}  # the loss; residual blocks
FORWARD |= {"Concat", "slice_axis"}  # join running statistics; with tuning, pad weights and split shards


EXTRAS = {"momentum": 0.9, "max_grad_norm": 1.0, "grad_accum_steps": 2}
CASES = [(scratch, {**EXTRAS, "weight_decay": 0.1}), (highlevel, {**EXTRAS, "batch_size": 4 * SIZE})]
CASES += [(highlevel, {"model": "lenet-max", "shares": (80, 20), "tune": False})]
CASES += [(highlevel, {"model": "resnet18", "batch_size": 2})]


@pytest.mark.parametrize("module, options", CASES, ids=str)
def test_under_all_settings_only_layers_and_the_loss_count_as_forward(module, options, tmp_path, monkeypatch):
    if options.get("model") == "resnet18":
        monkeypatch.setattr(timeline, "WARM_UP", 1)
        monkeypatch.setattr(module, "evaluate_accuracy", lambda *_: 0.0)  # takes seconds
        options = {**options, "limit": 2 * (1 + RECORDED)}
    train(module, profile=tmp_path / "profile.json", **options)
    found = counts(tmp_path / "profile.json", CTX[0])
    assert {name for name, phase in found if phase == "forward" and "," not in name} <= FORWARD
    assert {phase for _, phase in found} == {*timeline.PHASES}


def profile(*operators):
    """MXNet's events for (context, begin, end, name): each beginning, its end, and both again elsewhere."""
    found = []
    for pid, begin, end, name in operators:
        for phases, process in (("BE", pid), ("be", 12345)):
            for ph, ts in zip(phases, (begin, end)):
                found.append({"name": name, "cat": "operator", "ph": ph, "ts": 10**15 + ts, "pid": process, "tid": pid})
    return found


MADE_UP = profile(
    *((0, 100 * i + 90, 100 * i + 100, "sgd_update") for i in range(4)),  # steps end at 100, 200, 300, 400
    *((1, 100 * i + 75, 100 * i + 90, "sgd_update") for i in range(4)),
    (0, 0, 10, "Convolution"),
    (0, 50, 60, "WaitForVar"),
    (0, 110, 150, "Convolution"),
    (0, 140, 160, "_backward_Convolution"),  # overlaps the convolution for 10
    (0, 142, 145, "Reorder2Default"),  # entirely during the convolution
    (0, 170, 180, "CopyCPU2CPU"),
    (1, 95, 120, "Convolution"),  # from 100
    (1, 200, 230, "an_operator_of_the_network"),
    (1, 292, 330, "Convolution"),  # to 300
    (7, 30, 40, "CopyCPU2CPU"),  # a context that does not train
)
LANES = {0: "cpu(0)", 1: "cpu(1)"}


def test_the_summary_of_a_made_up_profile_is_the_one_computed_by_hand():
    trace = timeline.chrome_trace(MADE_UP, LANES, steps=4)
    found = timeline.summary(trace)
    assert found["step_ms"] == [0.1, 0.1] and found["window_s"] == pytest.approx(200e-6)
    first = {"forward": 40, "backward": 10, "allreduce": 10, "update": 10 + 10, "other": 0, "idle": 120}
    second = {"forward": 20 + 30 + 8, "backward": 0, "allreduce": 0, "update": 15 + 15, "other": 0, "idle": 112}
    for context, microseconds, share in (("cpu(0)", first, 0.6), ("cpu(1)", second, 0.56)):
        assert found["contexts"][context].pop("idle_share") == pytest.approx(share)
        assert found["contexts"][context] == pytest.approx({phase: us / 1e6 for phase, us in microseconds.items()})
    names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"}
    lanes = Counter(names[e["pid"]] for e in trace["traceEvents"] if e["ph"] == "X")
    assert lanes == {"cpu(0)": 4 + 6, "cpu(1)": 4 + 3, "host": 1, "steps": 2}


def record(file, epochs=1, steps_per_epoch=NEEDED, at_step=lambda step: None):
    """Record steps that each update one array per context."""
    arrays = [nd.ones(4, c) for c in CTX]
    with timeline.Recorder(file, CTX, "", epochs * steps_per_epoch, steps_per_epoch) as recorder:
        for step in range(epochs * steps_per_epoch):
            with recorder.step():
                for array in arrays:
                    nd.sgd_update(array, array, lr=0.1, out=array)
                at_step(step)
            if (step + 1) % steps_per_epoch == 0:
                nd.ones(3).argmax(axis=0)  # an evaluation


def test_recorded_steps_are_of_one_epoch_and_follow_the_warm_up(tmp_path):
    # Steps 10 to 16 belong to two epochs; steps 14 to 20 are the first seven of one epoch.
    record(tmp_path / "profile.json", 3, 14, lambda step: nd.full(3, step).sin() if step in (9, 13, 14, 21) else None)
    found = counts(tmp_path / "profile.json", CTX[0])
    assert (found["argmax", "forward"], found["sin", "forward"]) == (0, 1)
    assert found["sgd_update", "update"] == RECORDED


def test_a_run_that_ends_before_the_last_recorded_step_leaves_no_file_and_stops_the_profiler(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def fail(step):
        if step == NEEDED - 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record(tmp_path / "profile.json", at_step=fail)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(mx.MXNetError):  # the profiler is no longer running
        mx.profiler.dump()


def test_what_cannot_be_recorded_is_a_usage_error(tmp_path):
    def recorder(total, steps_per_epoch, before=0, file="profile.json", ctx=CTX):
        timeline.Recorder(tmp_path / file, ctx, "", total, steps_per_epoch, before)

    recorder(100, 100, 100 - NEEDED)  # just enough steps
    recorder(NEEDED + RECORDED - 1, RECORDED)
    for too_few in ((600, RECORDED - 1), (NEEDED - 1, NEEDED - 1), (16, 8), (100, 100, 101 - NEEDED), (100, 100, 100)):
        with pytest.raises(UsageError):
            recorder(*too_few)
    for file in ("profile.png", "none/profile.json", "."):
        with pytest.raises(UsageError):
            recorder(100, 100, file=file)
    lanes = len(os.sched_getaffinity(0)) + 2  # the profiler's lanes; for any further context, MXNet would abort
    recorder(100, 100, ctx=[mx.cpu(lanes - 1)])
    with pytest.raises(UsageError):
        recorder(100, 100, ctx=[mx.cpu(lanes)])
