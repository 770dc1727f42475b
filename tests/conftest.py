import gc
import os
import signal
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
from browser import chromium, page  # noqa: F401 (fixtures)
from forks import Forks

import gluon_mgpu

OF_THEIR_OWN_TARGETS = ("cuda_wheels", "gpu", "notebooks")  # markers: run only where -m names them
# The files that take longest begin first, so that no process has to wait for one of them at the end.
FIRST = "test_features test_mxnet test_programs test_workers test_exercises test_train test_convert".split()
LONGEST = 3600  # seconds, for tests with these markers and slow tests; pyproject.toml has the limit for all other tests
# Reasons to skip that --no-skips accepts, because no command installs what is missing.
MAY_BE_MISSING = ("needs root", "needs a user", "needs the original notebooks", "needs MXNet 2", "needs aarch64")

ROOT = Path(__file__).parents[1]

sys.modules["scipy.stats"] = None  # for the reason in tests/site/sitecustomize.py, which child processes run
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "tests/site"), os.environ.get("PYTHONPATH")]))
os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")  # tests expect float32; read when CUDA's libraries load
gluon_mgpu.configure(contexts=5)  # before any test module imports mxnet

# A shell script starts background jobs with SIGINT ignored, nohup with SIGHUP, and child processes would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_addoption(parser):
    help = "fail instead of skipping, unless the machine itself lacks something (tests/conftest.py)"
    parser.addoption("--no-skips", action="store_true", help=help)


def pytest_collection_modifyitems(config, items):
    own = [mark for mark in OF_THEIR_OWN_TARGETS if mark not in config.option.markexpr]
    left_out = [item for item in items if any(map(item.get_closest_marker, own))]  # keywords also name folders
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
    items.sort(key=lambda item: FIRST.index(item.path.stem) if item.path.stem in FIRST else len(FIRST))
    for item in items:
        if any(map(item.get_closest_marker, ("slow", *OF_THEIR_OWN_TARGETS))):
            item.add_marker(pytest.mark.timeout(LONGEST))


def pytest_collection_finish():
    gc.freeze()  # each training collects garbage, which need not include all modules


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    return required((yield), item.config)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    return required((yield), collector.config)


def required(report, config):
    """The report. With --no-skips, a skip becomes a failure, unless its reason is in MAY_BE_MISSING."""
    if report.skipped and config.option.no_skips:
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if not reason.startswith(MAY_BE_MISSING):
            report.outcome, report.longrepr = "failed", f"skipped, but --no-skips is set: {reason}"
    return report


@pytest.fixture(scope="session", autouse=True)
def curves():
    """Runs in this process do not draw their curves, which takes longer than to train on a few examples."""
    with patch("matplotlib.figure.Figure.savefig", lambda figure, file, **options: file.write(b"\x89PNG")):
        yield


@pytest.fixture(scope="session")
def pytorch():
    """Runs programs that use PyTorch, as forks."""
    imports = "import numpy, onnx, torch._dynamo, torch.nn.parallel, torch.onnx.symbolic_opset17"
    optional = "import contextlib\nwith contextlib.suppress(ImportError):\n"
    with Forks(f"{optional}    {imports}, safetensors.torch\n") as forks:
        yield forks
