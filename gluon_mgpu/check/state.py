"""What a step in PyTorch can reach and change, and copies of batches of any type."""

from __future__ import annotations

import copy
import functools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gluon_mgpu.check.driver import Arrays
from gluon_mgpu.check.processes import is_users

PREFIX = re.compile(r"(?:^|(?<=\.))(?:module|_orig_mod)\.")  # of DDP and torch.compile in parameters' names
OWN_ATTRIBUTES = {"_parameters", "_buffers", "_modules"}  # of a module; `State` reads them by their names
HOOKS = {"_forward_hooks", "_forward_pre_hooks", "_backward_hooks"}
GIVEN, IN_OBJECT, OTHER = 2, 1, 0  # where a tensor is: in a nest of what a step is given, in an object there, elsewhere
LIMIT = 50_000  # objects that are searched
CONTAINERS = {"collections", "functools", "types", "dataclasses"}


@dataclass
class State:
    """What is found, by name. tensors: parameters, buffers, and what the step is given. others: arrays in attributes,
    closures and global variables. copies: others that may be of parameters. numbers: Python's. names, paths: the names
    of a network, and of its tensors and modules in it."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    others: dict[str, Tensor | np.ndarray] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    modules: list[nn.Module] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)
    names: dict[str, tuple[str, str]] = field(default_factory=dict)
    copies: list[str] = field(default_factory=list)
    paths: dict[tuple[str, str], nn.Module] = field(default_factory=dict)

    @classmethod
    def of(cls, given: Any, function: Callable[..., Any]) -> State:
        """The state of a step: what it is given, and what its function can reach."""
        state, seen = cls(), dict[int, Any]()  # with the objects, so that no id is used again
        for root, is_part in ((given, True), (function, False)):
            stack = [("", root, GIVEN if is_part else OTHER)]
            while stack and len(seen) < LIMIT:
                name, value, level = stack.pop()
                if id(value) not in seen:
                    if not isinstance(value, (int, float, str, bytes)):
                        seen[id(value)] = value
                    stack += reversed([*state._inside(name, value, level)])
        shapes = {a.shape for a in state.tensors.values() if a.requires_grad}
        for name in [name for name in state.copies if state.others[name].shape in shapes]:
            state.tensors[name] = state.others.pop(name)  # such as a moving average of a parameter
        if len({root for root, _ in state.names.values()}) > 1:  # several networks
            state.tensors = {".".join(filter(None, state.names.get(n, (n,)))): a for n, a in state.tensors.items()}
        known = {id(a) for a in state.tensors.values()}
        for i, optimizer in enumerate(state.optimizers):
            params = [p for group in optimizer.param_groups for p in group["params"]]
            for j, p in enumerate(params):
                if id(p) not in known:
                    state.tensors[f"optimizer {i}[{j}]"] = p
        return state

    def _inside(self, name: str, value: Any, level: int) -> Iterator[tuple[str, Any, int]]:
        """Note a value, and return what is in it."""
        if isinstance(value, Tensor):
            if value.is_floating_point() or value.is_complex():
                is_state = value.requires_grad and value.is_leaf or level == GIVEN and value.numel() > 1
                added = self._add(self.tensors if is_state else self.others, name, value)
                if added and not is_state and level == IN_OBJECT:
                    self.copies.append(added)
        elif isinstance(value, np.ndarray):
            if value.dtype.kind == "f":
                self._add(self.others, name, value)
        elif isinstance(value, float):
            self._add(self.numbers, name, value)
        elif isinstance(value, nn.Module):
            yield from self._of_network(name, value)
        elif isinstance(value, Optimizer):
            self.optimizers.append(value)
        else:
            level = level if isinstance(value, (dict, list, tuple)) else min(level, IN_OBJECT)
            for key, item in parts_of(value, level > OTHER):
                yield (f"{name}{key}" if name or not key.startswith(".") else key[1:]), item, level

    def _of_network(self, name: str, network: nn.Module) -> Iterator[tuple[str, Any, int]]:
        for n, a in [*network.named_parameters(), *network.named_buffers()]:
            if a.is_floating_point() or a.is_complex():
                short = PREFIX.sub("", n)
                if not any(a is other for other in self.tensors.values()):
                    unique = short if short not in self.tensors else f"{name}.{short}"
                    self.tensors[unique], self.names[unique] = a, (name, short)
        for prefix, module in network.named_modules():
            if any(module is other for other in self.modules):
                continue
            self.modules.append(module)
            self.paths[name, PREFIX.sub("", f"{prefix}.").rstrip(".")] = module
            is_torch = type(module).__module__.startswith("torch.")
            for key, value in vars(module).items():
                if key in HOOKS if is_torch else key not in OWN_ATTRIBUTES:
                    yield PREFIX.sub("", f"{prefix}.{key}" if prefix else key), value, OTHER

    def _add(self, to: dict[str, Any], name: str, value: Any) -> str:
        """Returns the name under which a value is noted; empty if it is known."""
        everywhere = [*self.tensors.values(), *self.others.values()]
        if not isinstance(value, float) and any(value is other for other in everywhere):
            return ""
        while name in to:
            name += "'"
        to[name] = value
        return name

    def named_modules(self) -> dict[str, nn.Module]:
        """The modules by name: of the wrappers of a network, only the innermost."""
        is_one = len({root for root, _ in self.paths}) == 1
        names = [
            (path or type(m).__name__ if is_one else f"{root}.{path}".strip("."))
            for (root, path), m in self.paths.items()
        ]
        return dict(zip(names, self.paths.values()))

    def soft(self) -> list[str]:
        """The tensors that are no parameters or buffers, and that no optimizer updates."""
        own = [a for m in self.modules for a in (*m.parameters(recurse=False), *m.buffers(recurse=False))]
        own += [p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]]
        known = {id(a) for a in own} | {id(a) for a in self.tensors.values() if a.requires_grad}
        return [name for name, a in self.tensors.items() if known and id(a) not in known]

    def read(self) -> Arrays:
        """Copies of the tensors in float64, with those that are divided among the processes gathered."""
        return {name: array_of(a) for name, a in self.tensors.items()}

    def changed(self, start: dict[str, Any]) -> Arrays:
        """The other arrays and numbers that are not as `versions` found them."""
        now, found = self.versions(), dict[str, np.ndarray]()
        for name, x in self.numbers.items():
            if start.get(f"{name} (a number)", x) != x:
                found[f"{name} (a number)"] = np.array(x)
        for name, a in self.others.items():
            old, number = start.get(name, (None, 0))
            if old is not a or number != now[name][1]:
                found[name] = array_of(a) if isinstance(a, Tensor) else a.astype(np.float64)
        return found

    def versions(self) -> dict[str, Any]:
        """What tells whether the other arrays have changed."""
        found = {n: (a, a._version if isinstance(a, Tensor) else float(a.sum())) for n, a in self.others.items()}
        return {**found, **{f"{name} (a number)": x for name, x in self.numbers.items()}}


def array_of(tensor: Any) -> np.ndarray:
    """A copy in float64; complex numbers as pairs."""
    tensor = (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return np.array(tensor.to_dense().to(torch.float64).numpy() if tensor.is_sparse else tensor.double().numpy())


def parts_of(value: Any, libraries: bool = True) -> Iterator[tuple[str, Any]]:
    """What is in a nest, an object or a function of the user, with names. libraries: also in their objects."""
    if isinstance(value, dict):
        yield from ((f".{key}" if isinstance(key, str) else f"[{key!r}]", item) for key, item in list(value.items()))
    elif isinstance(value, (list, tuple)) or type(value).__name__ == "deque":
        yield from ((f"[{i}]", item) for i, item in enumerate(value))
    elif isinstance(value, MethodType):
        yield "", value.__self__
        yield "", value.__func__
    elif isinstance(value, functools.partial):
        yield from (("", value.func), ("", value.args), ("", value.keywords))
    elif isinstance(value, FunctionType):
        if is_users(value.__code__.co_filename):
            for key, cell in zip(value.__code__.co_freevars, value.__closure__ or ()):
                try:
                    yield f".{key}", cell.cell_contents
                except ValueError:  # not yet assigned
                    continue
            yield "", (value.__defaults__, value.__kwdefaults__)
            yield from _globals(value.__code__, value.__globals__)
        yield "", getattr(value, "__wrapped__", None)
    elif isinstance(value, (type, ModuleType)):
        if _is_users(value):
            items = list(vars(value).items())
            yield from ((f".{key}", item) for key, item in items if not isinstance(item, ModuleType))
    elif isinstance(value, (staticmethod, classmethod)):
        yield "", value.__func__
    elif not isinstance(value, BuiltinFunctionType) and (
        _is_users(type(value)) or _is_container(type(value), libraries)
    ):
        slots = [key for kind in type(value).__mro__ for key in _slots(kind) if hasattr(value, key)]
        attributes = {**{key: getattr(value, key) for key in slots}, **getattr(value, "__dict__", {})}
        yield from ((f".{key}", item) for key, item in attributes.items())
        yield "", type(value)


def _slots(kind: type) -> Sequence[str]:
    slots = vars(kind).get("__slots__", ())
    return [slots] if isinstance(slots, str) else [s for s in slots if not s.startswith("__")]


def _globals(code: CodeType, variables: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The global variables that a function names."""
    yield from ((f".{name}", variables[name]) for name in code.co_names if name in variables)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _globals(inner, variables)


def _is_users(kind: Any) -> bool:
    name = kind.__name__ if isinstance(kind, ModuleType) else kind.__module__
    return is_users(getattr(sys.modules.get(name), "__file__", None) or "")


def _is_container(kind: type, libraries: bool) -> bool:
    """Whether objects of a library's class are nests, as UserDict and SimpleNamespace, or wrap a network."""
    root = kind.__module__.partition(".")[0]
    module = getattr(sys.modules.get(root), "__file__", None) or ""
    is_other = "site-packages" in module and root not in ("torch", "numpy", "gluon_mgpu")
    return root in CONTAINERS or libraries and is_other


def taken(batch: Any, n: int, examples: Sequence[int] | None, change: Callable[[Any], Any]) -> Any:
    """A copy of a batch of n examples, or of some of its examples: of each tensor, array and list that has n rows.
    change: changes each tensor and array. Everything else, and all types, stay as they are."""
    rows, memo, keep = rows_of(batch, n), dict[int, Any](), list[Any]()

    def visit(value: Any, whole: bool) -> None:
        if id(value) in memo:
            return
        has_rows = hasattr(value, "__len__") and getattr(value, "ndim", 1) != 0
        is_rows = not whole and examples is not None and has_rows and len(value) == rows
        if isinstance(value, (Tensor, np.ndarray)):
            index = torch.tensor([*(examples or ())], dtype=torch.int64)
            some = value
            if is_rows and isinstance(value, Tensor):
                some = value.index_select(0, index) if value.is_sparse else value[index]
            elif is_rows:
                some = value[index.numpy()]
            memo[id(value)] = change(some)
        elif isinstance(value, (list, tuple)) and is_rows and not hasattr(value, "_fields"):
            for item in value:
                visit(item, True)
            memo[id(value)] = type(value)(copy.deepcopy(value[i], memo) for i in examples or ())
        elif not isinstance(value, (str, bytes, int, float, FunctionType, type, ModuleType, nn.Module)):
            items = [*parts_of(value)]
            keep.append(items)  # so that no id is used again
            for _, item in items:
                visit(item, whole)

    visit(batch, False)
    return copy.deepcopy(batch, memo)


def rows_of(batch: Any, n: int) -> int:
    """How many rows a batch of n examples has: n, or if nothing has as many, those of the first array."""
    sizes = [len(a) for a in leaves(batch) if a.ndim]
    lists = isinstance(batch, (list, tuple)) and len(batch) == n
    return n if n in sizes or lists or not sizes else sizes[0]


def leaves(batch: Any) -> list[Any]:
    """The tensors and arrays of a batch."""
    found, stack, seen = list[Any](), [batch], set[int]()
    while stack:
        value = stack.pop()
        if id(value) in seen or isinstance(value, (str, bytes, int, float, FunctionType, type, ModuleType, nn.Module)):
            continue
        seen.add(id(value))
        if isinstance(value, (Tensor, np.ndarray)):
            found.append(value)
        else:
            stack += reversed([item for _, item in parts_of(value)])
    return found
