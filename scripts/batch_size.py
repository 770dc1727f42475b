#!/usr/bin/env python
"""Compare batch sizes on one and two devices: `python scripts/batch_size.py --help`."""

from start import start

if __name__ == "__main__":
    start("batch_size")
