#!/usr/bin/env python
"""Run a program or notebook that was written for MXNet 1.x: `python scripts/run.py --help`."""

from start import start

if __name__ == "__main__":
    start("run")
