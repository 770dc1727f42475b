"""Reads what programs and commands print."""

import re

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
