"""The same steps on several devices and on one, and what differs between these sides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from gluon_mgpu.check.arrays import ROUNDING, TOLERANCE, differing, flat, is_same, norm, only, unequal
from gluon_mgpu.check.driver import UNITS, Arrays, Session, StepResult


@dataclass
class Sides:
    """Steps in one precision: "float64", or the lowest that the code uses."""

    several: Session
    one: Session
    precision: str

    def __len__(self) -> int:
        """The number of steps that both have taken."""
        return min(len(self.several.steps), len(self.one.steps))

    def step(self, i: int) -> tuple[StepResult, StepResult]:
        """A step on several devices, and on one."""
        return self.several.steps[i], self.one.steps[i]

    @cached_property
    def divided(self) -> list[str]:
        """The arrays that have other shapes on one device."""
        starts = [*self.one.start, *self.several.start]
        every = dict.fromkeys(name for arrays in starts for name in arrays)
        return [n for n in every if len({arrays[n].shape if n in arrays else None for arrays in starts}) > 1]

    @cached_property
    def names(self) -> list[str]:
        """The arrays that are compared: without those that are divided, and without the running statistics of batch
        normalization, which depend on how the batch is divided."""
        ignored = {*self.divided, *self.one.facts.statistics}
        return [name for name in self.one.start[0] if name not in ignored]

    def unsynced(self, changes: Sequence[Arrays]) -> list[str]:
        """The running statistics that the step itself must make equal, and that differ between the devices."""
        return unequal(only(changes, {*self.one.facts.statistics} - {*self.several.facts.synced}))

    def bounds(self, expected: Arrays, parts: Sequence[Arrays] = ()) -> dict[str, float]:
        """How far rounding can move each array (a norm). parts: what an update is the sum of."""
        least = 1e-2 * norm(flat(expected, expected))
        sizes = {n: max(norm(a), least, sum(norm(part[n]) for part in parts)) for n, a in expected.items()}
        if self.precision == "float64":
            return {n: TOLERANCE["float64"] * size for n, size in sizes.items()}
        start = self.one.start[0]  # a small change of a large number
        large = {n: 8 * ROUNDING["float32"] * norm(start.get(n, 0)) for n in sizes}
        return {n: TOLERANCE[self.precision] * size + large[n] for n, size in sizes.items()}

    def wrong(self, several: StepResult, one: StepResult) -> list[str]:
        """The arrays that a step on several devices changes otherwise than on one."""
        ignored = self._without_gradient([*one.grads, *several.grads])
        [expected] = only(one.changes, {*self.names} - ignored)
        bound = self.bounds(expected)
        wrong = {name for change in several.changes for name in differing(change, expected, bound)}
        return [name for name in expected if name in wrong]

    def _without_gradient(self, grads: Sequence[Arrays]) -> set[str]:
        """The arrays whose gradients are 0 except for rounding in float64, as of a bias before batch normalization.
        Adam makes a large step of them."""
        if not grads or self.precision != "float64" or not self.one.facts.adaptive:
            return set()
        sizes = {n: [norm(g.get(n, 0)) / (norm(flat(g, g)) or 1) for g in grads] for n in grads[0]}
        return {n for n, of_name in sizes.items() if 0 < max(of_name) < 1e-10}

    def wrong_rates(self, several: StepResult, one: StepResult, i: int, unit: str) -> str:
        """Whether an optimizer has other settings in step i, such as the learning rate."""
        for key, value in one.rates[0].items() if one.rates else ():
            found = [rates.get(key, value) for rates in several.rates]
            wrong = [rank for rank, rate in enumerate(found) if abs(rate - value) > 1e-9 * abs(value)]
            if wrong:
                setting = "learning rate" if key.startswith("lr ") else key.partition(" ")[0]
                of = f" of {unit} {wrong[0]}" if len(wrong) < len(found) else ""
                when = f" in step {i + 1}" if i else ""
                on = f"on {len(found)} {UNITS[unit]}, and {value:g} on one"
                return f"the {setting}{of} is {found[wrong[0]]:g}{when} {on}; use the same one on any number"
        return ""

    def other_state(self, i: int) -> tuple[list[str], list[str]]:
        """State besides the parameters that steps change, such as a moving average in an attribute, and that differs
        after step i: between the devices, or from that on one."""
        several, one = self.step(i)
        facts, rests = self.one.facts, [*one.rest, *several.rest]
        starts = [*self.one.kept, *self.several.kept] or [Arrays()] * len(rests)
        items = [(name, a, start) for rest, start in zip(rests, starts) for name, a in rest.items()]
        parameters, unit = self.one.start[0], 2.0**-53 if self.precision == "float64" else ROUNDING["float32"]
        residue = 8 * unit * norm(flat(parameters, parameters))  # what rounding leaves, as a compensated sum keeps it
        between, from_one = list[str](), list[str]()
        for name in dict.fromkeys(name for name, a, start in items if not is_same(a, start.get(name))):
            value, *found = (rest.get(name) for rest in rests)  # None: it has not changed, or it is not there
            arrays = [a for a in (value, *found) if a is not None]
            limit = TOLERANCE[self.precision] * max(map(norm, arrays)) + residue
            if self.one.kept and len(arrays) < len(rests):
                continue
            if len({a.shape for a in arrays}) > 1:
                between += [name] if name in facts.soft else []
            elif not all(is_same(a, found[0], limit) for a in found):
                between += [name] if facts.others is None or name in facts.others else []
            elif value is not None and not is_same(found[0], value, limit):
                from_one.append(name)
        return between, from_one
