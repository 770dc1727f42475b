#!/usr/bin/env python
"""Show what a run has learned: `python scripts/evaluate.py --help`."""

from start import start

if __name__ == "__main__":
    start("evaluate")
