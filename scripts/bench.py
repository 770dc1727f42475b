#!/usr/bin/env python
"""Measure the training step, allreduce, scaling and more: `python scripts/bench.py --help`."""

from start import start

if __name__ == "__main__":
    start("bench", "bench.cli")
