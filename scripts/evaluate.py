#!/usr/bin/env python
"""What a run has learned: `python scripts/evaluate.py --help`."""

from start import start

if __name__ == "__main__":
    start("evaluate")
