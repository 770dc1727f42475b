#!/usr/bin/env python
"""Train LeNet on one or several devices: `python scripts/train.py --help`."""

from start import start

if __name__ == "__main__":
    start("train")
