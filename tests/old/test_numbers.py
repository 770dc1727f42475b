"""`gluon-mgpu run` prints the numbers that the program printed in its time, in a stock environment with GPUs.

The stock environment is the one that `run` makes, with Python alone.
"""

import json
import re
import sys
from pathlib import Path

import pytest
from runs import finished

from gluon_mgpu.old import environment

FILE = Path(__file__).with_name("old_numbers.py")
PROGRAMS = re.findall(r"^def (\w+)\(\):$", FILE.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def printed(tmp_path_factory, stock):
    """[{program: what it printed} with `run`, the same as stock]."""
    options = {"cwd": tmp_path_factory.mktemp("programs"), "timeout": 900}
    options["env"] = {**stock, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    run = [sys.executable, "-m", "gluon_mgpu", "run", "--cpu", FILE, "gpu", *PROGRAMS]
    python = [environment.find_or_make(cpu=True), FILE, "cpu", *PROGRAMS]
    both = [finished(*words, **options) for words in (run, python)]
    assert [done.returncode for done in both] == [0, 0], both
    return [json.loads(done.stdout) for done in both]


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_numbers_are_those_of_stock(program, printed):
    by_run, by_python = (texts[program] for texts in printed)
    assert by_run == by_python != ""
