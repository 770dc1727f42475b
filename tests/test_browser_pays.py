"""Does a second device pay? The page's predictions agree with measurements and with bench/model.py, and a reader can
use it with the keyboard and on a phone."""

import importlib
import math
import re
from pathlib import Path

import numpy as np
import pytest
from bench import model

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs/second-device.md"
WAYS = {"star": "star", "tree": "tree", "ring": "ring", "servers": "PS"}  # the page's name: bench/model.py's
SETTINGS = {  # of a cluster: numbers that are not round
    **{"parameters": 1.3e6, "flop": 3.1e8, "batch": 96, "perDevice": False, "devices": 2, "flops": 2.7e11},
    **{"fixed": 0.0017, "python": 0.0009, "allreduce": "ring", "bandwidth": 1.2e9, "latency": 3.3e-5},
    **{"cores": 4, "slowdown": 0.09},
}
MEASURED = "Object.entries(pays.MEASURED).map(([name, {terms, fitted, heldOut}]) => [name, terms, fitted, heldOut])"


@pytest.fixture
def pays(page):
    return page("pays.html")


def predicted(pays, **changes):
    """{part: seconds}, and the seconds of the step."""
    found = pays.value("pays.predict(arguments[0])", {**SETTINGS, **changes})
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
        rows = np.array([row(contexts, batch, cores=2) for contexts, batch, _ in fitted], float)
        assert terms == pytest.approx(model.fit(rows, np.array([ms for *_, ms in fitted])), rel=1e-3), name


def row(contexts, batch_size, cores):
    """The cost model's factors, and the first one again if no core is free."""
    fixed, *others = model.step_row(contexts, batch_size, cores)
    return [fixed, fixed * (contexts >= cores), *others]


@pytest.mark.parametrize("devices, cores", [(1, 2), (2, 2), (3, 4), (8, 2), (16, 16)])
def test_contexts_on_shared_cores_take_as_long_as_in_the_cost_model(pays, devices, cores):
    _, step = predicted(pays, allreduce="memory", devices=devices, cores=cores)
    example = 1000 * SETTINGS["flop"] / SETTINGS["flops"]
    terms = [1000 * SETTINGS["fixed"], 1000 * SETTINGS["python"], example, SETTINGS["slowdown"] * example]
    assert 1000 * step == pytest.approx(np.dot(row(devices, SETTINGS["batch"], cores), terms))


@pytest.mark.parametrize("way", WAYS)
def test_an_allreduce_takes_as_long_as_in_the_cost_model(pays, way):
    for devices in (1, 2, 3, 5, 8, 63, 64, 65, 4096):
        parts, step = predicted(pays, allreduce=way, devices=devices)
        link = SETTINGS["latency"], SETTINGS["bandwidth"]
        wanted = model.allreduce_seconds(WAYS[way], devices, 4 * SETTINGS["parameters"], *link)
        assert parts["allreduce"] == pytest.approx(wanted), devices
        alone = SETTINGS["fixed"] + math.ceil(SETTINGS["batch"] / devices) * SETTINGS["flop"] / SETTINGS["flops"]
        assert step == pytest.approx(alone + wanted), devices


@pytest.mark.parametrize("way", ["star", "tree"])
def test_every_message_of_the_timeline_has_a_sender_and_a_receiver(pays, way):
    for devices in (2, 3, 7, 8, 9):
        spans = [pays.value("pays.busy(...arguments)", way, devices, i) for i in range(devices)]
        slots = model.CLUSTER[way](devices)[0]
        starts = [round(start * slots) for of_it in spans for start, _ in of_it]
        assert all(start * slots == pytest.approx(round(start * slots)) for of_it in spans for start, _ in of_it)
        assert all(len({round(s * slots) for s, _ in of_it}) == len(of_it) for of_it in spans)  # one at a time
        assert sorted(set(starts)) == [*range(slots)] and all(starts.count(slot) % 2 == 0 for slot in range(slots))
        assert len(starts) == 4 * (devices - 1)  # devices - 1 messages each way, each of which keeps two devices busy


def test_devices_do_not_divide_an_example(pays):
    for examples, devices, one_after_another in [(8, 8, 1), (8, 4096, 1), (9, 8, 2), (10, 4, 3)]:
        parts, _ = predicted(pays, batch=examples, devices=devices)
        assert parts["compute"] == pytest.approx(one_after_another * SETTINGS["flop"] / SETTINGS["flops"])
        parts, _ = predicted(pays, batch=examples, devices=devices, allreduce="memory", cores=2)
        assert parts["compute"] == pytest.approx(examples / 2 * SETTINGS["flop"] / SETTINGS["flops"])
    pays.choose("#pays-link", "ethernet10")
    pays.choose("#pays-devices", 4)
    for examples, shards in [(10, [3, 3, 2, 2]), (3, [1, 1, 1, 0])]:
        pays.choose("#pays-batch", examples)
        widths = pays.value("[...document.querySelectorAll('#pays .compute[width]')].map(e => e.width.baseVal.value)")
        assert np.array(widths[1:]) / widths[0] == pytest.approx(np.array(shards) / examples, abs=1e-3)


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
    assert len(pays.driver.find_elements("css selector", "#pays .compute[width]")) == 5  # one device, and four


def test_a_value_that_is_not_valid_changes_nothing(pays):
    before = pays.value("pays.current()")
    for value in ("", "-1", "0", "1e99"):
        pays.choose("#pays-flops", value)
        assert pays.value("pays.current()") == before and pays.value("document.querySelector('#pays-flops').value")


def test_the_page_loads_nothing():
    text = (ROOT / "docs/interactive/pays.html").read_text()
    assert not re.search(r"\bsrc=|\bhref=|@import|url\(|fetch\(|import\(|XMLHttp", text)
