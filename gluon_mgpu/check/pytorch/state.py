"""What a step in PyTorch can reach and change: the tensors of networks and optimizers, and other arrays and numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer

from gluon_mgpu.check.driver import Arrays
from gluon_mgpu.check.pytorch.tensors import array_of
from gluon_mgpu.support.reachable import Parts, name_of, parts_of, reachable

WRAPPED = ("module", "_orig_mod")  # what DDP and torch.compile wrap
PREFIX = re.compile(rf"(?:^|(?<=\.))(?:{'|'.join(WRAPPED)})\.")  # in the names of parameters
OWN_ATTRIBUTES = {"_parameters", "_buffers", "_modules"}  # of a module; they are found by their names
HOOKS = {"_forward_hooks", "_forward_pre_hooks", "_backward_hooks"}
LEAVES = (Tensor, np.ndarray, Optimizer, nn.Module)


class State:
    """What is found, by name: in what a step is given, in the attributes of its networks, and by its function."""

    def __init__(self, given: Any, function: Callable[..., Any]) -> None:
        self.tensors: dict[str, Tensor] = {}  # parameters, buffers, and what the step is given
        self.others: dict[str, Tensor | np.ndarray] = {}  # arrays in attributes, closures and global variables
        self.numbers: dict[str, float] = {}
        self.optimizers: list[tuple[str, Optimizer]] = []
        self.networks: list[tuple[str, nn.Module]] = []
        self._known: dict[int, Any] = {}  # the arrays
        in_nests = {id(value) for _, value in reachable([((), given)], _in_nests)}
        of_step = [*reachable([((), given)], _in_objects)]
        networks = [((), value) for _, value in of_step if isinstance(value, nn.Module)]
        searched = {id(value) for _, value in of_step if not isinstance(value, nn.Module)}
        elsewhere = [*reachable([*networks, ((), function)], lambda v: () if id(v) in searched else _anywhere(v))]
        found = [(name_of(path), value) for path, value in of_step + elsewhere]
        self._add_networks(found)
        shapes = {a.shape for _, a in [*self.tensors.items(), *found] if isinstance(a, Tensor) and _is_param(a)}
        for i, (name, value) in enumerate(found):
            if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
                is_nested = id(value) in in_nests
                is_copy = i < len(of_step) and not is_nested and value.shape in shapes  # such as a moment
                is_state = is_copy or is_nested and value.numel() > 1 or _is_param(value)
                self._add(self.tensors if is_state else self.others, name, value)
            elif isinstance(value, np.ndarray) and value.dtype.kind == "f":
                self._add(self.others, name, value)
            elif isinstance(value, float):
                self._add(self.numbers, name, value)
            elif isinstance(value, Optimizer) and not any(value is other for _, other in self.optimizers):
                self.optimizers.append((name, value))
        for i, (_, optimizer) in enumerate(self.optimizers):
            for j, p in enumerate(_params(optimizer)):
                self._add(self.tensors, f"optimizer {i}[{j}]", p)

    def _add_networks(self, found: Sequence[tuple[str, Any]]) -> None:
        """Note the networks and their tensors."""
        known = set[int]()
        for root, network in found:
            if isinstance(network, nn.Module) and id(network) not in known:
                known |= {id(module) for module in network.modules()}
                self.networks.append((root, network))
        tensors = [
            (root, path, a)
            for root, network in self.networks
            for path, a in [*network.named_parameters(), *network.named_buffers()]
            if a.is_floating_point() or a.is_complex()
        ]
        for name, a in _named(tensors):
            self._add(self.tensors, name, a)

    def _add(self, to: dict[str, Any], name: str, value: Any) -> None:
        """Note a number, or an array that is not known."""
        if not isinstance(value, float):
            if id(value) in self._known:
                return
            self._known[id(value)] = value
        while name in to:
            name += "'"
        to[name] = value

    @property
    def modules(self) -> list[nn.Module]:
        return [*{id(m): m for _, network in self.networks for m in network.modules()}.values()]

    def named_modules(self) -> dict[str, nn.Module]:
        """The modules by name: of the wrappers of a network, only the innermost."""
        found = [(root, path, m) for root, network in self.networks for path, m in network.named_modules()]
        return {name or type(module).__name__: module for name, module in _named(found)}

    def soft(self) -> list[str]:
        """The tensors that are no parameters or buffers, and that no optimizer updates."""
        own = [a for m in self.modules for a in (*m.parameters(recurse=False), *m.buffers(recurse=False))]
        own += [p for _, optimizer in self.optimizers for p in _params(optimizer)]
        known = {id(a) for a in own} | {id(a) for a in self.tensors.values() if a.requires_grad}
        return [name for name, a in self.tensors.items() if known and id(a) not in known]

    def read(self) -> Arrays:
        """Copies of the tensors in float64, with those that are divided among the processes gathered."""
        return {name: array_of(a) for name, a in self.tensors.items()}

    def of_optimizers(self) -> Arrays:
        """Copies of what the optimizers keep for each parameter."""
        names, found = {id(a): name for name, a in self.tensors.items()}, Arrays()
        for name, optimizer in self.optimizers:
            kept = [
                (names.get(id(p), i), key, value)
                for i, (p, of_p) in enumerate(optimizer.state.items())
                for key, value in of_p.items()
            ]
            found |= {
                f"{name}.state[{p}].{key}": array_of(value) for p, key, value in kept if isinstance(value, Tensor)
            }
        return found

    def marks(self) -> dict[str, Any]:
        """What tells whether the other arrays and the numbers have changed."""
        found = {n: (a, a._version if isinstance(a, Tensor) else float(a.sum())) for n, a in self.others.items()}
        return {**found, **{f"{name} (a number)": x for name, x in self.numbers.items()}}

    def changed(self, before: dict[str, Any]) -> Arrays:
        """The other arrays and numbers that are not as `marks` found them."""
        now, found = self.marks(), dict[str, np.ndarray]()
        for name, x in self.numbers.items():
            if before.get(f"{name} (a number)", x) != x:
                found[f"{name} (a number)"] = np.array(x)
        for name, a in self.others.items():
            old, number = before.get(name, (None, 0))
            if old is not a or number != now[name][1]:
                found[name] = array_of(a)
        return found


def _in_nests(value: Any) -> Parts:
    return parts_of(value) if isinstance(value, (dict, list, tuple)) else ()


def _in_objects(value: Any) -> Parts:
    return () if isinstance(value, LEAVES) else parts_of(value)


def _anywhere(value: Any) -> Parts:
    if isinstance(value, nn.Module):
        return _of_module(value)
    return () if isinstance(value, LEAVES) else parts_of(value, libraries=False)


def _of_module(module: nn.Module) -> Parts:
    """A module's children and attributes; of modules of PyTorch only the hooks."""
    for name, child in module.named_children():
        yield () if name in WRAPPED else (name,), child
    is_torch = type(module).__module__.startswith("torch.")
    for name, value in vars(module).items():
        if name in HOOKS if is_torch else name not in OWN_ATTRIBUTES:
            yield (name,), value


def _is_param(tensor: Tensor) -> bool:
    return tensor.requires_grad and tensor.is_leaf


def _params(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _named(found: Sequence[tuple[str, str, Any]]) -> list[tuple[str, Any]]:
    """The names of what networks have: the path in a network, after the name of the network if there are several.

    found: (name of the network, path, value); a value may come several times.
    """
    unique = dict[int, tuple[str, str, Any]]()
    for root, path, value in found:
        unique.setdefault(id(value), (root, PREFIX.sub("", f"{path}.")[:-1], value))
    is_one = len({root for root, *_ in unique.values()}) == 1
    return [(path if is_one else f"{root}.{path}".strip("."), value) for root, path, value in unique.values()]
