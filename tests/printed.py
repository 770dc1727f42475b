"""Reads what programs and commands print and draw."""

import io
import re

import matplotlib.image
import numpy as np
import pytest


def call(capture, command, *words, program="gluon-mgpu"):
    """(exit status, standard output, standard error) of a command, called in this process."""
    with pytest.raises(SystemExit) as ended:
        command.main([*map(str, words)], prog_name=program)
    return (ended.value.code, *capture.readouterr())


def error(capture, command, *words, status=2):
    """The error of a command that fails: one line on standard error, and nothing on standard output."""
    found, out, err = call(capture, command, *words)
    assert (found, out, err.count("\n")) == (status, "", 1), err
    assert err.startswith("error: ")
    return err.removeprefix("error: ")


def arrays(text):
    """[(array, context)] of the NDArrays printed in a text."""
    found = []
    for numbers, shape, context in re.findall(r"(^\[[^<]*)<NDArray ([\dx]+) @(\w+\(\d+\))>", text, re.M):
        values = np.array(re.sub(r"[\[\]]", " ", numbers).split(), float)
        found.append((values.reshape([int(n) for n in shape.split("x")]), context))
    return found


def pixels(draw, *drawn):
    """The pixels (height, width, 3) of the PNG that draw(*drawn, file) writes. Nothing may be cut off at an edge."""
    file = io.BytesIO()
    draw(*drawn, file)
    file.seek(0)
    found = matplotlib.image.imread(file)[..., :3]
    for edge in (found[0], found[-1], found[:, 0], found[:, -1]):
        assert (edge == 1).all()
    return found


def of_color(found, color):
    """Which pixels have a color, such as "dbe7f3"."""
    return (np.abs(found - np.array([*bytes.fromhex(color)]) / 255) < 0.01).all(axis=-1)
