#!/usr/bin/env python
"""Show the accuracy of a run, classify images, or export the network: `python scripts/evaluate.py --help`."""

from start import start

if __name__ == "__main__":
    start("evaluate")
