#!/usr/bin/env python
"""Show the accuracy of a run, classify images, or export the network: `python scripts/evaluate.py --help`."""

import runpy
from pathlib import Path

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).with_name("start.py")))["start"]("evaluate")
