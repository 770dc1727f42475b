#!/usr/bin/env python
"""Exercises on data parallelism that check the answer: `python scripts/exercise.py --help`."""

from start import start

if __name__ == "__main__":
    start("exercise")
