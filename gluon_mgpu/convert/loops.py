"""Finds loops in the code of a network: layers that are called at each time step, as in an unrolled cell.

The steps of one time step become the body of a loop, or a class that is called in it. What a time step passes to the
next one is carried; its other inputs are the same for all time steps, or elements of lists.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Union

from gluon_mgpu.convert.blocks import (
    Class,
    Entry,
    Layer,
    Operand,
    Parameter,
    Statement,
    call_of,
    class_name,
    common_path,
    define,
    form,
    layers_of,
)

LEAST = 3  # time steps


class Carried(NamedTuple):
    """An input that is an output of the time step before. first: the input of the first time step."""

    first: Operand
    output: int


class Elements(NamedTuple):
    """An input for each time step."""

    operands: tuple[Operand, ...]


Input = Union[Operand, Carried, Elements]  # an operand that is the same for all time steps


@dataclass
class Loop(Statement):
    """Statements for each time step, or a call of their class; in its code, _0_ is the first of `inputs`."""

    count: int = 0
    body: list[Statement] = field(default_factory=list)  # of the first time step
    inputs: list[Input] = field(default_factory=list)
    places: list[Entry] = field(default_factory=list)  # what the body of the first time step calls the inputs
    results: list[tuple[Entry, ...]] = field(default_factory=list)  # for each output, its entry at each time step

    is_loop = True

    def layers(self) -> list[Layer]:
        return [self.layer] if self.layer else layers_of(self.body)

    def names(self) -> list[str]:
        """Names for the inputs inside the loop."""
        kinds = [{Carried: "state", Elements: "x"}.get(type(given), "other") for given in self.inputs]
        return [f"{kind}{kinds[:k].count(kind) + 1}" if kind in kinds[:k] else kind for k, kind in enumerate(kinds)]


Slots = list[list[int]]  # for each step of the body, its index at each time step


class _Finder:
    def __init__(self, network: Class) -> None:
        self.network, self.steps, self.uses = network, network.steps, network.uses()
        self.makers = {entry: at for at, step in enumerate(self.steps) for entry in step.outputs}

    def find(self) -> Loop | None:
        """A loop, with those that carry something first."""
        seeds = [*self._calls()]
        for recurrent in (True, False):
            for seed in [*seeds, *([] if recurrent else self._consumers())]:
                if (cores := self._cores(seed, recurrent)) and (loop := self._loop(self._grown(cores, recurrent))):
                    return loop
        return None

    def _calls(self) -> Iterator[list[int]]:
        """The steps that call the same layer."""
        calls: dict[Any, list[int]] = {}
        for at, step in enumerate(self.steps):
            if step.layer and not isinstance(step, Loop):
                calls.setdefault((step.layer, step.code), []).append(at)
        yield from (places for places in calls.values() if len(places) >= LEAST)

    def _consumers(self) -> Iterator[list[int]]:
        """Equal steps that each use one element of a list."""
        lists = [tuple(step.outputs) for step in self.steps if not isinstance(step, Loop)]
        lists += [result for step in self.steps if isinstance(step, Loop) for result in step.results]
        for entries in lists:
            if len(entries) >= LEAST:
                users: dict[str, list[int]] = {}
                for entry in entries:
                    for at in {*self.uses.get(entry, [])} - {len(self.steps)}:
                        step = self.steps[at]
                        if not isinstance(step, Loop) and len({*entries} & {*step.entries()}) == 1:
                            users.setdefault(step.code, []).append(at)
                yield from (places for places in users.values() if len({*places}) == len(places) == len(entries))

    def _users(self, at: int) -> set[int]:
        return {user for entry in self.steps[at].outputs for user in self.uses.get(entry, [])}

    def _sources(self, at: int) -> set[int]:
        return {self.makers[entry] for entry in self.steps[at].entries() if entry in self.makers}

    def _cores(self, seed: list[int], recurrent: bool) -> Slots | None:
        """The steps through which each step of the seed leads to the next one."""
        between = list[list[int]]()
        for start, end in zip(seed, seed[1:]):
            reached = {start}
            for at in range(start + 1, end + 1):
                if self._sources(at) & reached:
                    reached.add(at)
            needed = {end} & reached
            for at in range(end - 1, start - 1, -1):
                if at in reached and self._users(at) & needed:
                    needed.add(at)
            between.append(sorted(needed - {end}))
        if not recurrent:
            return None if any(between) else [seed]
        if not all(between):
            return None
        # The last time step leads to no other one; it has the steps that correspond to the one before
        slots: Slots = [[*seed]]
        for at in between[-1][1:]:
            slot = self._matching(slots, at, len(seed) - 2)
            if not slot:
                return None
            slots.append(slot)
        return slots if all(len(steps) == len(slots) for steps in between) else None

    def _matching(self, slots: Slots, at: int, time: int) -> list[int] | None:
        """The steps that correspond, at each time step, to the step `at` of one of them, which uses a slot's output."""
        for slot in slots:
            for k, entry in enumerate(self.steps[slot[time]].outputs):
                if entry in self.steps[at].operands:
                    place, found = self.steps[at].operands.index(entry), list[int]()
                    for before in slot:
                        output = self.steps[before].outputs[k]
                        alike = [
                            user
                            for user in dict.fromkeys(self.uses.get(output, []))
                            if user < len(self.steps)
                            and self._alike(user, at)
                            and self.steps[user].operands[place] == output
                            and not any(user in other for other in slots)
                        ]
                        found += alike[:1]
                    if len({*found}) == len(slot):
                        return found
        return None

    def _alike(self, one: int, other: int) -> bool:
        a, b = self.steps[one], self.steps[other]
        return type(a) is type(b) is Statement and a.code == b.code and a.layer is b.layer

    def _grown(self, slots: Slots, recurrent: bool) -> Slots:
        """Add the steps that only these steps need, and, if nothing is carried, steps without layers that need only
        these."""
        times = range(len(slots[0]))
        while True:
            inside = [{slot[time] for slot in slots} for time in times]
            everywhere = set().union(*inside)
            new = self._makers_of(slots, inside, everywhere)
            if new:
                slots.insert(0, new)
                continue
            if recurrent:
                return slots
            users = {user for slot in slots for user in self._users(slot[0])} - {len(self.steps)} - everywhere
            for at in sorted(users):
                new = None if self.steps[at].layer else self._matching(slots, at, 0)
                if new and all(self._sources(user) <= inside[t] for t, user in enumerate(new)):
                    slots.append(new)
                    break
            else:
                return slots

    def _makers_of(self, slots: Slots, inside: list[set[int]], everywhere: set[int]) -> list[int] | None:
        """Equal steps whose outputs only these steps need."""
        for slot in slots:
            for place in range(len(self.steps[slot[0]].operands)):
                found = [self._maker(self.steps[at].operands[place]) for at in slot]
                if -1 in found or {*found} & everywhere or len({*found}) < len(slot):
                    continue
                if all(self._alike(at, found[0]) and self._users(at) <= inside[t] for t, at in enumerate(found)):
                    return found
        return None

    def _maker(self, operand: Operand) -> int:
        """The step that computes a value, or -1."""
        return -1 if isinstance(operand, Parameter) else self.makers.get(operand, -1)

    def _loop(self, slots: Slots) -> Loop | None:
        """The loop, unless it would be in a circle with other steps."""
        slots = sorted(slots, key=lambda slot: slot[-1])
        times = range(len(slots[0]))
        outputs = [
            tuple(self.steps[at].outputs[k] for at in slot)
            for slot in slots
            for k in range(len(self.steps[slot[0]].outputs))
        ]
        inside: list[dict[Operand, int]] = [{column[t]: k for k, column in enumerate(outputs)} for t in times]
        columns = dict[tuple[Operand, ...], Entry]()
        for slot in slots:
            for place in range(len(self.steps[slot[0]].operands)):
                column = tuple(self.steps[at].operands[place] for at in slot)
                inner = {inside[t].get(operand) for t, operand in enumerate(column)}
                if len(inner) > 1 or any(isinstance(x, Parameter) for x in column) and len({*column}) > 1:
                    return None
                if inner == {None} and not isinstance(column[0], Parameter):
                    columns.setdefault(column, (-1, len(columns)))
        members = {at for slot in slots for at in slot}
        used = [
            k
            for k, column in enumerate(outputs)
            if any(
                user not in {slot[t] for slot in slots} for t, e in enumerate(column) for user in self.uses.get(e, [])
            )
        ]
        results = [outputs[k] for k in used]
        inputs = list[Input]()
        for column in columns:
            before = next((j for j, result in enumerate(results) if column[1:] == result[:-1]), None)
            if before is not None:
                inputs.append(Carried(column[0], before))
            else:
                inputs.append(column[0] if len({*column}) == 1 else Elements(column))
        body = list[Statement]()
        for slot in slots:
            step = self.steps[slot[0]]
            moved = [
                columns.get(tuple(self.steps[at].operands[place] for at in slot), operand)
                for place, operand in enumerate(step.operands)
            ]
            body.append(Statement(step.name, step.code, moved, step.outputs, step.layer, step.nested))
        external = [operand for column in columns for operand in column if self._maker(operand) not in members]
        loop = Loop(
            *(body[-1].name, "", external, [entry for result in results for entry in result]),
            count=len(times),
            body=body,
            inputs=inputs,
            places=[*columns.values()],
            results=results,
        )
        return loop if results and len(body) * len(times) > 4 and self._replace(members, loop) else None

    def _replace(self, members: set[int], loop: Loop) -> bool:
        """Replace steps by the loop, after the steps that it needs. Returns False if one of these needs a member."""
        needed, depends = set[int](), {*members}
        pending = [source for at in members for source in self._sources(at) - members]
        while pending:
            at = pending.pop()
            if at not in needed:
                needed.add(at)
                pending += self._sources(at)
        for at in range(len(self.steps)):
            if self._sources(at) & depends:
                depends.add(at)
        if needed & depends:
            return False
        first = min(members)
        before = [step for at, step in enumerate(self.steps) if at < first or at in needed]
        after = [step for at, step in enumerate(self.steps) if at > first and at not in needed | members]
        self.network.steps = [*before, loop, *after]
        return True


def roll(network: Class, taken: set[str]) -> list[Class]:
    """Turn repeated time steps of a network into loops. Returns the classes that they call."""
    while _Finder(network).find():
        pass
    alike: dict[Any, list[Loop]] = {}
    loops = [step for step in network.steps if isinstance(step, Loop)]
    others = layers_of(step for step in network.steps if not step.is_loop)
    for loop in loops:
        layers = layers_of(loop.body)
        elsewhere = layers_of(other for other in loops if other is not loop)
        if len(layers) > 1 and not {*layers} & {*others, *elsewhere} and all(layer.alone for layer in layers):
            kinds = tuple(type(given) if isinstance(given, (Carried, Elements)) else Entry for given in loop.inputs)
            described = form(loop.body, loop.places, [result[0] for result in loop.results])
            alike.setdefault((kinds, described), []).append(loop)
    return [_outline(group, taken) for group in alike.values()]


def _outline(loops: list[Loop], taken: set[str]) -> Class:
    """Create a class, and let the loops call its instances."""
    first, bodies = loops[0], [loop.body for loop in loops]
    inputs = dict(zip(first.places, first.names()))
    results: list[Operand] = [result[0] for result in first.results]
    paths = [common_path(layers_of(body)) for body in bodies]
    code, layers = define(class_name("Cell", taken), bodies, inputs, results, paths)
    for loop, layer in zip(loops, layers):
        layer.name = layer.name or "cell"
        loop.layer, loop.name = layer, layer.name
        loop.code = call_of(inputs)
    return code
