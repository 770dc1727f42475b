import copy
import io
import json
import re
import subprocess
import sys

import numpy as np
import pytest
from bench import allreduce, machine, model

from gluon_mgpu.runtime.errors import UsageError

MACHINE = {"cores": 2, "cpu": "Some CPU"}
OPERATION_MS, GB_S = 0.04, 20.0
CONTEXT_MS, EXAMPLE_MS, SHARED_MS = {"lenet": 1.5, "resnet18": 12.0}, {"lenet": 0.18, "resnet18": 13.0}, 0.02
BYTES = {"lenet": 516272, "resnet18": 44703272}


def operations(way, k):
    if way in ("star", "tree"):  # each of the others: copied, added, copied back
        return 3 * (k - 1)
    if way == "slices":  # k slices: k - 1 copied to where they are summed, and k copies of the sum
        return sum((k - 1) + 1 + k for _ in range(k))
    return k + 1 + k


def sums():
    """allreduce.json of a machine whose every operation takes OPERATION_MS and whose memory moves GB_S."""
    workers = []
    for k in (1, 2, 4, 8):
        points = []
        single = [(f"{n}", None, 1, n) for n in (4096, 1 << 20, 64 << 20)]
        for name, of, arrays, size in [*single, ("LeNet", "lenet", 8, BYTES["lenet"])] + [
            ("ResNet-18", "resnet18", 76, BYTES["resnet18"])
        ]:
            ms = {
                way: [
                    factor * (arrays * operations(way, k) * OPERATION_MS + allreduce.moved(way, k) * size / GB_S / 1e6)
                    for factor in (3.0, 0.5, 1.0)  # of which the median is meant
                ]
                for way in allreduce.WAYS
            }
            points.append({"name": name, "model": of, "arrays": arrays, "bytes": size, "ms": ms})
        workers.append({"contexts": k, "settings": {}, "copy_gb_s": {"1": [1.0]}, "points": points})
    return {"machine": MACHINE, "rounds": 3, "workers": workers}


def steps(cores=2):
    """scaling.json of a machine on which a step takes exactly what the model has for it."""
    runs = []
    for impl, of, batch in (("scratch", "lenet", 256), ("highlevel", "lenet", 256), ("highlevel", "resnet18", 64)):
        for kind in ("strong", "weak"):
            for k in (1, 2, 4, 8):
                examples = batch * k if kind == "weak" else batch
                working = min(cores, k)
                an_example = EXAMPLE_MS[of] + SHARED_MS * (working - 1)
                ms = (k * CONTEXT_MS[of] + examples * an_example) / working
                run = {"impl": impl, "model": of, "kind": kind, "contexts": k, "batch_size": examples}
                runs.append({**run, "step_ms": [0.9 * ms, ms, 1.1 * ms]})
    return {"machine": {**MACHINE, "cores": cores}, "rounds": 3, "runs": runs}


def left(folder, sums_=None, steps_=None):
    for name, content in (("allreduce", sums_ or sums()), ("scaling", steps_ or steps())):
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return model.run(left(tmp_path_factory.mktemp("measured")))


def test_the_fit_finds_what_the_points_were_made_with(result):
    assert [found["way"] for found in result["sums"]] == list(model.OPERATIONS)
    for found in result["sums"]:
        assert found["operation_us"] == pytest.approx(1000 * OPERATION_MS), found["way"]
        assert found["gb_s"] == pytest.approx(GB_S), found["way"]
    assert {(found["impl"], found["model"]) for found in result["steps"]} == {
        ("scratch", "lenet"),
        ("highlevel", "lenet"),
        ("highlevel", "resnet18"),
    }
    for found in result["steps"]:
        assert found["context_ms"] == pytest.approx(CONTEXT_MS[found["model"]])
        assert found["example_ms"] == pytest.approx(EXAMPLE_MS[found["model"]])
        assert found["shared_ms"] == pytest.approx(SHARED_MS)
    for found in result["sums"] + result["steps"]:
        assert found["fitted_error"]["largest"] < 1e-9 and found["checked_error"]["largest"] < 1e-9


def test_on_one_core_nothing_is_shared(tmp_path):
    one = {**sums(), "machine": {**MACHINE, "cores": 1}}
    for found in model.run(left(tmp_path, one, steps(cores=1)))["steps"]:
        assert found["shared_ms"] == 0
        assert found["context_ms"] == pytest.approx(CONTEXT_MS[found["model"]])
        assert found["example_ms"] == pytest.approx(EXAMPLE_MS[found["model"]])


def test_the_time_of_a_step_is_that_computed_by_hand():
    # 8 contexts of 3 ms and 100 examples of 2 + 0.5 ms on 2 cores: (24 + 250) / 2
    assert model.step_ms(8, 100, 2, context_ms=3, example_ms=2, shared_ms=0.5) == pytest.approx(137)
    assert model.step_ms(1, 100, 2, context_ms=3, example_ms=2, shared_ms=0.5) == pytest.approx(203)


def test_points_kept_from_the_fit_change_its_error_and_not_the_fit(tmp_path, result):
    slower, shorter = sums(), steps()
    for point in slower["workers"][-1]["points"]:
        point["ms"] = {way: [2 * ms for ms in spent] for way, spent in point["ms"].items()}
    for run in shorter["runs"]:
        if run["contexts"] == 8:
            run["step_ms"] = [ms / 2 for ms in run["step_ms"]]
    changed = model.run(left(tmp_path, slower, shorter))
    assert changed["predicted"] == result["predicted"]
    for of, wanted in (("sums", -0.5), ("steps", 1)):
        for before, after in zip(result[of], changed[of]):
            facts = [name for name in before if name not in ("points", "checked_error")]
            assert [after[name] for name in facts] == [before[name] for name in facts]
            assert after["checked_error"]["median"] == pytest.approx(abs(wanted))
            kept = [point for point in after["points"] if not point["fitted"]]
            assert kept and all(point["contexts"] == 8 for point in kept)
            assert all(point["error"] == pytest.approx(wanted) for point in kept)
            assert len(kept) < len(after["points"])


def test_a_point_of_the_fit_changes_it(tmp_path, result):
    slower = sums()
    slower["workers"][1]["points"][0]["ms"]["star"] = [1.0]
    changed = model.run(left(tmp_path, slower))
    assert changed["sums"][0]["operation_us"] > 1.02 * result["sums"][0]["operation_us"]
    assert changed["sums"][0]["fitted_error"]["largest"] > 0.1
    assert changed["sums"][1:] == result["sums"][1:]


def test_the_fit_is_the_nearest_of_all_that_are_not_negative():
    rng = np.random.default_rng(0)
    for _ in range(20):
        rows, times = rng.random((12, 2)), rng.random(12) + 0.05

        def far(x, rows=rows, times=times):
            return ((rows @ x / times - 1) ** 2).sum()

        found = model.fit(rows, times)
        grid = [np.array([a, b]) for a in np.linspace(0, 3, 61) for b in np.linspace(0, 3, 61)]
        assert (found >= 0).all() and far(found) <= min(map(far, grid)) + 1e-12
    # without the bound, the second would be negative
    assert model.fit(np.array([[1.0, 1], [2, 5], [3, 9]]), np.array([2.0, 3, 4]))[1] == 0


@pytest.mark.parametrize("k", [2, 3, 4])
def test_the_operations_of_our_own_ways_are_those_that_they_call(k, monkeypatch):
    import mxnet as mx

    called = []

    def count(owner, name):
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given, **named: called.append(name) or original(*given, **named))

    count(mx.nd.NDArray, "copyto"), count(mx.nd.NDArray, "__iadd__"), count(mx.nd, "add_n")
    arrays = [[mx.nd.ones(20 + n, mx.cpu(i)) for i in range(k)] for n in range(3)]
    functions = allreduce.ways(arrays)
    for way in ("star", "tree", "slices"):
        called.clear()
        functions[way]()
        assert len(called) == 3 * model.OPERATIONS[way][1](k), way


def simulated(messages, devices, latency, bandwidth):
    """Seconds until the last of messages has come. Each is (sender, receiver, bytes, the indices of the messages that
    it waits for); a device sends one at a time and receives one at a time, in the order of the list."""
    sends, receives, done = [0.0] * devices, [0.0] * devices, []
    for sender, receiver, size, after in messages:
        start = max([sends[sender], receives[receiver], *(done[i] for i in after)])
        done.append(start + latency + size / bandwidth)
        sends[sender] = receives[receiver] = done[-1]
    return max(done, default=0.0)


def star_messages(k, size):
    gather = [(i, 0, size, []) for i in range(1, k)]
    return gather + [(0, i, size, range(k - 1)) for i in range(1, k)]


def tree_messages(k, size):
    messages, heard = [], [[] for _ in range(k)]  # heard: the messages that have come to each device
    distance, pairs = 1, []
    while distance < k:
        for i in range(0, k - distance, 2 * distance):
            messages.append((i + distance, i, size, list(heard[i + distance])))
            heard[i].append(len(messages) - 1)
            pairs.append((i, i + distance))
        distance *= 2
    for parent, child in reversed(pairs):
        messages.append((parent, child, size, list(heard[parent])))
        heard[child].append(len(messages) - 1)
    return messages


def ring_messages(k, size):
    messages, last = [], [[] for _ in range(k)]
    for _ in range(2 * (k - 1)):
        came = {}
        for i in range(k):  # what a device passes on is what came to it in the round before
            messages.append((i, (i + 1) % k, size / k, last[i]))
            came[(i + 1) % k] = [len(messages) - 1]
        last = [came[i] for i in range(k)]
    return messages


def server_messages(k, size):
    messages, pushed = [], [[] for _ in range(k)]
    for turn in range(1, k):
        for i in range(k):
            messages.append((i, (i + turn) % k, size / k, []))
            pushed[(i + turn) % k].append(len(messages) - 1)
    asked = {}
    for turn in range(1, k):
        for i in range(k):
            messages.append((i, (i + turn) % k, 0, []))
            asked[i, (i + turn) % k] = len(messages) - 1
    for turn in range(1, k):
        for i in range(k):
            server = (i + turn) % k
            messages.append((server, i, size / k, [*pushed[server], asked[i, server]]))
    return messages


MESSAGES = {"star": star_messages, "tree": tree_messages, "ring": ring_messages, "PS": server_messages}


@pytest.mark.parametrize("way", MESSAGES)
def test_a_formula_is_what_the_messages_take_one_by_one(way):
    assert MESSAGES.keys() == model.CLUSTER.keys()
    for k in (1, 2, 3, 4, 5, 6, 7, 8, 13, 16, 33):
        for size, latency, bandwidth in ((4e6, 1e-4, 1e9), (4e3, 1e-3, 1e9), (5e7, 0.0, 1.25e8), (1e5, 1e-2, 1e12)):
            wanted = simulated(MESSAGES[way](k, size), k, latency, bandwidth)
            found = model.allreduce_seconds(way, k, size, latency, bandwidth)
            assert found == pytest.approx(wanted), (k, size, latency)


def test_the_simulated_messages_bring_every_gradient_to_every_device():
    for way, messages_of in MESSAGES.items():
        for k in (2, 3, 6, 8):
            carried, received = [], [{i} for i in range(k)]
            for sender, receiver, _, after in messages_of(k, 1.0):
                carried.append({sender}.union(*(carried[i] for i in after)))
                received[receiver] |= carried[-1]
            assert received == [set(range(k))] * k, way


def test_predictions_are_those_of_the_fit_and_fall_with_devices_and_rise_with_the_link(result):
    cases = result["predicted"]["cases"]
    assert result["predicted"]["devices"] == [1 << i for i in range(13)]
    assert len({(c["model"], c["speed"], c["link"]) for c in cases}) == len(cases) == 2 * 2 * 3
    for case in cases:
        of, batch = case["model"], {"lenet": 256, "resnet18": 64}[case["model"]]
        assert (case["gradient_bytes"], case["batch_a_device"]) == (BYTES[of], batch)
        compute = CONTEXT_MS[of] + batch * EXAMPLE_MS[of] / case["speed"]
        assert case["predicted_compute_ms"] == pytest.approx(compute)
        latency, bandwidth = model.LINKS[case["link"]]
        for way, efficiency in case["predicted_efficiency"].items():
            assert efficiency[0] == 1 and all(a > b > 0 for a, b in zip(efficiency, efficiency[1:])), way
            seconds = simulated(MESSAGES[way](8, BYTES[of]), 8, latency, bandwidth)
            assert efficiency[3] == pytest.approx(compute / (compute + 1000 * seconds)), way
    for slower, faster in zip(cases, cases[1:]):
        if slower["link"] != list(model.LINKS)[-1]:  # the next case is of a faster link
            for way in model.CLUSTER:
                pairs = zip(slower["predicted_efficiency"][way], faster["predicted_efficiency"][way])
                assert all(a < b for a, b in list(pairs)[1:]), way


def test_a_faster_device_spends_more_of_its_step_on_the_sum(result):
    cases = {
        (c["model"], c["speed"], c["link"]): c["predicted_efficiency"]["ring"] for c in result["predicted"]["cases"]
    }
    for (of, speed, link), efficiency in cases.items():
        if speed == 100:
            assert all(fast < slow for fast, slow in zip(efficiency[1:], cases[of, 1, link][1:]))


def test_the_table_calls_every_prediction_predicted_and_names_the_measured_machine(result):
    text = model.table(result)
    assert all(len(line) <= 120 for line in text.splitlines()), max(text.splitlines(), key=len)
    blocks = text.split("\n\n")
    fitted, predicted = blocks[:3], blocks[3:]
    assert "2 cores of Some CPU" in fitted[0] and not any("predicted" in block.lower() for block in fitted)
    assert len(predicted) == 5 and predicted[0].startswith("PREDICTED, NOT MEASURED")
    assert all(block.startswith("predicted: ") for block in predicted[1:])
    star = next(line.split() for line in text.splitlines() if line.startswith("star  "))
    assert star == ["star", "3k-3", "40.0", "us", "20.0", "GB/s", "0%", "(0%)", "0%", "(0%)", *star[10:]]


def test_the_table_gives_efficiencies_and_the_best_computed_by_hand(result):
    block = next(b for b in model.table(result).split("\n\n") if b.startswith("predicted: LeNet, devices as fast"))
    row = next(line for line in block.splitlines() if line.startswith("10 Gbit/s, 20 us"))
    cells = row[17:].split()
    # 1.5 + 256 * 0.18 = 47.58 ms; on 8 devices ring: 14 * 0.02 + 1.75 * 516272 / 1.25e6 = 1.0028 ms
    # star and tree: 14 and 6 times 0.02 + 0.413; PS: 21 * 0.02 + 0.7228
    assert cells[:4] == ["88.7", "94.8", "97.9*", "97.7"]
    # on 4096, tree: 24 * 0.433 = 10.4 ms; ring: 8190 * 0.02 + 0.83 = 164.6 ms; PS: 245.7 + 0.83; star: 8190 * 0.433
    assert cells[12:] == ["1.32", "82.1*", "22.4", "16.2"]


def test_a_bandwidth_without_a_limit_survives_json_and_the_table(tmp_path):
    even = sums()
    for worker in even["workers"]:
        for point in worker["points"]:
            k = worker["contexts"]
            point["ms"] = {way: [0.04 * point["arrays"] * operations(way, k) + 0.01] for way in allreduce.WAYS}
            point["bytes"] = 4096 if point["arrays"] > 1 else point["bytes"]
    for point in (p for w in even["workers"] for p in w["points"] if p["arrays"] == 1):
        point["ms"] = {way: [ms / (point["bytes"] / 4096) ** 0.1 for ms in spent] for way, spent in point["ms"].items()}
    found = model.run(left(tmp_path, even))
    assert None in [one["gb_s"] for one in found["sums"]]
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert "no limit" in model.table(found)


def test_the_result_survives_json_and_says_of_what_machine_it_is(tmp_path, result):
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    machine.leave(tmp_path, "model", result, model.draw)
    assert json.loads((tmp_path / "model.json").read_text())["machine"] == MACHINE
    assert (tmp_path / "model.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_has_a_panel_a_case_and_each_says_predicted(result, monkeypatch):
    from matplotlib.figure import Figure

    drawn, picture = [], io.BytesIO()
    savefig = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *given, **named: drawn.append(self) or savefig(self, *given, **named)
    )
    model.draw(result, picture)
    width, height = (int.from_bytes(picture.getvalue()[i : i + 4], "big") for i in (16, 20))
    assert picture.getvalue().startswith(b"\x89PNG") and width >= 1000 and height >= 700
    titles = [axes.get_title() for part in drawn[0].subfigs for axes in part.axes]
    assert len(titles) == 2 + 12 and sum(title.startswith("predicted: ") for title in titles) == 12


def broken(change, of="scaling"):
    """The files' contents, one of them changed."""
    contents = {"allreduce": sums(), "scaling": steps()}
    contents[of] = copy.deepcopy(contents[of])
    change(contents[of])
    return contents


def set_step_ms(value):
    return lambda content: content["runs"][3].update(step_ms=value)


BROKEN = {
    "a time of 0": ("scaling", set_step_ms([1.0, 0.0]), r"step_ms \[1.0, 0.0\] is not numbers above 0"),
    "a negative time": ("scaling", set_step_ms([-1]), r"step_ms \[-1\] is not numbers above 0"),
    "not a number": ("scaling", set_step_ms([float("nan")]), r"step_ms \[nan\] is not numbers above 0"),
    "infinite": ("scaling", set_step_ms([float("inf")]), r"step_ms \[inf\] is not numbers above 0"),
    "no times": ("scaling", set_step_ms([]), r"step_ms \[\] is not numbers above 0"),
    "text": ("scaling", set_step_ms(["fast"]), r"step_ms \['fast'\] is not numbers above 0"),
    "true": ("scaling", set_step_ms([True]), r"step_ms \[True\] is not numbers above 0"),
    "half a context": (
        "scaling",
        lambda c: c["runs"][0].update(contexts=1.5),
        "contexts 1.5 is not a whole number above 0",
    ),
    "no batch": ("scaling", lambda c: c["runs"][0].pop("batch_size"), "batch_size None is not a whole number above 0"),
    "a run of another kind": ("scaling", lambda c: c["runs"][0].update(kind="odd"), "a run of .*odd is not known"),
    "no runs": ("scaling", lambda c: c.update(runs=[]), r"runs \[\] is not a list"),
    "runs that are none": ("scaling", lambda c: c.update(runs=[3]), "impl None is not a line"),
    "no machine": ("scaling", lambda c: c.pop("machine"), "machine None is not an object"),
    "no 8 contexts": (
        "scaling",
        lambda c: c.update(runs=[run for run in c["runs"] if run["contexts"] < 8]),
        "highlevel, LeNet was not measured on 8 contexts, and 1, 2, 4, 8 are needed",
    ),
    "no ResNet-18": (
        "scaling",
        lambda c: c.update(runs=[run for run in c["runs"] if run["model"] == "lenet"]),
        "highlevel, ResNet-18 was not measured on 1, 2, 4, 8 contexts",
    ),
    "a batch costs nothing": (
        "scaling",
        lambda c: [run.update(step_ms=[run["contexts"] / min(2, run["contexts"])]) for run in c["runs"]],
        "take no longer with a larger batch",
    ),
    "sums not on 2 and 8": (
        "allreduce",
        lambda c: c.update(workers=[w for w in c["workers"] if w["contexts"] in (1, 4)]),
        "a sum was not measured on 2, 8 contexts, and 2, 4, 8 are needed",
    ),
    "a way that was not measured": (
        "allreduce",
        lambda c: c["workers"][1]["points"][0]["ms"].pop("tree"),
        "tree None is not numbers above 0",
    ),
    "no gradients": (
        "allreduce",
        lambda c: [p.update(model=[]) for w in c["workers"] for p in w["points"]],
        "the gradients of LeNet were not measured",
    ),
    "bytes below 0": (
        "allreduce",
        lambda c: c["workers"][0]["points"][0].update(bytes=-4),
        "bytes -4 is not a whole number above 0",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_file_that_is_not_what_it_must_be_is_one_line_with_the_value_and_what_to_run(what, tmp_path):
    of, change, message = BROKEN[what]
    contents = broken(change, of)
    left(tmp_path, contents["allreduce"], contents["scaling"])
    with pytest.raises(UsageError) as caught:
        model.run(tmp_path)
    text = str(caught.value)
    assert text.startswith(f"{tmp_path}/{of}.json: ") and "\n" not in text
    assert re.search(message, text), text
    assert text.endswith(f": run `bench.py {of} --out {tmp_path}` again")


@pytest.mark.parametrize("name", ["allreduce", "scaling"])
def test_a_file_that_is_not_there_or_not_json_is_one_line(name, tmp_path):
    (left(tmp_path) / f"{name}.json").unlink()
    with pytest.raises(
        UsageError, match=rf"^{tmp_path}/{name}.json is not there: run `bench.py {name} --out .*` first$"
    ):
        model.run(tmp_path)
    for content in (b"", b"{", b"\xff\xfe", b"[" * 100000):
        (tmp_path / f"{name}.json").write_bytes(content)
        with pytest.raises(UsageError, match=rf"^{tmp_path}/{name}.json: it is not JSON: run .* again$"):
            model.run(tmp_path)
    (tmp_path / f"{name}.json").write_text("[1]")
    with pytest.raises(UsageError, match="machine None is not an object"):
        model.run(tmp_path)
    (tmp_path / f"{name}.json").unlink()
    (tmp_path / f"{name}.json").mkdir()
    with pytest.raises(UsageError, match=r"cannot be read \(Is a directory\)"):
        model.run(tmp_path)


def test_files_of_two_machines_are_refused(tmp_path):
    other = {**steps(), "machine": {"cores": 2, "cpu": "Another"}}
    with pytest.raises(UsageError, match="of two machines, 2 cores of Some CPU and 2 cores of Another: measure on one"):
        model.run(left(tmp_path, steps_=other))


def processes():
    """distributed.json of an engine that takes 0.5 ms an array and 2 ms a MB, and whose steps overlap none of it."""
    sums = [{"kvstore": "ring", "bytes": n, "ms": [90.0, 0.5 + 2 * n / 1e6, 0.1]} for n in (4096, 10**6, 10**7)]
    steps = [
        {"kvstore": kvstore, "impl": "highlevel", "model": "lenet", "exchange": exchange, "step_ms": [ms] * 3}
        for kvstore, exchange, ms in (
            ("local", True, 25.0),
            ("ring", False, 26.0),
            ("ring", True, 26 + 8 * 0.5 + 2 * 3),
        )
    ]
    counts = {"arrays": 8, "array_bytes": 3 * 10**6}
    return {"machine": MACHINE, "sums": sums, "runs": [{**step, **counts} for step in steps]}


def test_a_step_of_two_processes_is_modelled_by_the_one_without_the_exchange_and_the_sums_alone(tmp_path, result):
    for overlapped in (0.0, 4.0):
        found = processes()
        found["runs"][-1]["step_ms"] = [36 - overlapped] * 3
        (left(tmp_path) / "distributed.json").write_text(json.dumps(found))
        (engine,) = model.run(tmp_path)["engines"]
        assert engine["array_us"] == pytest.approx(500) and engine["gb_s"] == pytest.approx(0.5)
        (step,) = engine["steps"]
        assert step["modelled_ms"] == pytest.approx(36) and step["exchange_ms"] == pytest.approx(10 - overlapped)
        assert step["error"] == pytest.approx(36 / (36 - overlapped) - 1)
    text = model.table(model.run(tmp_path))
    assert "32.0 ms measured, 6.0 of it the exchange; modelled 36.0 (+12%)" in text
    assert all(len(line) <= 120 for line in text.splitlines())
    without = {name: value for name, value in model.run(tmp_path).items() if name != "engines"}
    assert without == {name: value for name, value in result.items() if name != "engines"} and not result["engines"]


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda c: c["runs"].pop(1), "the steps over ring were not measured with and without the exchange"),
        (lambda c: c["sums"][0].update(ms=[-1.0]), r"ms \[-1.0\] is not numbers above 0"),
        (lambda c: c["runs"][1].update(exchange=2), "exchange 2 is not true or false"),
        (lambda c: c["runs"][0].update(model="bert"), "a run of highlevel, bert is not known"),
        (lambda c: c.update(machine={**MACHINE, "cpu": "Another"}), "it is of 2 cores of Another, not 2 cores of Some"),
    ],
)
def test_a_measurement_of_processes_that_is_not_what_it_must_be_is_one_line(change, message, tmp_path):
    found = processes()
    change(found)
    (left(tmp_path) / "distributed.json").write_text(json.dumps(found))
    with pytest.raises(
        UsageError, match=rf"^{tmp_path}/distributed.json: {message}.*: run `bench.py distributed --out"
    ):
        model.run(tmp_path)


def test_the_model_needs_no_mxnet(tmp_path):
    code = "import sys; from bench import model; model.table(model.run(sys.argv[1])); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, left(tmp_path)], capture_output=True, text=True, check=True)
    assert "numpy" in done.stdout.split() and "mxnet" not in done.stdout.split()
