"""What the user's objects and functions lead to."""

import functools
import site
from collections import UserDict, deque
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

from gluon_mgpu.support import programs
from gluon_mgpu.support.reachable import name_of, reachable

counter = ["a global variable"]


@dataclass
class Trainer:
    moments: list = field(default_factory=lambda: ["a moment"])
    limit = ["an attribute of the class"]

    def step(self):
        return counter


class WithSlots:
    __slots__ = "value"

    def __init__(self):
        self.value = ["in a slot"]


def names(value):
    return {found: name_of(path) for path, found in reachable([((), value)]) if isinstance(found, str)}


def closure():
    inner = ["in a closure"]

    @functools.wraps(closure)
    def function(default=("a default",)):
        return inner

    return function


def test_each_kind_of_object_is_searched_and_named_as_in_python():
    nest = {"x": [0, ("in a nest",)], 1: deque(["in a deque"]), "user": UserDict(y="in a UserDict")}
    found = names({"nest": nest, "trainer": Trainer(), "slots": WithSlots(), "space": SimpleNamespace(z="in a space")})
    assert {text: found[text] for text in found if not text.startswith("step")}.items() >= {
        "in a nest": "nest.x[1][0]",
        "in a deque": "nest[1][0]",
        "in a UserDict": "nest.user.data.y",
        "a moment": "trainer.moments[0]",
        "an attribute of the class": "trainer.limit[0]",
        "a global variable": "trainer.step.counter[0]",
        "in a slot": "slots.value[0]",
        "in a space": "space.z",
    }.items()
    of_partial = names(functools.partial(closure(), Trainer().step))
    assert {"in a closure", "a default", "a moment", "a global variable"} <= {*of_partial}


def test_only_files_inside_the_folders_of_libraries_are_theirs():
    installed, beside = Path(site.getusersitepackages(), "torch/nn.py"), f"{programs.PACKAGE}_answers/step.py"
    assert str(installed).startswith(programs.LIBRARIES) and not beside.startswith(programs.LIBRARIES)


def test_an_object_comes_once_with_its_shortest_path():
    shared, loop = ["shared"], []
    loop.append(loop)
    found = [name_of(path) for path, value in reachable([((), {"deep": [[shared]], "near": shared, "loop": loop})])]
    assert "near" in found and "deep[0][0]" not in found and found.count("loop") == 1
