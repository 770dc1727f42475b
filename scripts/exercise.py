#!/usr/bin/env python
"""Automatically checked exercises on data parallelism: `python scripts/exercise.py --help`."""

import runpy
from pathlib import Path

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).with_name("start.py")))["start"]("exercise")
