"""The cost model: the fit recovers known parameters, and predictions agree with simulated messages."""

import json

import mxnet as mx
import numpy as np
import pytest
from bench import model

from gluon_mgpu import implementations
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


def test_the_fit_finds_the_parameters_that_made_the_points(tmp_path):
    (tmp_path / "scaling.json").write_text(json.dumps(scaling()))
    result = model.run(tmp_path)
    assert set(result["steps"]) == {"scratch, LeNet", "highlevel, LeNet", "highlevel, ResNet-18"}
    for name, found in result["steps"].items():
        of = "lenet" if "LeNet" in name else "resnet18"
        assert found["terms"] == pytest.approx([CONTEXT_MS[of], EXAMPLE_MS[of], SHARED_MS])
        assert found["fitted_error"][1] < 1e-9 and found["checked_error"][1] < 1e-9


@pytest.mark.parametrize("name", model.GRADIENT_BYTES)
def test_the_gradients_have_the_size_of_the_networks(name):
    gradients = implementations.replicas("highlevel", [mx.cpu()], Settings(model=name)).gradients()
    assert model.GRADIENT_BYTES[name] == sum(gradient.nbytes for gradient in gradients.values())


def test_the_fit_has_no_negative_terms():
    rows, times = np.array([[1.0, 1], [2, 5], [3, 9]]), np.array([2.0, 3, 4])
    assert np.linalg.lstsq(rows / times[:, None], np.ones(3), rcond=None)[0].min() < 0
    slope = (rows[:, 0] / times).sum() / ((rows[:, 0] / times) ** 2).sum()  # of the best fit with the first term alone
    assert model.fit(rows, times) == pytest.approx([slope, 0])


def simulated(rounds, devices, latency, bandwidth):
    """Seconds until the last message has arrived, and for each device the devices whose gradients have reached it.

    rounds: (waits, bytes, [(sender, receiver), ...]). A device sends one message at a time and receives one at a time,
    in the order of the lists. If a round waits, a device passes on what it has received before the round.
    """
    sends, receives, heard = [0.0] * devices, [0.0] * devices, [{i} for i in range(devices)]
    for waits, size, messages in rounds:
        before, known = list(receives), [set(found) for found in heard]
        for sender, receiver in messages:
            start = max(sends[sender], receives[receiver], before[sender] if waits else 0)
            sends[sender] = receives[receiver] = start + latency + size / bandwidth
            heard[receiver] |= known[sender] if waits else {sender}
    return max(receives), heard


def star(k, size):
    return [(False, size, [(i, 0) for i in range(1, k)]), (True, size, [(0, i) for i in range(1, k)])]


def tree(k, size):
    levels, distance = [], 1
    while distance < k:
        levels.append([(i + distance, i) for i in range(0, k - distance, 2 * distance)])
        distance *= 2
    levels += [[(parent, child) for child, parent in level] for level in reversed(levels)]
    return [(True, size, level) for level in levels]


def ring(k, size):
    return [(True, size / k, [(i, (i + 1) % k) for i in range(k)])] * (2 * (k - 1))


def servers(k, size):
    """Each device is a worker and a server: it sends the parts of its gradients, then requests, then sums."""
    turns = [(i, (i + turn) % k) for turn in range(1, k) for i in range(k)]
    answers = [(server, worker) for worker, server in turns]
    return [(False, size / k, turns), (False, 0, turns), (True, size / k, answers)]


ROUNDS = {"star": star, "tree": tree, "ring": ring, "PS": servers}


@pytest.mark.parametrize("way", ROUNDS)
def test_a_formula_is_what_the_messages_take_one_by_one(way):
    assert ROUNDS.keys() == model.CLUSTER.keys()
    for k in (1, 2, 3, 5, 7, 8, 13, 33):
        for size, latency, bandwidth in ((4e6, 1e-4, 1e9), (4e3, 1e-3, 1e9), (5e7, 0.0, 1.25e8), (1e5, 1e-2, 1e12)):
            wanted, heard = simulated(ROUNDS[way](k, size), k, latency, bandwidth)
            assert heard == [set(range(k))] * k
            assert model.allreduce_seconds(way, k, size, latency, bandwidth) == pytest.approx(wanted), (k, size)
