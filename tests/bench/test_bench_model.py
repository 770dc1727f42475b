"""The cost model: the fit recovers known parameters, and predictions agree with simulated messages."""

import copy
import io
import json

import numpy as np
import pytest
from bench import allreduce, model

from gluon_mgpu.runtime.errors import UsageError

MACHINE = {"cores": 2, "cpu": "Some CPU"}
OPERATION_MS, GB_S = 0.04, 20.0
CONTEXT_MS, EXAMPLE_MS, SHARED_MS = {"lenet": 1.5, "resnet18": 12.0}, {"lenet": 0.18, "resnet18": 13.0}, 0.02
BYTES = {"lenet": 516272, "resnet18": 44703272}


def operations(way, k):
    if way in ("star", "tree"):  # each of the others: copied, added, copied back
        return 3 * (k - 1)
    if way == "slices":  # k slices: k - 1 copies to where they are summed, a sum, k copies of it
        return sum((k - 1) + 1 + k for _ in range(k))
    return k + 1 + k


def sums():
    """allreduce.json of a machine whose every operation takes OPERATION_MS and whose memory moves GB_S."""
    workers = []
    for k in (1, 2, 4, 8):
        points = []
        networks = [("lenet", 8), ("lenet", 1), ("resnet18", 76), ("resnet18", 1)]
        for of, arrays in networks:
            size = BYTES[of]
            ms = {
                way: [
                    factor * (arrays * operations(way, k) * OPERATION_MS + allreduce.moved(way, k) * size / GB_S / 1e6)
                    for factor in (3.0, 0.5, 1.0)  # the median counts
                ]
                for way in allreduce.WAYS
            }
            points.append({"model": of, "arrays": arrays, "bytes": size, "ms": ms})
        workers.append({"contexts": k, "points": points})
    return {"machine": MACHINE, "rounds": 3, "workers": workers}


def steps(cores=2):
    """scaling.json of a machine on which a step takes exactly as long as the model says."""
    runs = []
    for impl, of, batch in (("scratch", "lenet", 256), ("highlevel", "lenet", 256), ("highlevel", "resnet18", 64)):
        for kind in ("strong", "weak"):
            for k in (1, 2, 4, 8):
                examples = batch * k if kind == "weak" else batch
                working = min(cores, k)
                ms = (k * CONTEXT_MS[of] + examples * (EXAMPLE_MS[of] + SHARED_MS * (working - 1))) / working
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


def test_the_fit_finds_the_parameters_that_made_the_points(result):
    assert list(result["sums"]) == list(model.OPERATIONS)
    for way, found in result["sums"].items():
        assert found["terms"] == pytest.approx([OPERATION_MS, 1 / GB_S]), way
    assert set(result["steps"]) == {"scratch, LeNet", "highlevel, LeNet", "highlevel, ResNet-18"}
    for name, found in result["steps"].items():
        of = "lenet" if "LeNet" in name else "resnet18"
        assert found["terms"] == pytest.approx([CONTEXT_MS[of], EXAMPLE_MS[of], SHARED_MS])
    for found in (*result["sums"].values(), *result["steps"].values()):
        assert found["fitted_error"][1] < 1e-9 and found["checked_error"][1] < 1e-9


def test_measurements_on_8_contexts_change_the_error_and_not_the_fit(tmp_path, result):
    slower, shorter = sums(), steps()
    for point in slower["workers"][-1]["points"]:
        point["ms"] = {way: [2 * ms for ms in times] for way, times in point["ms"].items()}
    for run in shorter["runs"]:
        if run["contexts"] == 8:
            run["step_ms"] = [ms / 2 for ms in run["step_ms"]]
    changed = model.run(left(tmp_path, slower, shorter))
    assert changed["predicted"] == result["predicted"]
    for of, wanted in (("sums", 0.5), ("steps", 1)):
        for name, found in changed[of].items():
            assert found["terms"] == result[of][name]["terms"]
            assert found["checked_error"] == pytest.approx([wanted, wanted])


def test_the_fit_has_no_negative_terms():
    rows, times = np.array([[1.0, 1], [2, 5], [3, 9]]), np.array([2.0, 3, 4])
    assert np.linalg.lstsq(rows / times[:, None], np.ones(3), rcond=None)[0].min() < 0
    slope = (rows[:, 0] / times).sum() / ((rows[:, 0] / times) ** 2).sum()  # of the best fit with the first term alone
    assert model.fit(rows, times) == pytest.approx([slope, 0])


def simulated(messages, devices, latency, bandwidth):
    """Seconds until the last message has arrived. Each is (sender, receiver, bytes, the indices of the messages that it
    waits for); a device sends one at a time and receives one at a time, in the order of the list."""
    sends, receives, done = [0.0] * devices, [0.0] * devices, []
    for sender, receiver, size, after in messages:
        start = max([sends[sender], receives[receiver], *(done[i] for i in after)])
        done.append(start + latency + size / bandwidth)
        sends[sender] = receives[receiver] = done[-1]
    return max(done, default=0.0)


def heard_of(messages, devices):
    """For each device, the devices whose gradients have reached it."""
    carried, received = [], [{i} for i in range(devices)]
    for sender, receiver, _, after in messages:
        carried.append({sender}.union(*(carried[i] for i in after)))
        received[receiver] |= carried[-1]
    return received


def star_messages(k, size):
    gather = [(i, 0, size, []) for i in range(1, k)]
    return gather + [(0, i, size, range(k - 1)) for i in range(1, k)]


def tree_messages(k, size):
    messages, heard = [], [[] for _ in range(k)]  # heard: the messages that each device has received
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
        arrived = {}
        for i in range(k):  # a device passes on what it received in the round before
            messages.append((i, (i + 1) % k, size / k, last[i]))
            arrived[(i + 1) % k] = [len(messages) - 1]
        last = [arrived[i] for i in range(k)]
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
    for k in (1, 2, 3, 5, 7, 8, 13, 33):
        for size, latency, bandwidth in ((4e6, 1e-4, 1e9), (4e3, 1e-3, 1e9), (5e7, 0.0, 1.25e8), (1e5, 1e-2, 1e12)):
            messages = MESSAGES[way](k, size)
            assert heard_of(messages, k) == [set(range(k))] * k
            wanted = simulated(messages, k, latency, bandwidth)
            assert model.allreduce_seconds(way, k, size, latency, bandwidth) == pytest.approx(wanted), (k, size)


def test_predictions_follow_from_the_fit_and_the_messages(result):
    cases = result["predicted"]
    assert len({(c["model"], c["speed"], c["link"]) for c in cases}) == len(cases) == 2 * 2 * 3
    for case in cases:
        of, batch = case["model"], {"lenet": 256, "resnet18": 64}[case["model"]]
        compute = CONTEXT_MS[of] + batch * EXAMPLE_MS[of] / case["speed"]
        assert case["gradient_bytes"] == BYTES[of] and case["predicted_compute_ms"] == pytest.approx(compute)
        latency, bandwidth = model.LINKS[case["link"]]
        for way, efficiency in case["predicted_efficiency"].items():
            assert efficiency[0] == 1 and all(a > b > 0 for a, b in zip(efficiency, efficiency[1:])), way
            seconds = simulated(MESSAGES[way](8, BYTES[of]), 8, latency, bandwidth)
            assert efficiency[3] == pytest.approx(compute / (compute + 1000 * seconds)), way


def test_the_table_and_the_picture_show_the_best_way_for_each_cluster(result):
    row = next(
        line for line in model.table(result).splitlines() if "LeNet, devices as fast" in line and "20 us" in line
    )
    # 1.5 + 256 * 0.18 = 47.58 ms; on 8 devices ring: 14 * 0.02 + 1.75 * 516272 / 1.25e6 = 1.0028 ms
    # on 4096, tree: 24 * (0.02 + 0.413) = 10.4 ms; ring: 8190 * 0.02 + 0.83 = 164.6 ms
    cells = row.split()
    assert "47.58" in cells and cells[-8:-6] == ["97.9%", "ring"] and cells[-2:] == ["82.1%", "tree"]
    picture = io.BytesIO()
    model.draw(json.loads(json.dumps(result)), picture)
    assert picture.getvalue().startswith(b"\x89PNG")


BROKEN = {
    "a time of 0": lambda c: c["scaling"]["runs"][3].update(step_ms=[0.0]),
    "text": lambda c: c["scaling"]["runs"][3].update(step_ms=["fast"]),
    "no runs": lambda c: c["scaling"].pop("runs"),
    "another machine": lambda c: c["scaling"].update(machine={"cores": 4, "cpu": "Another"}),
    "no 8 contexts": lambda c: c["scaling"].update(runs=[r for r in c["scaling"]["runs"] if r["contexts"] < 8]),
    "no ResNet-18": lambda c: c["scaling"].update(runs=[r for r in c["scaling"]["runs"] if r["model"] == "lenet"]),
    "sums on too few contexts": lambda c: c["allreduce"].update(workers=c["allreduce"]["workers"][:2]),
    "a way without times": lambda c: c["allreduce"]["workers"][1]["points"][0]["ms"].pop("tree"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_files_that_are_incomplete_are_one_line_that_says_what_to_run(what, tmp_path):
    contents = copy.deepcopy({"allreduce": sums(), "scaling": steps()})
    BROKEN[what](contents)
    with pytest.raises(UsageError) as caught:
        model.run(left(tmp_path, contents["allreduce"], contents["scaling"]))
    assert str(tmp_path) in str(caught.value) and "bench.py" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [None, "{"])
def test_a_file_that_is_missing_or_not_json_is_one_line(content, tmp_path):
    path = left(tmp_path) / "scaling.json"
    path.write_text(content) if content else path.unlink()
    with pytest.raises(UsageError, match="bench.py scaling") as caught:
        model.run(tmp_path)
    assert "\n" not in str(caught.value)
