#!/usr/bin/env python
"""Run a program or notebook that was written for MXNet 1.x: `python scripts/run.py --help`."""

import runpy
from pathlib import Path

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).with_name("start.py")))["start"]("run")
