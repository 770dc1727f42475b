#!/usr/bin/env python
"""Exercises on data parallelism with automatic checks: `python scripts/exercise.py --help`."""

from start import start

if __name__ == "__main__":
    start("exercise")
