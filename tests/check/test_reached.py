"""Which lines and conditions of the user's functions were not reached."""

import linecache

import pytest

from gluon_mgpu.check import reached
from gluon_mgpu.support.programs import execute

SOURCE = """
def step(numbers):
    total = 0
    for x in numbers:
        if x < 0:
            continue
        if x != x:
            raise ValueError("not a number")
        if x > 9:
            total += 9
        else:
            total += x
    assert total >= 0, (
        "negative")
    return min(total, 99) if total > 98 else total
"""


def missed(step, *calls):
    done = reached.Done()
    with reached.traced(done):
        for numbers in calls:
            step(numbers)
    return reached.missed(done)


@pytest.fixture(params=["file", "cell"])
def step(request, tmp_path):
    file = tmp_path / "step.py"
    if request.param == "file":
        file.write_text(SOURCE)
        return execute("step", str(file)).step
    linecache.cache[str(file)] = len(SOURCE), None, SOURCE.splitlines(True), str(file)
    variables = {}
    exec(compile(SOURCE, str(file), "exec"), variables)
    return variables["step"]


def test_lines_and_conditions_that_were_not_reached_are_named_but_no_errors(step):
    assert missed(step, [1]) == [
        "line 10",
        "the other branch of the condition in line 5",
        "the other branch of the condition in line 15",
    ]
    assert missed(step, [1, 10, -1], [9] * 12) == []
