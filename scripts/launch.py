#!/usr/bin/env python
"""Train in several processes on this machine: `python scripts/launch.py --help`."""

from start import start

if __name__ == "__main__":
    start("launch")
