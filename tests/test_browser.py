"""The interactive pages in a real browser. Their numbers are compared with NumPy's, measurements and cost_model.py."""

import math
import re

import cost_model
import numpy as np
import pytest
from runs import ROOT

RUN = "window.stepThrough.run(...arguments)"
SETTINGS = [(1, 3), (2, 8), (3, 10), (4, 10), (5, 16), (6, 5), (7, 7), (8, 16), (8, 3)]  # devices, batch size
slow = pytest.mark.slow


def shards(array, devices):
    """Split as split_and_load does: if the array does not divide evenly, the first parts are one larger."""
    return np.array_split(np.array(array), devices)


def gradients(trace, devices):
    """Each device's gradient of the sum of squared errors / 2: (devices, parameters)."""
    w = np.array(trace["start"])
    pairs = zip(shards(trace["X"], devices), shards(trace["y"], devices))
    return np.array([(x @ w - y) @ x if len(x) else np.zeros(len(w)) for x, y in pairs])


def of_phase(trace, phase):
    return [step for step in trace["steps"] if step["phase"] == phase]


def shown(page, row):
    """The numbers that all devices show in a row, w or g: (devices, parameters)."""
    cells = f"[...document.querySelectorAll('#step-cards tr.{row}')].map(r => [...r.cells].map(c => c.innerText))"
    return np.array([[float(text.replace("−", "-")) for text in row[1:]] for row in page.value(cells)])


def choose(page, devices, batch, kind):
    for setting, value in {"devices": devices, "batch": batch, "kind": kind}.items():
        page.choose(f"#step-{setting}", value)
    page.value("document.getElementById('step-reset').click()")


def go(page, steps):
    """Press Next."""
    page.value("Array.from({length: arguments[0]}, () => document.getElementById('step-next').click())", steps)


@pytest.mark.parametrize(
    "kind, settings",
    [("ring", [(3, 10)]), *(pytest.param(kind, SETTINGS, marks=slow) for kind in ("star", "ring", "tree"))],
)
def test_step_through_computes_and_shows_what_numpy_computes(page, kind, settings):
    opened = page("step.html")
    for devices, batch in settings:
        choose(opened, devices, batch, kind)
        trace = opened.value(RUN, devices, batch, kind)
        local = gradients(trace, devices)
        summed, updated = local.sum(0), np.array(trace["start"]) - trace["learningRate"] * local.sum(0) / batch
        [backward], [update] = of_phase(trace, "backward"), of_phase(trace, "update")
        examples = [[row["example"] for row in device["rows"]] for device in backward["devices"]]
        assert examples == [list(part) for part in shards(range(batch), devices)]
        go(opened, 4)  # copy, split, forward, backward
        assert local.any() and np.array_equal(shown(opened, "g"), local)
        go(opened, len(of_phase(trace, "allreduce")))
        assert np.array_equal(shown(opened, "g"), [summed] * devices)
        go(opened, 1)
        assert len(shown(opened, "w")) == devices + 1  # plus one device with the whole batch
        assert np.abs(shown(opened, "w") - updated).max() <= 0.0005  # three decimals
        replicas = np.array([device["params"] for device in update["devices"]])
        assert (replicas == replicas[0]).all() and np.allclose(replicas[0], updated, rtol=1e-12)
        assert trace["oneDevice"]["params"] == list(replicas[0]) and trace["loss"][1] < trace["loss"][0]


ALLREDUCES = {  # {kind: for k devices, the rounds, all messages, and the part of the gradient in each}
    "star": lambda k: (2 * (k - 1), 2 * (k - 1), 1),
    "ring": lambda k: (2 * (k - 1), 2 * (k - 1) * k, 1 / k),
    "tree": lambda k: (2 * math.ceil(math.log2(k)), 2 * (k - 1), 1),
}


@slow
@pytest.mark.parametrize("kind", ALLREDUCES)
def test_step_through_sends_the_messages_of_each_allreduce(page, kind):
    opened = page("step.html")
    for devices, batch in SETTINGS[1:]:
        rounds, messages, part = ALLREDUCES[kind](devices)
        size = 4 * devices * part  # bytes: the gradient has one float32 per device
        trace = opened.value(RUN, devices, batch, kind)
        sent = [step["messages"] for step in of_phase(trace, "allreduce")]
        assert (trace["rounds"], len(sent), sum(map(len, sent))) == (rounds, rounds, messages)
        assert {message["bytes"] for round in sent for message in round} == {size}
        for round in sent:  # a device sends and receives at most one message per round
            assert all(len({message[end] for message in round}) == len(round) for end in ("from", "to"))
        choose(opened, devices, batch, kind)
        [row] = opened.value("[...document.querySelectorAll('.chosen')].map(row => row.innerText.split('\\t'))")
        assert row == [kind, *(f"{value:.0f}" for value in (rounds, messages, messages * size, rounds * size))]
        go(opened, len(trace["steps"]))
        labels = opened.value("[...document.querySelectorAll('#step-links > text')].map(text => text.textContent)")
        assert sum(int(label.removesuffix(" B")) for label in labels) == messages * size


@slow
def test_arrow_keys_go_through_all_steps_and_phases(page):
    from selenium.webdriver import Keys

    opened, phases = page("step.html"), []
    steps = opened.value(RUN, 4, 10, "star")["steps"]
    choose(opened, 4, 10, "star")
    opened.value("document.getElementById('step-stage').focus()")
    for i, step in enumerate(steps):
        assert opened.text("#step-text").startswith(step["text"])
        assert opened.text("#step-count") == f"step {i} of {len(steps) - 1}"
        phases += opened.value("[...document.querySelectorAll('#step-through [aria-current]')].map(e => e.innerText)")
        opened.press(Keys.ARROW_RIGHT)
    assert list(dict.fromkeys(phases)) == ["copy", "split", "forward and backward", "allreduce", "update"]
    opened.press(Keys.ARROW_LEFT)
    assert opened.text("#step-count").startswith(f"step {len(steps) - 2} ")


def test_the_memory_of_each_device_is_what_the_paper_says(page):
    opened = page("memory.html")
    bytes_each = [2, 2, 12]  # Adam with mixed precision
    paper = {  # ZeRO (Rajbhandari et al., 2020), table 1: GB per device for 7.5 billion parameters
        1: [120, 120, 120],
        4: [52.5, 41.3, 30],
        16: [35.6, 21.6, 7.5],
        64: [31.4, 16.6, 1.88],
        256: [30.4, 15.4, 0.47],
        1024: [30.1, 15.1, 0.12],
    }
    for devices, wanted in paper.items():
        found = [opened.value("memory(...arguments)", n, 7.5e9, devices, bytes_each) for n in range(4)]
        assert [sum(parts) / 1e9 for parts in found] == pytest.approx([120, *wanted], abs=0.06)
    opened.choose("#memory-network", "7.5 billion parameters")
    opened.choose("#memory-optimizer", "Adam, mixed precision")
    rows = "[...document.querySelectorAll('#memory tr:has(th[scope=row])')].map(row => row.innerText.split('\\t'))"
    assert [row[-1] for row in opened.value(rows)] == ["120 GB", "52.5 GB", "41.3 GB", "30 GB"]  # on 4 devices


CLUSTER = {  # a cluster, described by numbers that are not round
    **{"parameters": 1.3e6, "bytes": 4, "flop": 3.1e8, "batch": 96, "perDevice": False, "devices": 2, "flops": 2.7e11},
    **{"fixed": 0.0017, "python": 0.0009, "allreduce": "ring", "bandwidth": 1.2e9, "latency": 3.3e-5},
    **{"cores": 4, "slowdown": 0.09},
}
MEASURED = "Object.entries(pays.MEASURED).map(([name, {terms, fitted, heldOut}]) => [name, terms, fitted, heldOut])"


@pytest.fixture
def pays(page):
    return page("pays.html")


def predicted(pays, **changes):
    """{part: seconds}, and the seconds of the step."""
    found = pays.value("pays.predict(arguments[0])", {**CLUSTER, **changes})
    assert sum(found["parts"].values()) == pytest.approx(found["step"])
    return found["parts"], found["step"]


def test_predictions_are_as_close_to_measurements_not_used_for_the_fit_as_the_page_says(pays):
    rows = [row for row in pays.value("pays.compared()") if row["heldOut"]]
    measured = [[name, *point] for name, _, _, held_out in pays.value(MEASURED) for point in held_out]
    assert [[row["fit"], row["devices"], row["batch"], row["ms"]] for row in rows] == measured
    found = [1000 * pays.value("pays.predict(arguments[0])", row["settings"])["step"] / row["ms"] - 1 for row in rows]
    page = (ROOT / "docs/second-device.md").read_text()
    [said] = re.findall(r"(\d+)\s+more\s+measurements.*median\s+(\d+)%,\s+at\s+most\s+(\d+)%", page, re.DOTALL)
    errors = 100 * np.abs(found)
    assert [*map(int, said)] == [len(errors), round(np.median(errors)), round(max(errors))]


def test_the_terms_are_fitted_to_the_other_measurements(pays):
    for name, terms, fitted, held_out in pays.value(MEASURED):
        assert not {tuple(point[:2]) for point in fitted} & {tuple(point[:2]) for point in held_out}
        rows = np.array([cost_model.step_row(contexts, batch, cores=2) for contexts, batch, _ in fitted], float)
        assert terms == pytest.approx(cost_model.fit(rows, np.array([ms for *_, ms in fitted])), rel=1e-3), name


@slow
@pytest.mark.parametrize("kind", ALLREDUCES)
@pytest.mark.parametrize("bytes_each", [4, 2])
def test_an_allreduce_takes_as_long_as_its_rounds(pays, kind, bytes_each):
    for devices in (1, 2, 3, 5, 8, 63, 64, 65):
        rounds, _, part = ALLREDUCES[kind](devices)
        message = bytes_each * CLUSTER["parameters"] * part / CLUSTER["bandwidth"]
        parts, step = predicted(pays, allreduce=kind, devices=devices, bytes=bytes_each)
        assert parts["allreduce"] == pytest.approx(rounds * (CLUSTER["latency"] + message)), devices
        alone = CLUSTER["fixed"] + math.ceil(CLUSTER["batch"] / devices) * CLUSTER["flop"] / CLUSTER["flops"]
        assert step == pytest.approx(alone + parts["allreduce"]), devices


@slow
def test_a_slider_and_its_field_change_each_other_and_the_prediction(pays):
    from selenium.webdriver import Keys

    pays.driver.find_element("id", "pays-devices-slider").send_keys(Keys.ARROW_RIGHT)
    assert pays.value("pays.current().devices") == 4
    assert pays.driver.find_element("id", "pays-devices").get_attribute("value") == "4"
    pays.driver.find_element("id", "pays-batch").send_keys(Keys.CONTROL, "a", Keys.NULL, "77")
    assert pays.value("pays.current().batch") == 77
    assert len(pays.driver.find_elements("css selector", "#pays .compute[width]")) == 5  # for one device, and for four


def test_the_pages_load_nothing():
    for path in (ROOT / "docs/interactive").glob("*.html"):
        assert not re.search(r"\bsrc=|\bhref=|@import|url\((?!#)|fetch\(|import\(|XMLHttp", path.read_text()), path
