#!/usr/bin/env python
"""Show what each device holds during a training step: `python scripts/walkthrough.py --help`."""

import runpy
from pathlib import Path

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).with_name("start.py")))["start"]("walkthrough")
