"""The interactive pages in a real browser. Their numbers are compared with NumPy's."""

import math

import browser
import numpy as np
import pytest

RUN = "window.stepThrough.run(...arguments)"
SETTINGS = [(1, 3), (2, 8), (3, 10), (4, 10), (5, 16), (6, 5), (7, 7), (8, 16), (8, 3)]  # devices, batch size
KINDS = ["star", "ring", "tree"]
PHASES = ["copy", "split", "forward and backward", "allreduce", "update"]

WIDER_THAN_ITS_CARD = "[...document.querySelectorAll('.card')].filter(card => card.scrollWidth > card.clientWidth)"


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
        assert len(shown(opened, "w")) == devices + 1  # and one device with the whole batch
        assert np.abs(shown(opened, "w") - updated).max() <= 0.0005  # three decimals
        replicas = np.array([device["params"] for device in update["devices"]])
        assert (replicas == replicas[0]).all() and np.allclose(replicas[0], updated, rtol=1e-12)
        assert trace["oneDevice"]["params"] == list(replicas[0]) and trace["loss"][1] < trace["loss"][0]


def test_step_through_sends_the_messages_of_each_allreduce(page):
    opened = page("step.html")
    for devices, batch in SETTINGS[1:]:
        gradient = 4 * devices  # bytes: as many parameters as devices, float32
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
    for _ in range(9):
        opened.press(Keys.TAB)
        order.append(opened.focused())
    names = ["devices", "batch", "kind", "stage", "back", "next", "reset", "network", "optimizer"]
    assert order == [f"step-{name}" for name in names]
    assert opened.value("getComputedStyle(document.activeElement).outlineStyle") != "none"
    steps = opened.value(RUN, 4, 10, "star")["steps"]
    opened.value("document.getElementById('step-stage').focus()")
    for i, step in enumerate(steps):
        assert opened.text("#step-text").startswith(step["text"])
        assert opened.text("#step-count") == f"step {i} of {len(steps) - 1}"
        phases += opened.value("[...document.querySelectorAll('#step-through [aria-current]')].map(e => e.innerText)")
        opened.press(Keys.ARROW_RIGHT)
    assert list(dict.fromkeys(phases)) == PHASES
    opened.press(Keys.ARROW_LEFT)
    assert opened.text("#step-count").startswith(f"step {len(steps) - 2} ")
    for button, step in (("next", len(steps) - 1), ("back", len(steps) - 2), ("reset", 0)):
        opened.value(f"document.getElementById('step-{button}').focus()")
        opened.press(Keys.ENTER)
        assert opened.text("#step-count").startswith(f"step {step} ") and opened.focused() == f"step-{button}"


@pytest.mark.parametrize("width", [390, 1280])
def test_step_through_fits_the_window(page, width):
    opened = page("step.html", width=width)
    for devices, batch in [(1, 16), (4, 10), (8, 16)]:
        for kind in KINDS:
            choose(opened, devices, batch, kind)
            for _ in opened.value(RUN, devices, batch, kind)["steps"]:
                assert opened.overflow() == 0 and not opened.value(WIDER_THAN_ITS_CARD)
                go(opened, 1)


def test_the_memory_of_each_device_is_what_the_paper_says(page):
    opened = page("step.html")
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
        found = [opened.value("stepThrough.memory(...arguments)", n, 7.5e9, devices, bytes_each) for n in range(4)]
        assert [sum(parts) / 1e9 for parts in found] == pytest.approx([120, *wanted], abs=0.06)
    opened.choose("#step-network", "7.5 billion parameters")
    opened.choose("#step-optimizer", "Adam, mixed precision")
    rows = "[...document.querySelectorAll('#step-memory tr:has(th[scope=row])')].map(row => row.innerText.split('\\t'))"
    assert [row[-1] for row in opened.value(rows)] == ["120 GB", "52.5 GB", "41.3 GB", "30 GB"]  # on 4 devices


@pytest.mark.parametrize(
    "picture", sorted(browser.INTERACTIVE.parent.glob("pictures/*.svg")), ids=lambda path: path.stem
)
def test_diagrams_are_legible_on_a_phone(chromium, picture):
    opened = browser.Page(chromium, picture, 1280, False)
    width = opened.value("document.documentElement.viewBox.baseVal.width")
    texts = "[...document.querySelectorAll('text:not(defs text)')]"
    sizes = opened.value(f"{texts}.map(text => parseFloat(getComputedStyle(text).fontSize))")
    assert len(sizes) > 10 and min(sizes) * 358 / width >= 11  # a window of 390 px leaves 358 px to a picture
    margins = """(text => {
        const box = text.getBoundingClientRect(), card = document.documentElement.getBoundingClientRect();
        return [box.left - card.left, box.top - card.top, card.right - box.right, card.bottom - box.bottom];
    })"""
    assert np.min(opened.value(f"{texts}.map({margins})")) >= 5
