"""Finds loops in the code of a network: layers that are called at each time step, as in an unrolled cell.

The steps of one time step become the body of a loop, or a class that is called in it. What a time step passes to the
next one is carried; its other inputs are the same for all time steps, or elements of lists.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from gluon_mgpu.convert.classes import common_path, define, form
from gluon_mgpu.convert.graph import Entry
from gluon_mgpu.convert.statements import (
    Carried,
    Class,
    Elements,
    Input,
    Loop,
    Modules,
    Operand,
    Parameter,
    Statement,
    layers_of,
    list_of,
)

LEAST = 3  # time steps
Slots = list[list[int]]  # for each step of the body, its index at each time step


class _Finder:
    def __init__(self, network: Class) -> None:
        self.network, self.steps, self.uses = network, network.steps, network.uses()
        self.calls = network.calls()
        self.makers = {entry: at for at, step in enumerate(self.steps) for entry in step.outputs}

    def find(self) -> Loop | None:
        """A loop, with those that carry something first."""
        seeds = [*self._calls(), *self._consumers()]
        for recurrent in (True, False):
            for seed in [*seeds, *(seed[:-1] for seed in seeds if recurrent and len(seed) > LEAST)]:
                if (cores := self._cores(seed, recurrent)) and (loop := self._loop(self._grown(cores, recurrent))):
                    return loop
        return None

    def _calls(self) -> Iterator[list[int]]:
        """The steps that call the same layer, or blocks of the same kind."""
        calls: dict[Any, list[int]] = {}
        for at, step in enumerate(self.steps):
            if step.layer and not isinstance(step, Loop):
                kind = self._kind(step) if step.layer.is_block else (step.code, step.layer)
                calls.setdefault(kind, []).append(at)
        yield from (places for places in calls.values() if len(places) >= LEAST)

    def _consumers(self) -> Iterator[list[int]]:
        """Equal steps that each use one element of a list."""
        lists = [tuple(step.outputs) for step in self.steps if not isinstance(step, Loop)]
        lists += [result for step in self.steps if isinstance(step, Loop) for result in step.results]
        for entries in lists:
            if len(entries) >= LEAST:
                users: dict[Any, list[int]] = {}
                for entry in entries:
                    for at in {*self.uses.get(entry, [])} - {len(self.steps)}:
                        step = self.steps[at]
                        if not isinstance(step, Loop) and len({*entries} & {*step.entries()}) == 1:
                            users.setdefault(self._kind(step), []).append(at)
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
                    place = self.steps[at].operands.index(entry)
                    alike = [
                        [
                            user
                            for user in dict.fromkeys(self.uses.get(self.steps[before].outputs[k], []))
                            if user < len(self.steps)
                            and self._alike(user, at)
                            and self.steps[user].operands[place] == self.steps[before].outputs[k]
                            and not any(user in other for other in slots)
                        ]
                        for before in slot
                    ]
                    rank = alike[time].index(at) if at in alike[time] else 0
                    found = [users[rank] for users in alike if len(users) > rank]
                    if len({*found}) == len(slot):
                        return found
        return None

    def _alike(self, one: int, other: int) -> bool:
        a, b = self.steps[one], self.steps[other]
        return type(a) is type(b) is Statement and self._kind(a) == self._kind(b)

    def _kind(self, step: Statement) -> tuple[Any, ...]:
        """What is equal in each time step: the code, and the layer, or the code of layers of which each has its own."""
        layer = step.layer
        own = layer and layer.alone and self.calls[layer] == 1 and not layer.frozen and not layer.evaluated
        # A list of blocks is called in a loop of its own, which needs the list's name
        return step.code, layer.code if layer and own and not step.repeated else layer

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

    def _columns(self, slot: list[int]) -> list[tuple[Operand, ...]]:
        """For each operand of a slot's steps, its value at each time step."""
        return [*zip(*(self.steps[at].operands for at in slot))]

    def _loop(self, slots: Slots) -> Loop | None:
        """The loop, unless it would be in a circle with other steps."""
        slots = sorted(slots, key=lambda slot: slot[-1])
        members, times = {at for slot in slots for at in slot}, [{*steps} for steps in zip(*slots)]
        outputs = [column for slot in slots for column in zip(*(self.steps[at].outputs for at in slot))]
        inside: list[dict[Operand, int]] = [
            {column[t]: k for k, column in enumerate(outputs)} for t in range(len(times))
        ]
        places = dict[tuple[Operand, ...], Entry]()  # of the body's inputs, by their values
        for column in (column for slot in slots for column in self._columns(slot)):
            inner = {known.get(operand) for known, operand in zip(inside, column)}
            if len(inner) > 1 or any(isinstance(x, Parameter) for x in column) and len({*column}) > 1:
                return None
            if inner == {None} and not isinstance(column[0], Parameter):
                places.setdefault(column, (-1, len(places)))
        results = [
            column
            for column in outputs
            if any({*self.uses.get(entry, [])} - steps for entry, steps in zip(column, times))
        ]
        inputs = dict[Entry, Input]()
        for column, place in places.items():
            before = next((j for j, result in enumerate(results) if column[1:] == result[:-1]), None)
            if before is not None:
                inputs[place] = Carried(column[0], before)
            else:
                inputs[place] = column[0] if len({*column}) == 1 else Elements(column)
        body = list[Statement]()
        for slot in slots:
            step = self.steps[slot[0]]
            operands = [places.get(column, column[0]) for column in self._columns(slot)]
            layers = [layer for at in slot if (layer := self.steps[at].layer)]
            if len({*layers}) > 1:
                place = (-1, len(inputs))
                inputs[place] = Modules(list_of(re.sub(r"\d+", "", layers[0].name).strip("_"), layers))
                step = replace(step, code=step.code.replace("self.layer", f"_{len(operands)}_"), layer=None)
                operands.append(place)
            body.append(replace(step, operands=operands))
        external = [operand for column in places for operand in column if self._maker(operand) not in members]
        loop = Loop(
            *(body[-1].name, "", external, [entry for result in results for entry in result]),
            count=len(times),
            body=body,
            inputs=inputs,
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


def find_loops(network: Class) -> None:
    """Turn repeated time steps of a network, and parallel calls of blocks, into loops."""
    while _Finder(network).find():
        pass


def roll(network: Class, taken: set[str]) -> list[Class]:
    """Turn repeated time steps of a network into loops. Returns the classes that they call."""
    find_loops(network)
    alike: dict[Any, list[Loop]] = {}
    loops = [step for step in network.steps if isinstance(step, Loop)]
    others = layers_of(step for step in network.statements() if not isinstance(step, Loop))
    for loop in loops:
        layers = layers_of(loop.body)
        elsewhere = layers_of(other for other in loops if other is not loop)
        has_modules = any(isinstance(given, Modules) for given in loop.inputs.values())
        if (
            len(layers) > 1
            and not has_modules
            and not {*layers} & {*others, *elsewhere}
            and all(layer.alone for layer in layers)
        ):
            kinds = tuple(
                type(given) if isinstance(given, (Carried, Elements)) else Entry for given in loop.inputs.values()
            )
            described = form(loop.body, loop.inputs, [result[0] for result in loop.results])
            alike.setdefault((kinds, described), []).append(loop)
    return [_outline(group, taken) for group in alike.values()]


def _outline(loops: list[Loop], taken: set[str]) -> Class:
    """Create a class, and let the loops call its instances."""
    first, bodies = loops[0], [loop.body for loop in loops]
    inputs = dict(zip(first.inputs, first.names()))
    results: list[Operand] = [result[0] for result in first.results]
    paths = [common_path(layers_of(body)) for body in bodies]
    code, layers = define("Cell", taken, bodies, inputs, results, paths)
    for loop, layer in zip(loops, layers):
        layer.name = layer.name or "cell"
        loop.layer, loop.name = layer, layer.name
        loop.code = code.call
    return code
