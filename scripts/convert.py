#!/usr/bin/env python
"""Convert a network to files for Gluon, PyTorch or ONNX Runtime: `python scripts/convert.py --help`."""

import runpy
from pathlib import Path

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).with_name("start.py")))["start"]("convert")
