"""Reads what programs printed."""

import re

import numpy as np


def arrays(text):
    """[(array, context)] of the NDArrays printed in a text."""
    found = []
    for numbers, shape, context in re.findall(r"(^\[[^<]*)<NDArray ([\dx]+) @(\w+\(\d+\))>", text, re.M):
        values = np.array(re.sub(r"[\[\]]", " ", numbers).split(), float)
        found.append((values.reshape([int(n) for n in shape.split("x")]), context))
    return found
