#!/usr/bin/env python
"""What this machine can run, and what to do about what it cannot: `python scripts/doctor.py --help`."""

from start import start

if __name__ == "__main__":
    start("doctor")
