#!/usr/bin/env python
"""Measure the training step, allreduce, scaling and more: `python scripts/bench.py --help`."""

import runpy
from pathlib import Path

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).with_name("start.py")))["start"]("bench", "bench.cli")
