"""The cost model: the fit recovers known parameters, and predictions agree with simulated messages."""

import io
import json

import mxnet as mx
import numpy as np
import pytest
from bench import model

from gluon_mgpu import highlevel
from gluon_mgpu.runtime.errors import UsageError
from gluon_mgpu.training.settings import Settings

MACHINE = {"cores": 2, "cpu": "Some CPU"}
CONTEXT_MS, EXAMPLE_MS, SHARED_MS = {"lenet": 1.5, "resnet18": 12.0}, {"lenet": 0.18, "resnet18": 13.0}, 0.02


def scaling():
    """scaling.json of a machine on which a step takes exactly as long as the model says."""
    runs = []
    for impl, of, batch in (("scratch", "lenet", 256), ("highlevel", "lenet", 256), ("highlevel", "resnet18", 64)):
        for kind in ("strong", "weak"):
            for k in (1, 2, 4, 8):
                examples = batch * k if kind == "weak" else batch
                working = min(MACHINE["cores"], k)
                ms = (k * CONTEXT_MS[of] + examples * (EXAMPLE_MS[of] + SHARED_MS * (working - 1))) / working
                run = {"impl": impl, "model": of, "kind": kind, "contexts": k, "batch_size": examples}
                runs.append({**run, "step_ms": [0.9 * ms, ms, 1.1 * ms]})  # the median counts
    return {"machine": MACHINE, "rounds": 3, "runs": runs}


def fitted(folder, content):
    (folder / "scaling.json").write_text(json.dumps(content))
    return model.run(folder)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return fitted(tmp_path_factory.mktemp("measured"), scaling())


def test_the_fit_finds_the_parameters_that_made_the_points(result):
    assert set(result["steps"]) == {"scratch, LeNet", "highlevel, LeNet", "highlevel, ResNet-18"}
    for name, found in result["steps"].items():
        of = "lenet" if "LeNet" in name else "resnet18"
        assert found["terms"] == pytest.approx([CONTEXT_MS[of], EXAMPLE_MS[of], SHARED_MS])
        assert found["fitted_error"][1] < 1e-9 and found["checked_error"][1] < 1e-9


def test_measurements_on_8_contexts_change_the_error_and_not_the_fit(tmp_path, result):
    content = scaling()
    for run in content["runs"]:
        if run["contexts"] == 8:
            run["step_ms"] = [ms / 2 for ms in run["step_ms"]]
    changed = fitted(tmp_path, content)
    assert changed["predicted"] == result["predicted"]
    for name, found in changed["steps"].items():
        assert found["terms"] == result["steps"][name]["terms"]
        assert found["checked_error"] == pytest.approx([1, 1])


@pytest.mark.parametrize("name", model.GRADIENT_BYTES)
def test_the_gradients_have_the_size_of_the_networks(name):
    gradients = highlevel.Replicas([mx.cpu()], Settings(model=name)).gradients()
    assert model.GRADIENT_BYTES[name] == sum(gradient.nbytes for gradient in gradients.values())


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
        assert case["predicted_compute_ms"] == pytest.approx(compute)
        latency, bandwidth = model.LINKS[case["link"]]
        for way, efficiency in case["predicted_efficiency"].items():
            assert efficiency[0] == 1 and all(a > b > 0 for a, b in zip(efficiency, efficiency[1:])), way
            seconds = simulated(MESSAGES[way](8, model.GRADIENT_BYTES[of]), 8, latency, bandwidth)
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
    "a time of 0": lambda c: c["runs"][3].update(step_ms=[0.0]),
    "text": lambda c: c["runs"][3].update(step_ms=["fast"]),
    "no runs": lambda c: c.pop("runs"),
    "no 8 contexts": lambda c: c.update(runs=[r for r in c["runs"] if r["contexts"] < 8]),
    "no ResNet-18": lambda c: c.update(runs=[r for r in c["runs"] if r["model"] == "lenet"]),
    "not JSON": None,
    "missing": None,
}


@pytest.mark.parametrize("what", BROKEN)
def test_an_incomplete_file_is_one_line_that_says_what_to_run(what, tmp_path):
    content = scaling()
    if BROKEN[what]:
        BROKEN[what](content)
    if what != "missing":
        (tmp_path / "scaling.json").write_text("{" if what == "not JSON" else json.dumps(content))
    with pytest.raises(UsageError, match="bench.py scaling") as caught:
        model.run(tmp_path)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)
