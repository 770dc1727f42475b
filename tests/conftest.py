import shutil
import signal
import subprocess
import sys
from pathlib import Path

import browser
import pytest

import gluon_mgpu

OF_THEIR_OWN_TARGETS = ("faults", "network", "cuda_wheels", "notebooks")  # markers: run only where -m names them

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "scripts"))  # for `import bench` and `import parity`

gluon_mgpu.configure(contexts=5)  # before any test module imports mxnet

# A shell script starts background jobs with SIGINT ignored, and child processes would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config, items):
    left_out = [
        item
        for item in items
        if any(mark in item.keywords and mark not in config.option.markexpr for mark in OF_THEIR_OWN_TARGETS)
    ]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """The package's wheel. It is built from a copy, because a build writes to the source folder."""
    folder = tmp_path_factory.mktemp("wheel")
    omitted = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "runs")
    shutil.copytree(ROOT, folder / "source", ignore=omitted)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder]
    subprocess.run([*pip, folder / "source"], cwd=folder, check=True)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="session")
def chromium():
    with browser.chromium() as driver:
        yield driver


@pytest.fixture
def page(chromium):
    """page("step.html", width=390, dark=True) opens docs/interactive/step.html in a browser, as a `browser.Page`.

    The test fails if the page writes an error to the console.
    """

    def opened(name, width=1280, dark=False):
        return browser.Page(chromium, browser.INTERACTIVE / name, width, dark)

    yield opened
    assert not browser.errors(chromium)
