#!/usr/bin/env python
"""Train LeNet or ResNet-18 on one or several devices: `python scripts/train.py --help`."""

from start import start

if __name__ == "__main__":
    start("train")
