"""The networks that can be trained with Gluon, by name.

To train your own network: `registry.register("mlp", build)`, then `train("highlevel", model="mlp")`.
CONTRIBUTING.md explains how to add a network to the command line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import mxnet as mx
from mxnet import gluon

from gluon_mgpu import networks
from gluon_mgpu.support.errors import UsageError

LENET_NAMES = ("W1", "b1", "W2", "b2", "W3", "b3", "W4", "b4")  # names of LeNet's arrays in checkpoints


class Registered(NamedTuple):
    build: Callable[[], gluon.Block]  # returns a new network, not yet initialized
    init: mx.init.Initializer | None = None  # for the weights; None: the lesson's
    names: tuple[str, ...] = ()  # names of the arrays in checkpoints; (): Gluon's names


NETWORKS: dict[str, Registered] = {}


def register(
    name: str, build: Callable[[], gluon.Block], init: mx.init.Initializer | None = None, names: tuple[str, ...] = ()
) -> None:
    """Make a network available as `model=name`, for training and for all code that loads the network's runs.

    build: returns a new, uninitialized network. It gets the images of the data set, such as (n, 1, 28, 28) with values
    in [0, 1], and returns a score per class, (n, 10). init: the initializer for its weights; default: the lesson's,
    normal(0, 0.01). names: the names of its arrays in checkpoints; default: Gluon's names. Raises UsageError for the
    name "lenet", which is the lesson's own network.
    """
    if name == "lenet":
        raise UsageError("name", name, "the lesson's own network; use another name, or a changed copy of highlevel.py")
    NETWORKS[name] = Registered(build, init, names)


def get(name: str) -> Registered | None:
    """The network that is registered with this name; None for "lenet", the lesson's own network."""
    if name != "lenet" and name not in NETWORKS:
        known = ", ".join(["lenet", *NETWORKS])
        raise UsageError("model", name, f"must be one of {known}, or registered: see registry.register")
    return NETWORKS.get(name)


register("lenet-max", networks.lenet_max, mx.init.Uniform(0.07), LENET_NAMES)
register("resnet18", networks.resnet18)
