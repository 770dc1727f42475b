#!/usr/bin/env python
"""What a run has learned: `python scripts/evaluate.py --help`."""

import sys

try:
    from gluon_mgpu.cli import evaluate
except KeyboardInterrupt:
    sys.exit(130)

if __name__ == "__main__":
    evaluate()
