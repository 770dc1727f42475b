"""The interactive pages in a real browser. Their numbers are compared with NumPy's, measurements and cost_model.py."""

import importlib
import math
import re

import cost_model
import numpy as np
import pytest
from runs import ROOT

RUN = "window.stepThrough.run(...arguments)"
SETTINGS = [(1, 3), (2, 8), (3, 10), (4, 10), (5, 16), (6, 5), (7, 7), (8, 16), (8, 3)]  # devices, batch size
KINDS = ["star", "ring", "tree"]
PHASES = ["copy", "split", "forward and backward", "allreduce", "update"]


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


@pytest.mark.parametrize("kind", KINDS)
def test_step_through_computes_and_shows_what_numpy_computes(page, kind):
    opened = page("step.html")
    for devices, batch in SETTINGS:
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


def test_step_through_sends_the_messages_of_each_allreduce(page):
    opened = page("step.html")
    for devices, batch in SETTINGS[1:]:
        gradient = 4 * devices  # bytes: one float32 parameter per device
        expected = {  # rounds, messages, bytes of each
            "star": (2 * (devices - 1), 2 * (devices - 1), gradient),
            "ring": (2 * (devices - 1), 2 * (devices - 1) * devices, gradient / devices),
            "tree": (2 * math.ceil(math.log2(devices)), 2 * (devices - 1), gradient),
        }
        for kind, (rounds, messages, size) in expected.items():
            trace = opened.value(RUN, devices, batch, kind)
            sent = [step["messages"] for step in of_phase(trace, "allreduce")]
            assert (trace["rounds"], len(sent), sum(map(len, sent))) == (rounds, rounds, messages)
            assert {message["bytes"] for round in sent for message in round} == {size}
            end = trace["steps"][-1]
            assert end["bytes"]["devices"] == messages * size
            assert sum(moved for link, moved in end["links"].items() if "host" not in link) == messages * size
            choose(opened, devices, batch, kind)
            [row] = opened.value("[...document.querySelectorAll('.chosen')].map(row => row.innerText.split('\\t'))")
            assert row == [kind, *(f"{value:.0f}" for value in (rounds, messages, messages * size, rounds * size))]
            go(opened, len(trace["steps"]))
            labels = opened.value("[...document.querySelectorAll('#step-links > text')].map(text => text.textContent)")
            assert sum(int(label.removesuffix(" B")) for label in labels) == messages * size
            for round in sent:  # a device sends and receives at most one message per round
                assert all(len({message[end] for message in round}) == len(round) for end in ("from", "to"))


def test_step_through_works_with_the_keyboard(page):
    from selenium.webdriver.common.keys import Keys

    opened = page("step.html")
    order, phases = [], []
    jumps = [f"phase-{phase}" for phase in ("copy", "split", "forward", "allreduce", "update")]
    names = ["devices", "batch", "kind", *jumps, "stage", "back", "next", "reset"]
    for _ in names:
        opened.press(Keys.TAB)
        order.append(opened.focused())
    assert order == [f"step-{name}" for name in names]
    assert opened.value("getComputedStyle(document.activeElement).outlineStyle") != "none"
    steps = opened.value(RUN, 4, 10, "star")["steps"]
    [backward] = of_phase({"steps": steps}, "backward")
    assert opened.text("#step-text") == backward["text"]  # a step with numbers is shown at first
    opened.value("document.getElementById('step-reset').click()")
    opened.value("document.getElementById('step-stage').focus()")
    for i, step in enumerate(steps):
        assert opened.text("#step-text").startswith(step["text"])
        assert opened.text("#step-count") == f"step {i} of {len(steps) - 1}"
        phases += opened.value("[...document.querySelectorAll('#step-through [aria-current]')].map(e => e.innerText)")
        opened.press(Keys.ARROW_RIGHT)
    assert list(dict.fromkeys(phases)) == PHASES
    opened.press(Keys.ARROW_LEFT)
    assert opened.text("#step-count").startswith(f"step {len(steps) - 2} ")
    for button, step in (("next", len(steps) - 1), ("back", len(steps) - 2), ("reset", 0), ("phase-allreduce", 5)):
        opened.value(f"document.getElementById('step-{button}').focus()")
        opened.press(Keys.ENTER)
        assert opened.text("#step-count").startswith(f"step {step} ") and opened.focused() == f"step-{button}"


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


DOCS = ROOT / "docs/second-device.md"
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


def test_predictions_are_within_15_percent_of_measurements_that_were_not_used_for_the_fit(pays):
    rows = [row for row in pays.value("pays.compared()") if row["heldOut"]]
    measured = [[name, *point] for name, _, _, held_out in pays.value(MEASURED) for point in held_out]
    assert [[row["fit"], row["devices"], row["batch"], row["ms"]] for row in rows] == measured
    assert len({tuple(point[:3]) for point in measured}) >= 12
    for row in rows:
        step = pays.value("pays.predict(arguments[0])", row["settings"])["step"]
        assert 1000 * step == pytest.approx(row["ms"], rel=0.15), row


def test_the_table_in_the_docs_has_the_errors_of_the_page(pays):
    errors = {}
    for row in pays.value("pays.compared()"):
        if row["heldOut"]:
            errors.setdefault(row["fit"], []).append(abs(row["error"]))
    rows = re.findall(r"^\| (.*) \| (\d+) \| ([\d.]+)% \| ([\d.]+)% \|$", DOCS.read_text(), re.MULTILINE)
    wanted = [(name, str(len(e)), f"{100 * np.median(e):.1f}", f"{100 * max(e):.1f}") for name, e in errors.items()]
    assert rows == wanted


def test_the_terms_are_fitted_to_the_other_measurements(pays):
    for name, terms, fitted, held_out in pays.value(MEASURED):
        assert not {tuple(point[:2]) for point in fitted} & {tuple(point[:2]) for point in held_out}
        rows = np.array([cost_model.step_row(contexts, batch, cores=2) for contexts, batch, _ in fitted], float)
        assert terms == pytest.approx(cost_model.fit(rows, np.array([ms for *_, ms in fitted])), rel=1e-3), name


@pytest.mark.parametrize("devices, cores", [(1, 2), (2, 2), (3, 4), (8, 2), (16, 16)])
def test_contexts_on_shared_cores_take_as_long_as_in_the_cost_model(pays, devices, cores):
    _, step = predicted(pays, allreduce="memory", devices=devices, cores=cores)
    example = 1000 * CLUSTER["flop"] / CLUSTER["flops"]
    terms = [1000 * CLUSTER["fixed"], 1000 * CLUSTER["python"], example, CLUSTER["slowdown"] * example]
    assert 1000 * step == pytest.approx(np.dot(cost_model.step_row(devices, CLUSTER["batch"], cores), terms))


@pytest.mark.parametrize("way", cost_model.ROUNDS)
def test_an_allreduce_takes_as_long_as_in_the_cost_model(pays, way):
    for devices in (1, 2, 3, 5, 8, 63, 64, 65):
        parts, step = predicted(pays, allreduce=way, devices=devices)
        link = CLUSTER["latency"], CLUSTER["bandwidth"]
        wanted = cost_model.allreduce_seconds(way, devices, 4 * CLUSTER["parameters"], *link)
        assert parts["allreduce"] == pytest.approx(wanted), devices
        half = cost_model.allreduce_seconds(way, devices, 2 * CLUSTER["parameters"], *link)
        assert predicted(pays, allreduce=way, devices=devices, bytes=2)[0]["allreduce"] == pytest.approx(half)
        alone = CLUSTER["fixed"] + math.ceil(CLUSTER["batch"] / devices) * CLUSTER["flop"] / CLUSTER["flops"]
        assert step == pytest.approx(alone + wanted), devices


def test_every_control_can_be_reached_and_changed_with_the_keyboard(pays):
    keys = importlib.import_module("selenium.webdriver").Keys
    controls = pays.driver.find_elements("css selector", "#pays input, #pays select")
    visible, reached = [control.get_attribute("id") for control in controls if control.is_displayed()], []
    for _ in visible:
        pays.press(keys.TAB)
        reached.append(pays.focused())
    assert reached == visible and len(visible) > 15
    pays.driver.find_element("id", "pays-devices-slider").send_keys(keys.ARROW_RIGHT)
    assert pays.value("pays.current().devices") == 4
    assert pays.driver.find_element("id", "pays-devices").get_attribute("value") == "4"
    pays.driver.find_element("id", "pays-batch").send_keys(keys.CONTROL, "a", keys.NULL, "77")
    assert pays.value("pays.current().batch") == 77
    assert len(pays.driver.find_elements("css selector", "#pays .compute[width]")) == 5  # for one device, and for four


def test_the_page_loads_nothing():
    text = (ROOT / "docs/interactive/pays.html").read_text()
    assert not re.search(r"\bsrc=|\bhref=|@import|url\(|fetch\(|import\(|XMLHttp", text)
