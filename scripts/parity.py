#!/usr/bin/env python
"""Compare this project's results with the notebooks' results: `python scripts/parity.py --help`."""

from start import start

if __name__ == "__main__":
    start("parity")
