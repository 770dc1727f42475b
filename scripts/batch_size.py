#!/usr/bin/env python
"""Compare batch sizes on one and two devices: `python scripts/batch_size.py --help`."""

import runpy
from pathlib import Path

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).with_name("start.py")))["start"]("batch_size")
