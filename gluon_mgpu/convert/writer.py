"""Writes the code of classes: how layers are created, and the method forward with its variables and loops."""

from __future__ import annotations

import ast
import builtins
import re
import textwrap
from itertools import chain, count
from pathlib import Path

from gluon_mgpu.convert.graph import Entry
from gluon_mgpu.convert.statements import (
    Carried,
    Class,
    Elements,
    Loop,
    Modules,
    Operand,
    Parameter,
    Statement,
    identifier,
    join,
)

INIT = """
    def __init__({arguments}):
        super().__init__()
{layers}
"""
TRAIN = """
    def train(self, mode=True):
        super().train(mode)
        # As in MXNet, these layers always use their running statistics
{layers}
        return self
"""
FORWARD = """
    def forward({arguments}):
{lines}"""

MOST_TARGETS = 4  # variables to which one line assigns
# Options of layers that need not be written
DEFAULT = re.compile(r", (stride=1|padding=0|output_padding=0|dilation=1|groups=1|bias=True)(?=[,)])")
_, *_functions = Path(__file__).with_name("functions.py").read_text(encoding="utf-8").strip().split("\n\n\n")
FUNCTIONS = {text.partition("def ")[2].partition("(")[0]: text for text in _functions}
# Names that mean something else in the code
WORDS = {"self", "torch", "nn", "F", "x", "y", "z", *FUNCTIONS, *dir(builtins)} - {"input"}


def functions_of(text: str) -> list[str]:
    """The code of the functions that some code calls."""
    called = dict[str, str]()
    for name in reversed(FUNCTIONS):  # a function calls only those before it
        if re.search(rf"\b{name}\(", text):
            called[name] = FUNCTIONS[name]
            text += called[name]
    return list(called.values())[::-1]


class _Writer:
    """Writes the lines of a method forward. words: names that its variables cannot have."""

    def __init__(self, code: Class, words: set[str]) -> None:
        self.code, self.words, self.uses = code, words, code.uses()
        self.variables: dict[Entry, str] = dict(code.inputs)
        self.lists: dict[tuple[Operand, ...], str] = {}  # variables that are lists of values
        self.lines = list[str]()
        self.taken: set[str] = set()  # variables whose values are needed later
        loops = [step for step in code.steps if isinstance(step, Loop)]
        self.elements = {
            given.operands for loop in loops for given in loop.inputs.values() if isinstance(given, Elements)
        }
        self.elements |= {operands[::-1] for operands in self.elements}

    def read(self, operand: Operand) -> str:
        if isinstance(operand, Parameter):
            return f"self.{join(operand.layer.name, operand.name)}"
        return self.variables[operand]

    def read_list(self, operands: tuple[Operand, ...]) -> str:
        """The code of a list of values: if possible, a variable, or a part of it."""
        for entries, name in self.lists.items():
            if operands == entries:
                return name
            if operands == entries[::-1]:
                return f"{name}[::-1]"
            if operands == entries[1:]:
                return f"{name}[1:]"
            if operands == entries[:-1]:
                return f"{name}[:-1]"
        return f"[{', '.join(map(self.read, operands))}]"

    def new(self, name: str, number: int | str = "") -> str:
        """A new variable. name: of a step, whose last number counts from the first step of some network."""
        name = re.sub(r"_*\d+$", "", name) or "y"
        separator = "_" if number != "" else ""
        for suffix in chain([""], (f"{separator}{k}" for k in count(2))):
            variable = identifier(f"{name}{number}{suffix}", set())
            if variable not in self.taken | self.words:
                break
        return variable

    def write(self) -> list[str]:
        last: tuple[Operand | None, str, str] = None, "", ""  # the last line's value, its code, its layer's name
        lines, uses, variables = self.lines, self.uses, self.variables
        for at, step in enumerate(self.code.steps):
            live = [entry for entry in variables if uses.get(entry, [-1])[-1] >= at]
            if len(lines) > 1 and [len(uses[entry]) > 1 for entry in live] == [True]:
                lines.append("")  # between blocks of the network
            self.taken = {variables[entry].partition("[")[0] for entry in live if uses[entry][-1] > at}
            if isinstance(step, Loop):
                self.write_loop(step, at)
                last = None, "", ""
                continue
            operands, name = [*map(self.read, step.operands)], step.layer.name if step.layer else ""
            if step.operands[:1] == [last[0]] and uses[step.operands[0]] == [at] and _continues(step, last[1]):
                lines.pop()
                operands[0], name = last[1], name or last[2]
            elif step.operands[1:] == [last[0]] and uses[step.operands[1]] == [at] and _is_term(step, last[1]):
                lines.pop()
                operands[1] = last[1]
            text = self.text(step, operands)
            targets = self.targets(step, at, name or step.name)
            if step.repeated:
                lines += [f"{targets[0]} = {operands[0]}"] * (targets[0] != operands[0])
                call = f"block({', '.join([targets[0], *operands[1:]])})"
                lines += [f"for block in self.{name}:", f"    {targets[0]} = {call}"]
            else:
                lines.append(f"{', '.join(targets)} = {text}")
            single = len(step.outputs) == 1 and not step.repeated and not step.nested
            last = (step.outputs[0], text, name) if single else (None, "", "")
        result = ", ".join(map(self.read, self.code.results))
        if [*self.code.results] == [last[0]]:
            lines.pop()
            result = last[1]
        return [*lines, f"return {result}"]

    def text(self, step: Statement, operands: list[str]) -> str:
        """The code of a step with the code of its operands."""
        code = re.sub(r"\bself\.layer\b", f"self.{step.layer.name}", step.code) if step.layer else step.code
        for found in re.finditer(r"\[_\d+_(, _\d+_)+\]", code):
            places = [*map(int, re.findall(r"_(\d+)_", found[0]))]
            entries = tuple(step.operands[place] for place in places if place < len(step.operands))
            if len(entries) == len(places) and not (name := self.read_list(entries)).startswith("["):
                code = code.replace(found[0], name)
        return "".join(operands[int(part)] if k % 2 else part for k, part in enumerate(re.split(r"\b_(\d+)_\b", code)))

    def targets(self, step: Statement, at: int, name: str) -> list[str]:
        """The variables to which a step assigns."""
        kept = [entry for entry in step.outputs if entry in self.uses]
        if len(kept) > MOST_TARGETS or tuple(step.outputs) in self.elements:
            variable = self.new(name)
            self.lists[tuple(step.outputs)] = variable
            self.variables.update((entry, f"{variable}[{k}]") for k, entry in enumerate(step.outputs))
            return [variable]
        for entry in kept:
            if len(kept) == 1 and {*self.uses[entry]} == {at + 1}:
                self.variables[entry] = next(name for name in "xyz" if name not in self.taken)
            else:
                number = entry[1] if len(kept) > 1 else ""
                self.variables[entry] = self.new(name, number)
                self.taken.add(self.variables[entry])
        targets = [self.variables[entry] if entry in self.uses else "_" for entry in step.outputs]
        if step.nested:  # (output, state), where the state of an LSTM is a tuple
            states = targets[1:] if {*targets[1:]} - {"_"} else ["_"]
            targets[1:] = [f"({', '.join(states)})" if len(states) > 1 else states[0]]
        return targets

    def write_loop(self, loop: Loop, at: int) -> None:
        """Write a loop over time steps, or a list comprehension."""
        self.taken |= {self.read(x).partition("[")[0] for x in loop.operands if not isinstance(x, Parameter)}
        names, lists, states = list[str](), dict[str, str](), dict[str, str]()
        results: dict[int, str] = {}  # the variable for each output in the loop
        for given in loop.inputs.values():
            if isinstance(given, Carried):
                name = self.new("state")
                states[name] = self.read(given.first)
                results[given.output] = name
            elif isinstance(given, Elements):
                name = self.new("step")
                lists[name] = self.read_list(given.operands)
            elif isinstance(given, Modules):
                name = self.new("layer")
                lists[name] = f"self.{given.layer.name}"
            else:
                name = self.read(given)
            names.append(name)
            self.taken.add(name)
        collected: dict[int, str] = {}
        for k, entries in enumerate(loop.results):
            results.setdefault(k, self.new("y"))
            self.taken.add(results[k])
            if any(self.uses.get(entry, [-1])[-1] > at for entry in entries[:-1]):
                collected[k] = self.new(f"{loop.name}_outputs")
                self.taken.add(collected[k])
                self.lists[entries] = collected[k]
        if loop.layer:
            call = Statement(loop.name, loop.code, [], [], loop.layer)
            body = [f"{', '.join(results[k] for k in range(len(results)))} = {self.text(call, names)}"]
        else:
            body = self.body(loop, names, results)
        over = f"{', '.join(lists)} in " + (
            f"zip({', '.join(lists.values())})" if len(lists) > 1 else "".join(lists.values())
        )
        over = over if lists else f"_ in range({loop.count})"
        if not states and len(body) == len(results) == len(collected) == 1:
            self.lines.append(f"{collected[0]} = [{body[0].partition(' = ')[2]} for {over}]")
        else:
            if states:
                self.lines.append(f"{', '.join(states)} = {', '.join(states.values())}")
            self.lines += [f"{name} = []" for name in collected.values()]
            self.lines += [f"for {over}:", *textwrap.indent("\n".join(body), "    ").split("\n")]
            self.lines += [f"    {name}.append({results[k]})" for k, name in collected.items()]
        for k, entries in enumerate(loop.results):
            if k in collected:
                self.variables.update((entry, f"{collected[k]}[{t}]") for t, entry in enumerate(entries))
            if k not in collected or k in {
                given.output for given in loop.inputs.values() if isinstance(given, Carried)
            }:
                self.variables[entries[-1]] = results[k]

    def body(self, loop: Loop, names: list[str], results: dict[int, str]) -> list[str]:
        """The lines of a loop that calls no class."""
        inputs = dict(zip(loop.inputs, names))
        outputs: list[Operand] = [entries[0] for entries in loop.results]
        writer = _Writer(Class("", (), inputs, loop.body, outputs), self.words | self.taken)
        *lines, last = writer.write()
        targets = ", ".join(results[k] for k in range(len(results)))
        return [*lines, f"{targets} = {last.removeprefix('return ')}"]


def _continues(step: Statement, before: str) -> bool:
    """Whether a step can be written on the line before, because it calls a method or a function of its value."""
    if step.code.count("_0_") > 1:
        return False
    if step.code.startswith("_0_"):
        return len(before) < 90 and isinstance(ast.parse(before, mode="eval").body, (ast.Call, ast.Subscript))
    simple = re.match(r"[\w.]+\(_0_[,)]", step.code) and before.count("(") < 3 and len(before + step.code) < 90
    return bool(simple) and (not step.layer or bool(re.match(r"nn\.\w+Norm", step.layer.code)))


def _is_term(step: Statement, before: str) -> bool:
    """Whether a step adds or multiplies the value of the line before, which is a short call."""
    short = before.count("(") < 3 and len(before) < 60 and isinstance(ast.parse(before, mode="eval").body, ast.Call)
    return short and bool(re.fullmatch(r"_0_ [-+*/@] _1_", step.code))


class _Calls(ast.NodeTransformer):
    """Leaves out arguments that are a class's defaults, and names the others but the first two."""

    def __init__(self, classes: list[Class]) -> None:
        self.classes = {code.name: code for code in classes}

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and (code := self.classes.get(node.func.id)):
            named = [*zip(code.words, node.args)][2:]
            node.keywords += [
                ast.keyword(word, value) for word, value in named if ast.unparse(value) != code.defaults.get(word)
            ]
            node.args = node.args[:2]
        return node


def methods(code: Class, words: set[str], classes: list[Class]) -> str:
    """The code of a class's methods. classes: those that it may use."""
    layers, evaluated = list[str](), list[str]()
    for layer in code.layers():
        create = ast.unparse(_Calls(classes).visit(ast.parse(DEFAULT.sub("", layer.code), mode="eval")))
        line = f"self.{layer.name} = {create}{'.eval()' * layer.evaluated}"
        layers.append(f'self.register_buffer("{layer.name}", {create})' if layer.buffer else line)
        if layer.evaluated:
            evaluated.append(f"self.{layer.name}.eval()")
        whole = len(layer.frozen) > 1 and {*layer.state} - {"running_mean", "running_var"} <= {*layer.frozen}
        for name in ["", *layer.frozen][not whole : 1 if whole else None]:
            layers.append(f"self.{join(layer.name, name)}.requires_grad_(False)  # as in MXNet")
        for name, owner in layer.shared:
            layers.append(
                f"# Shared, as in MXNet\nself.{layer.name}.{name} = self.{join(owner.layer.name, owner.name)}"
            )
    lines = _Writer(code, words).write()
    arguments = [word for word in code.words if word not in code.defaults]
    arguments += [f"{word}={value}" for word, value in code.defaults.items()]
    text = INIT.format(arguments=", ".join(["self", *arguments]), layers=_indent(layers)) if layers else ""
    text += TRAIN.format(layers=_indent(evaluated)) if evaluated else ""
    text += FORWARD.format(arguments=", ".join(["self", *code.inputs.values()]), lines=_indent(lines))
    return text.strip("\n")


def _indent(lines: list[str]) -> str:
    return textwrap.indent("\n".join(lines), " " * 8)
