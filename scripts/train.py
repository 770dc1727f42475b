#!/usr/bin/env python
"""Train LeNet or ResNet-18 on one or several devices: `python scripts/train.py --help`."""

import runpy
from pathlib import Path

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).with_name("start.py")))["start"]("train")
