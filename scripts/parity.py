#!/usr/bin/env python
"""Compare this project with what the notebooks printed: `python scripts/parity.py --help`."""

from start import start

if __name__ == "__main__":
    start("parity")
