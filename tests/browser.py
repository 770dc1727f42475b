"""Controls pages of the website in headless Chromium. The fixture `page` opens them."""

import shutil
from pathlib import Path

import pytest

INTERACTIVE = Path(__file__).parents[1] / "docs/interactive"


@pytest.fixture(scope="session")
def chromium():
    """Start a headless Chromium. Skips the test if the library, the browser or its driver is missing."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is missing: pip install -e '.[browser]'")
    programs = [shutil.which("chromium"), shutil.which("chromedriver")]
    if None in programs:
        pytest.skip("chromium or chromedriver is missing: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location, driver_program = programs
    for flag in ["headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "hide-scrollbars"]:
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(driver_program))
    try:
        yield driver
    finally:
        driver.quit()


class Page:
    """One open page. driver: Selenium's, for everything that has no method here. width: the window's, in pixels."""

    def __init__(self, driver, path, width=1280):
        self.driver, self.width = driver, width
        screen = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 640}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        driver.get(path.as_uri())

    def value(self, expression, *args):
        """The value of a JavaScript expression, in which args are arguments[0], arguments[1], ..."""
        return self.driver.execute_script(f"return {expression}", *args)

    def text(self, selector):
        """The text that is visible in the first element that matches the selector."""
        return self.value("document.querySelector(arguments[0]).innerText", selector)

    def click(self, selector):
        self.driver.find_element("css selector", selector).click()

    def choose(self, selector, value):
        """Set a form element to a value, as a reader would."""
        script = "const e = document.querySelector(arguments[0]); e.value = arguments[1];"
        events = "for (const type of ['input', 'change']) e.dispatchEvent(new Event(type, {bubbles: true}));"
        self.driver.execute_script(script + events, selector, str(value))

    def press(self, key):
        """Press a key, such as selenium's Keys.TAB, wherever the focus is."""
        self.driver.switch_to.active_element.send_keys(key)

    def overflow(self):
        """By how many pixels the document is wider than the window."""
        return self.value("document.documentElement.scrollWidth") - self.width


@pytest.fixture
def page(chromium):
    """page("step.html") opens docs/interactive/step.html in a browser, as a `Page`.

    The test fails if the page writes an error to the console, or does not catch an exception.
    """
    yield lambda name: Page(chromium, INTERACTIVE / name)
    assert not [entry["message"] for entry in chromium.get_log("browser") if entry["level"] == "SEVERE"]
