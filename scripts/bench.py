#!/usr/bin/env python
"""Measure the training step beside the notebook's own code: `python scripts/bench.py --help`."""

from start import start

if __name__ == "__main__":
    start("bench")
