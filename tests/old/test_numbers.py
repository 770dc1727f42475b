"""`gluon-mgpu run` prints the numbers that the program printed in its time, in a stock environment with GPUs.

The stock environment is the one that `run` makes, with Python alone.
"""

import sys
from pathlib import Path

import pytest
from runs import finished

from gluon_mgpu.old import environment

FILE = Path(__file__).with_name("old_numbers.py")


@pytest.mark.slow
def test_the_numbers_are_those_of_stock(tmp_path, stock):
    options = {"cwd": tmp_path, "timeout": 900, "env": {**stock, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}}
    run = finished(sys.executable, "-m", "gluon_mgpu", "run", "--cpu", FILE, "gpu", **options)
    python = finished(environment.find_or_make(cpu=True), FILE, "cpu", **options)
    assert (run.returncode, python.returncode) == (0, 0), run.stderr + python.stderr
    assert run.stdout == python.stdout and run.stdout.count("== ") == 12
