#!/usr/bin/env python
"""Measure the training step beside the notebook's own code: `python scripts/bench.py --help`."""

from gluon_mgpu.cli import bench

if __name__ == "__main__":
    bench()
