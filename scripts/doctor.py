#!/usr/bin/env python
"""What this machine can run, and what to do about what it cannot: `python scripts/doctor.py --help`."""

import sys

try:
    from gluon_mgpu.doctor import doctor
except KeyboardInterrupt:
    sys.exit(130)

if __name__ == "__main__":
    doctor()
