#!/usr/bin/env python
"""Check what this machine can run: `python scripts/doctor.py --help`."""

import runpy
from pathlib import Path

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).with_name("start.py")))["start"]("doctor")
