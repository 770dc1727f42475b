"""What several tests of conversions need."""

import importlib.util

import pytest

from gluon_mgpu import convert


def needs(to):
    packages = convert.TARGETS[to].PACKAGES
    return pytest.mark.skipif(
        not all(map(importlib.util.find_spec, packages)), reason=f"waits for pip install {' '.join(packages)}"
    )


TARGETS = GLUON, PYTORCH, ONNX = [pytest.param(to, marks=needs(to)) for to in convert.TARGETS]
