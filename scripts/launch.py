#!/usr/bin/env python
"""Train in several processes on this machine: `python scripts/launch.py --help`."""

import runpy
from pathlib import Path

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).with_name("start.py")))["start"]("launch")
