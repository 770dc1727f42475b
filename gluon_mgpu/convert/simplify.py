"""Replaces groups of a network's steps by fewer ones: equal steps, reshapes after reshapes, pixel shuffles, and
transposes around recurrent layers."""

from __future__ import annotations

import re
from collections.abc import Callable

from gluon_mgpu.convert.exported import Shape
from gluon_mgpu.convert.statements import Class, Operand, Parameter, Statement

VIEW = re.compile(r"_0_(\.(reshape|flatten|squeeze|unsqueeze)\([^()]*\))+")
SHUFFLE = re.compile(r"_0_\.permute\(0, 1, 4, 2, 5, 3\)")
SIZE = re.compile(r"_0_\.shape\[(\d+)\]")
ShapesOf = Callable[[Operand], list[Shape]]  # of a value that a step computes: its shape for each sample


def simplify(code: Class, shapes_of: ShapesOf) -> None:
    """Simplify the steps of a network."""
    _compute_once(code)
    uses = code.uses()
    makers: dict[Operand, Statement] = {entry: step for step in code.steps for entry in step.outputs}

    def before(step: Statement, pattern: re.Pattern[str]) -> Statement | None:
        """The step before, if it has such code, and nothing else needs its output."""
        maker = makers.get(step.operands[0])
        if not maker or not pattern.fullmatch(maker.code) or len(uses[step.operands[0]]) > 1:
            return None
        return None if isinstance(maker.operands[0], Parameter) else maker

    for step in code.steps:
        if step.code.startswith("_0_.reshape("):
            while (first := before(step, VIEW)) and _join(first, step, shapes_of):
                pass
            if (middle := before(step, SHUFFLE)) and (first := before(middle, VIEW)):
                _use_pixel_shuffle(first, middle, step, shapes_of)
    code.steps = [step for step in code.steps if step.code]
    _use_batch_first(code)


def _compute_once(code: Class) -> None:
    """Leave out steps that compute what another one has computed, such as the mask of each layer."""
    known, same = dict[tuple[object, ...], Statement](), dict[Operand, Operand]()
    for step in code.steps:
        step.operands = [same.get(operand, operand) for operand in step.operands]
        if not step.layer and "self.training" not in step.code and not {*step.outputs} & {*code.results}:
            first = known.setdefault((step.code, *step.operands), step)
            if first is not step:
                same.update(zip(step.outputs, first.outputs))
                step.code = ""
    code.steps = [step for step in code.steps if step.code]


def _join(first: Statement, step: Statement, shapes_of: ShapesOf) -> bool:
    """Leave out a reshape before another one, unless that needs a size that the first one's input does not have."""
    before, after = ([*zip(*shapes_of(x))] for x in (first.operands[0], first.outputs[0]))  # the sizes of each axis
    needed = [after[int(axis)] for axis in SIZE.findall(step.code)]
    if not all(sizes in before for sizes in needed):
        return False
    texts = SIZE.split(step.code)[::2]
    axes = [f"_0_.shape[{before.index(sizes)}]" for sizes in needed]
    step.code = "".join(text + axis for text, axis in zip(texts, [*axes, ""]))
    first.code, step.operands = "", [first.operands[0], *step.operands[1:]]
    return True


def _use_pixel_shuffle(first: Statement, middle: Statement, step: Statement, shapes_of: ShapesOf) -> None:
    """Use one function for a reshape, a transpose and a reshape that move channels into pixels."""
    factors = set[int]()
    for image, parts, result in zip(*map(shapes_of, (first.operands[0], first.outputs[0], step.outputs[0]))):
        n, c, a, b, h, w = parts
        fits = a == b and image == (n, c * a * a, h, w) and result == (n, c, h * a, w * a)
        factors.add(a if fits else 0)
    if len(factors) == 1 and 0 not in factors:
        step.code, step.operands = f"F.pixel_shuffle(_0_, {factors.pop()})", first.operands[:1]
        first.code = middle.code = ""


def _use_batch_first(code: Class) -> None:
    """Let recurrent layers swap axes 0 and 1, if steps before and after them do it."""
    swap, uses = "_0_.transpose(0, 1)", code.uses()
    makers: dict[Operand, Statement] = {entry: step for step in code.steps for entry in step.outputs}
    for at, step in enumerate(code.steps):
        before, users = makers.get(step.operands[0]), uses.get(step.outputs[0], [])
        after = code.steps[users[0]] if len(users) == 1 and users[0] < len(code.steps) else None
        if not (step.nested and step.layer and before and after) or uses[step.operands[0]] != [at]:
            continue
        if before.code == after.code == swap and sum(other.layer is step.layer for other in code.steps) == 1:
            step.layer.code = f"{step.layer.code[:-1]}, batch_first=True)"
            step.operands[0], step.outputs[0] = before.operands[0], after.outputs[0]
            before.code = after.code = ""
    code.steps = [step for step in code.steps if step.code]
