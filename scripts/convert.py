#!/usr/bin/env python
"""Convert a network to files for Gluon, PyTorch or ONNX Runtime: `python scripts/convert.py --help`."""

from start import start

if __name__ == "__main__":
    start("convert")
