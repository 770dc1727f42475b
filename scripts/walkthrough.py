#!/usr/bin/env python
"""Show what each device has during a training step: `python scripts/walkthrough.py --help`."""

from start import start

if __name__ == "__main__":
    start("walkthrough")
