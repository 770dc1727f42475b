#!/usr/bin/env python
"""Check what this machine can run: `python scripts/doctor.py --help`."""

from start import start

if __name__ == "__main__":
    start("doctor")
