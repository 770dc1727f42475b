import gc
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path

import mxnet as mx
import numpy as np
import pytest
from bench import timeline as bench
from mxnet import nd

from gluon_mgpu import highlevel, scratch
from gluon_mgpu.runtime.errors import Error, UsageError
from gluon_mgpu.training import datasets, loop, timeline
from gluon_mgpu.training import tuning as blocks
from gluon_mgpu.training.settings import Settings

CTX = [mx.cpu(0), mx.cpu(1)]
SIZE = 32
NEEDED = timeline.WARM_UP + timeline.STEPS + timeline.AROUND
RECORDED = timeline.STEPS + timeline.AROUND
MODULES = {"scratch": scratch, "highlevel": highlevel}


def train(impl, file, steps=NEEDED, hybridize=True, **settings):
    """Train as the loop does; returns the parameters on both devices."""
    gc.collect()  # nets of other tests, or what frees them is recorded too
    mx.nd.waitall()
    data = datasets.synthetic(steps * SIZE, 100, seed=0)
    mx.random.seed(0)
    own = {} if impl == "scratch" else {"hybridize": hybridize}
    replicas = MODULES[impl].Replicas(CTX, Settings(SIZE, **settings), **own)
    with timeline.recorded(file, replicas, impl, steps, steps):
        data_iter = loop.batches(data.train_images, data.train_labels, SIZE)
        loop.train_epoch(lambda X, y: replicas.train_batch(X, y, 0.1), data_iter, steps * SIZE, impl)
    return [replicas.parameters(device) for device in range(len(CTX))]


@pytest.fixture(scope="module", params=MODULES)
def run(request, tmp_path_factory):
    """(implementation, file of its trace, parameters after the training that was recorded)."""
    file = tmp_path_factory.mktemp("timeline") / "profile.json"
    return request.param, file, train(request.param, file)


def events(file, context=None):
    """The operators of a trace, or of one context of it."""
    trace = json.loads(Path(file).read_text())
    pids = {e["args"]["name"]: e["pid"] for e in trace["traceEvents"] if e["ph"] == "M"}
    of = [pids[context]] if context else [pid for name, pid in pids.items() if name != "steps"]
    return [e for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] in of]


def counts(file, context):
    """How often each operator ran on a context. A bulk's name lists its operators, as far as 127 characters go."""
    found = Counter()
    for event in events(file, context):
        names = event["name"].split(",")
        found.update(names[:-1] if len(event["name"]) >= 127 else names)
    return found


def test_parameters_after_recorded_steps_are_those_without_bit_for_bit(run):
    impl, _, with_profile = run
    for recorded, plain in zip(with_profile, train(impl, None)):
        for name, values in plain.items():
            np.testing.assert_array_equal(recorded[name], values, err_msg=name)


def test_operators_are_as_many_as_the_network_has_layers_on_each_context_and_step(run, tmp_path):
    impl, file, _ = run
    if impl == "highlevel":  # the name of a hybridized net's bulk is cut off
        file = tmp_path / "profile.json"
        train(impl, file, hybridize=False)
        joined = Counter(event["cat"] for event in events(file) if event["name"] == "Concat")
        assert joined.keys() <= {"forward"} and (joined or not blocks.USED)  # channels of zeros, to weights and biases
    for c in CTX:
        found = counts(file, str(c))
        for layer, number in {"Convolution": 2, "Pooling": 2, "Activation": 3, "FullyConnected": 2}.items():
            assert found[layer] == number * RECORDED, (c, layer)
        for layer in ("Convolution", "FullyConnected"):
            assert found[f"_backward_{layer}"] == 2 * RECORDED, (c, layer)
        if impl == "scratch":  # one array holds all
            assert found["sgd_update"] == RECORDED
        else:  # 8 arrays, of which Gluon updates 4 at a time
            assert found["multi_sgd_update"] == 2 * RECORDED


def test_allreduce_copies_and_adds_what_each_implementation_sums(run):
    impl, file, _ = run
    first, second = (counts(file, str(c)) for c in CTX)
    # One array of all gradients, or eight, every other one on the second device: a sum and a copy of it to the other
    # device. The first one also copies X and y of the second one's shard.
    sums = (1, 0) if impl == "scratch" else (4, 4)
    assert (first["add_n"], second["add_n"]) == tuple(n * RECORDED for n in sums)
    assert (first["CopyCPU2CPU"], second["CopyCPU2CPU"]) == tuple(n * RECORDED for n in (sums[0] + 2, sums[1]))


def test_every_operator_of_lenet_has_a_phase_that_its_name_means(run):
    _, file, _ = run
    assert timeline.summary(timeline.read(file))["unknown"] == []
    for event in events(file):
        if event["name"].startswith("_backward_"):
            assert event["cat"] == "backward"
        assert (event["cat"] == "update") == event["name"].endswith("sgd_update"), event
        assert (event["cat"] == "allreduce") == (event["name"] in ("CopyCPU2CPU", "add_n"))
        assert (event["cat"] == "other") == (event["name"] in ("DeleteVariable", "WaitForVar"))


@pytest.mark.parametrize("impl", MODULES)
@pytest.mark.parametrize(
    "settings",
    [{"momentum": 0.9, "clip_norm": 1.0, "accumulate": 2}, {"model": "lenet-max", "shares": (80, 20)}],
    ids=str,
)
def test_no_setting_has_an_operator_without_a_phase(impl, settings, tmp_path):
    if impl == "scratch":
        settings = {**settings, "model": "lenet"}
    train(impl, tmp_path / "profile.json", **settings)
    assert timeline.summary(timeline.read(tmp_path / "profile.json"))["unknown"] == []


def test_a_net_in_pieces_has_its_phases_too(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "USED", True)
    monkeypatch.setattr(blocks, "EXAMPLES", SIZE // 4)
    train("highlevel", tmp_path / "profile.json")
    found = events(tmp_path / "profile.json")
    assert timeline.summary(timeline.read(tmp_path / "profile.json"))["unknown"] == []
    assert not [e["name"] for e in found if e["cat"] == "allreduce" and e["name"] in ("Concat", "slice_axis")]
    joined = [e for e in found if "Concat" in e["name"] and "_backward" not in e["name"]]
    assert joined and all(e["cat"] == "forward" for e in joined)


@pytest.mark.parametrize("hybridize", [True, False])
def test_residual_additions_are_forward_and_sums_of_running_statistics_are_allreduce(hybridize, tmp_path, monkeypatch):
    monkeypatch.setattr(timeline, "WARM_UP", 1)
    data = datasets.synthetic(4 * 4, 100, seed=0)
    replicas = highlevel.Replicas(CTX, Settings(4, model="resnet18"), hybridize=hybridize)
    with timeline.recorded(tmp_path / "profile.json", replicas, "", 4, 4, steps=1):
        for X, y in loop.batches(data.train_images, data.train_labels, 4):
            replicas.train_batch(X, y, 0.01)
    trace = timeline.read(tmp_path / "profile.json")
    assert timeline.summary(trace)["unknown"] == []
    for c in CTX:
        found = Counter((e["name"], e["cat"]) for e in events(tmp_path / "profile.json", str(c)))
        if hybridize:
            assert not found["broadcast_add", "forward"]
            gradients = len(replicas.trained) // len(CTX)  # that a device sums; and the first one, the statistics
            assert found["add_n", "allreduce"] == 3 * (gradients + (c == CTX[0]))
        else:  # a residual block adds once, and its input's two gradients meet once
            assert found["broadcast_add", "forward"] == found["_backward_broadcast_add", "backward"] == 8 * 3
            assert found["Convolution", "forward"] == found["_backward_Convolution", "backward"] == 20 * 3
            assert not found["broadcast_add", "allreduce"]


def test_phases_and_idle_make_up_the_recorded_steps_on_every_context(run):
    _, file, _ = run
    found = timeline.summary(timeline.read(file))
    assert len(found["step_ms"]) == timeline.STEPS and list(found["contexts"]) == ["cpu(0)", "cpu(1)"]
    assert sum(found["step_ms"]) / 1e3 == pytest.approx(found["window_s"])
    steps = [e for e in json.loads(file.read_text())["traceEvents"] if e.get("cat") == "step"]
    start, end = steps[0]["ts"], steps[-1]["ts"] + steps[-1]["dur"]
    for context, seconds in found["contexts"].items():
        busy = np.zeros(end, bool)  # a place for every microsecond
        for event in events(file, context):
            busy[event["ts"] : event["ts"] + event["dur"]] = True
        assert seconds["idle"] == pytest.approx((end - start - busy[start:].sum()) / 1e6, abs=1e-9)
        assert sum(seconds[phase] for phase in (*timeline.PHASES, "idle")) == pytest.approx(found["window_s"])
        assert all(seconds[phase] > 0 for phase in ("forward", "backward", "update"))
    assert found["contexts"]["cpu(0)"]["allreduce"] > 0


def test_a_trace_is_a_chrome_trace_with_a_lane_for_each_context_and_one_of_steps(run):
    _, file, _ = run
    trace = json.loads(file.read_text(), parse_constant=pytest.fail)
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str) and type(event["pid"]) is type(event["tid"]) is int
        if event["ph"] == "X":
            assert type(event["ts"]) is type(event["dur"]) is int and event["ts"] >= 0 and event["dur"] >= 0
            assert event["cat"] in (*timeline.PHASES, "step")
        else:
            assert (event["ph"], event["name"]) == ("M", "process_name")
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"]
    assert names == ["cpu(0)", "cpu(1)", "steps"]
    assert [e["name"] for e in trace["traceEvents"] if e.get("cat") == "step"] == [f"step {i}" for i in range(1, 6)]


def test_operators_of_one_engine_thread_do_not_overlap(run):
    _, file, _ = run
    ends = {}
    for event in sorted(events(file), key=lambda e: (e["ts"], e["dur"])):
        if event["name"] == "DeleteVariable":  # an operator that is the last to hold its input frees it before it ends
            continue
        assert event["ts"] >= ends.get((event["pid"], event["tid"]), 0)
        ends[event["pid"], event["tid"]] = event["ts"] + event["dur"]


def raw(*operators):
    """MXNet's events, of (context, begin, end, name): each beginning, its end, and both once more elsewhere."""
    found = []
    for pid, begin, end, name in operators:
        for phases, process in (("BE", pid), ("be", 12345)):
            for ph, ts in zip(phases, (begin, end)):
                found.append({"name": name, "cat": "operator", "ph": ph, "ts": 10**15 + ts, "pid": process, "tid": pid})
    return found


MADE_UP = raw(
    *((0, 100 * i + 90, 100 * i + 100, "sgd_update") for i in range(4)),  # steps end at 100, 200, 300, 400
    *((1, 100 * i + 75, 100 * i + 90, "sgd_update") for i in range(4)),
    (0, 0, 10, "Convolution"),
    (0, 50, 60, "WaitForVar"),
    (0, 110, 150, "Convolution"),
    (0, 140, 160, "_backward_Convolution"),  # for 10 while the convolution is still running
    (0, 142, 145, "Reorder2Default"),  # all of it while the convolution is running
    (0, 170, 180, "CopyCPU2CPU"),
    (1, 95, 120, "Convolution"),  # from 100
    (1, 200, 230, "some_new_operator"),
    (1, 292, 330, "Convolution"),  # to 300
)
LANES = {0: "cpu(0)", 1: "cpu(1)"}


def test_idle_shares_of_a_made_up_profile_are_those_computed_by_hand():
    found = timeline.summary(timeline.chrome_trace(MADE_UP, LANES, steps=4))
    assert found["step_ms"] == [0.1, 0.1] and found["window_s"] == pytest.approx(200e-6)
    first = {"forward": 40, "backward": 10, "allreduce": 10, "update": 10 + 10, "other": 0, "idle": 120}
    second = {"forward": 20 + 8, "backward": 0, "allreduce": 0, "update": 15 + 15, "other": 30, "idle": 112}
    for context, microseconds, share in (("cpu(0)", first, 0.6), ("cpu(1)", second, 0.56)):
        assert found["contexts"][context].pop("idle_share") == pytest.approx(share)
        assert found["contexts"][context] == pytest.approx({phase: us / 1e6 for phase, us in microseconds.items()})
    assert found["unknown"] == ["some_new_operator"]


def test_operators_of_a_context_that_does_not_train_are_kept_in_a_lane_of_the_host():
    trace = timeline.chrome_trace(MADE_UP + raw((7, 30, 40, "CopyCPU2CPU")), LANES, steps=4)
    names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"}
    lanes = Counter(names[e["pid"]] for e in trace["traceEvents"] if e["ph"] == "X")
    assert lanes == {"cpu(0)": 4 + 6, "cpu(1)": 4 + 3, "host": 1, "steps": 2}
    assert list(timeline.summary(trace)["contexts"]) == ["cpu(0)", "cpu(1)"]


def test_the_table_gives_milliseconds_a_step_and_names_operators_without_a_phase():
    result = timeline.summary(timeline.chrome_trace(MADE_UP, LANES, steps=4))
    lines = bench.table({**result, "about": "LeNet", "unrecorded_step_ms": 0.08}).splitlines()
    assert lines[0].startswith("LeNet; ") and "MXNet 1.9.1" in lines[0]
    rows = [line.split() for line in lines[2:4]]
    assert rows[0] == ["cpu(0)", "0.02", "0.01", "0.01", "0.01", "0.00", "0.06", "60.0%"]  # 20, 5, 5, 10, 0, 60 us
    assert rows[1][-1] == "56.0%"
    assert "some_new_operator" in lines[-1]


def test_a_profile_that_misses_an_update_is_refused_and_so_is_a_file_that_is_no_timeline(tmp_path):
    short = [e for e in MADE_UP if (e["pid"], e["ts"] - 10**15) not in ((1, 375), (1, 390))]
    with pytest.raises(Error, match=r"3 updates on cpu\(1\) in 4 steps"):
        timeline.chrome_trace(short, LANES, steps=4)
    file = tmp_path / "profile.json"
    for text in ("", "[]", '{"traceEvents": []}', '{"traceEvents": [], "otherData": {"contexts": ["cpu(0)"]}}'):
        file.write_text(text)
        with pytest.raises(Error, match="no recorded timeline"):
            timeline.read(file)


class Engine:
    """Replicas that update two arrays of two contexts a step, and do what else a test wants."""

    ctx = CTX

    def __init__(self, at_step=lambda step: None):
        self.at_step, self.steps = at_step, 0
        self.arrays = [nd.ones(4, c) for c in CTX for _ in range(2)]

    def train_batch(self, X, y, lr):
        for array in self.arrays:
            nd.sgd_update(array, array, lr=lr, out=array)
        self.at_step(self.steps)
        self.steps += 1


def test_recorded_steps_are_of_one_epoch_and_follow_the_warm_up(tmp_path):
    file, engine, epochs, an_epoch = tmp_path / "profile.json", Engine(), 3, 14
    engine.at_step = lambda step: nd.full(3, step).sin() if step in (9, 13, 14, 21) else None
    with timeline.recorded(file, engine, "", epochs * an_epoch, an_epoch):
        for _ in range(epochs):
            for _ in range(an_epoch):
                engine.train_batch(None, None, 0.1)
            nd.ones(3).argmax(axis=0)  # an evaluation
    found = counts(file, "cpu(0)")
    # Steps 10 to 16 are of two epochs; 14 to 20 are the first seven of one.
    assert (found["argmax"], found["sin"], found["sgd_update"]) == (0, 1, 2 * RECORDED)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_end_before_the_last_recorded_step_leaves_no_file_and_stops_the_profile(error, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    file = tmp_path / "profile.json"

    def fail(step):
        if step == NEEDED - 2:
            raise error

    engine = Engine(fail)
    with pytest.raises(error), timeline.recorded(file, engine, "", NEEDED, NEEDED):
        for _ in range(NEEDED):
            engine.train_batch(None, None, 0.1)
    assert list(tmp_path.iterdir()) == []
    assert engine.train_batch == Engine.train_batch.__get__(engine)
    with pytest.raises(mx.MXNetError, match="Profiler hasn't been run"):  # any more
        mx.profiler.dump()


def test_a_file_that_cannot_be_written_keeps_what_was_there(tmp_path, monkeypatch):
    file, engine = tmp_path / "profile.json", Engine()
    file.write_text("before")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(Error, match="No space left"), timeline.recorded(file, engine, "", NEEDED, NEEDED):
        for _ in range(NEEDED):
            engine.train_batch(None, None, 0.1)
    assert file.read_text() == "before" and list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    "name, total, an_epoch, message",
    [
        ("profile.png", 100, 100, "give a file such as profile.json"),
        ("none/profile.json", 100, 100, "in a folder that is there"),
        (".", 100, 100, "give a file"),
        ("profile.json", 16, 100, "16 steps to train"),
        ("profile.json", 100, 6, "6 an epoch"),
    ],
)
def test_what_cannot_be_recorded_is_refused_before_a_step(name, total, an_epoch, message, tmp_path):
    with pytest.raises(UsageError, match=message), timeline.recorded(tmp_path / name, Engine(), "", total, an_epoch):
        pytest.fail("a step would be trained")


def test_mxnet_ends_the_process_at_a_context_beyond_its_lanes_and_recording_refuses_it_before(tmp_path):
    lanes = len(os.sched_getaffinity(0)) + 2
    code = """
        import os, sys, gluon_mgpu
        gluon_mgpu.configure(2)
        import mxnet as mx
        mx.profiler.set_config(profile_imperative=True, filename=sys.argv[2])
        mx.profiler.set_state("run")
        print(mx.nd.ones(3, mx.cpu(int(sys.argv[1]))).sum().asscalar(), flush=True)
        mx.profiler.set_state("stop")
        os._exit(0)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    last, beyond = (
        subprocess.run([*command, str(i), str(tmp_path / "t.json")], capture_output=True, text=True)
        for i in (lanes - 1, lanes)
    )
    assert (last.returncode, last.stdout) == (0, "3.0\n"), last.stderr
    assert beyond.returncode == -signal.SIGABRT and "idx < DeviceCount()" in beyond.stderr
    assert timeline._lanes([mx.cpu(lanes - 1)]) == {lanes - 1: f"cpu({lanes - 1})"}
    with pytest.raises(UsageError, match=rf"cpu\({lanes}\): on .* ends at cpu\({lanes - 1}\)"):
        timeline._lanes([mx.cpu(lanes)])


def test_bench_leaves_a_result_a_trace_and_a_picture_and_trains_in_a_process_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("MXNET_EXEC_BULK_EXEC_TRAIN", "0")  # not for what is measured
    result = bench.run("highlevel", batch_size=SIZE, steps=2, out=tmp_path / "out")
    assert json.loads(json.dumps(result)) == result
    assert len(result["step_ms"]) == 2 and len(result["contexts"]) == 2 and result["unknown"] == []
    assert any("," in e["name"] for e in events(result["trace"]))  # bulks
    bench.draw(result, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    assert os.listdir(tmp_path / "out") == [bench.TRACE]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"model": "resnet18"}, "scratch has lenet only"),
        ({"batch_size": 1}, "a batch of 1 on 2 contexts"),
        ({"contexts": len(os.sched_getaffinity(0)) + 3}, "give fewer contexts"),
    ],
)
def test_bench_refuses_in_one_line_what_it_cannot_record(options, message):
    with pytest.raises(UsageError, match=message):
        bench.run(**options)


def test_ctrl_c_ends_the_bench_with_its_process_and_leaves_nothing(tmp_path):
    code = "import sys; from bench import timeline; timeline.run(batch_size=2048, out=sys.argv[1])"
    out, temporary = tmp_path / "out", tmp_path / "temporary"
    temporary.mkdir()
    parent = subprocess.Popen(
        [sys.executable, "-c", code, out], env={**os.environ, "TMPDIR": str(temporary)}, stderr=subprocess.PIPE
    )
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
    while not (worker := children.read_text().split()):
        assert parent.poll() is None
        time.sleep(0.05)
    time.sleep(1)
    parent.send_signal(signal.SIGINT)
    assert b"KeyboardInterrupt" in parent.communicate(timeout=30)[1]
    assert not Path(f"/proc/{worker[0]}").exists()
    assert not out.exists() and list(temporary.iterdir()) == []
