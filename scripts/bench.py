#!/usr/bin/env python
"""Measure the training step beside the notebook's own code: `python scripts/bench.py --help`."""

import sys

try:
    from gluon_mgpu.cli import bench
except KeyboardInterrupt:
    sys.exit(130)

if __name__ == "__main__":
    bench()
