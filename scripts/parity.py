#!/usr/bin/env python
"""Compare this project's results with the notebooks' results: `python scripts/parity.py --help`."""

import runpy
from pathlib import Path

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).with_name("start.py")))["start"]("parity", "parity.cli")
