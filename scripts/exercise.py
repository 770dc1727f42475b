#!/usr/bin/env python
"""Exercises on data parallelism with automatic checks: `python scripts/exercise.py --help`."""

import runpy
from pathlib import Path

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).with_name("start.py")))["start"]("exercise")
