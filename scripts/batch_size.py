#!/usr/bin/env python
"""A second device and a larger batch, the lecture's experiment: `python scripts/batch_size.py --help`."""

from start import start

if __name__ == "__main__":
    start("batch_size")
