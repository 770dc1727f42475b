"""Whether a step on several devices is the step on one, and the likeliest mistake if not: for MXNet, PyTorch and JAX.

`compare` lets a driver take the same steps on several devices and on one, in float32 and in float64, each time with a
fresh copy of the user's code. In float64, rounding is so small that it cannot be confused with a mistake. If a step
differs, `Evidence` tells from what each device's examples add to the update what went wrong. Needs only NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gluon_mgpu.check.arrays import (
    TOLERANCE,
    are_means,
    common,
    differ,
    distance,
    equal,
    far,
    fitted,
    flat,
    join_parts,
    names_that_differ,
    near,
    norm,
    not_finite,
    places,
    some,
    them,
    tolerances,
    wrong_losses,
    wrong_split,
)
from gluon_mgpu.check.driver import AS_WRITTEN, UNITS, Arrays, Claim, Driver, Options, Session, Shards, StepResult

SAME, DIFFERENT, UNKNOWN = 0, 1, 3  # verdicts; also the exit status of the command
ROUNDING = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}  # largest relative error of one operation
EXAMPLES = 12  # at least, in a batch
MOST = 16  # steps, until one changes something
LEFT = "look for what a step leaves behind, such as gradients, a buffer or a counter"
NOT_COMPARED = {"runs", "compared", "repeatable"}
BEGINNINGS = {
    **dict.fromkeys(NOT_COMPARED, "cannot be compared with one {unit}"),
    "several": "fails on several {units}",
    "called": "does not use all of its functions",
    "accuracy": "does not measure the same accuracy as on one {unit}",
}


@dataclass
class Report:
    """The claims; if one did not hold, nothing was checked after it. how: how the steps were compared, such as "with
    dropout off". notes: warnings, and lines with numbers."""

    claims: dict[str, str] = field(default_factory=dict)
    unit: str = "device"
    how: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def _wrong(self) -> Claim:
        return next(((claim, reason) for claim, reason in self.claims.items() if reason), ("", ""))

    @property
    def status(self) -> int:
        """SAME, DIFFERENT or UNKNOWN."""
        claim, _ = self._wrong()
        return UNKNOWN if claim in NOT_COMPARED else DIFFERENT if claim else SAME

    @property
    def same(self) -> bool:
        return self.status == SAME

    @property
    def verdict(self) -> str:
        """Empty if the step on several devices is the step on one, else the likeliest reason."""
        claim, reason = self._wrong()
        beginning = BEGINNINGS.get(claim, "does not take the same step as on one {unit}")
        return reason and f"{beginning.format(unit=self.unit, units=UNITS[self.unit])}: {reason}"

    @property
    def line(self) -> str:
        """What to tell the user, whatever the verdict."""
        return self.verdict or ", ".join([f"takes the same step as on one {self.unit}", *dict.fromkeys(self.how)])

    def explain(self) -> str:
        """The verdict and the numbers, one per line."""
        return "\n".join([self.line, *self.notes])


def compare(driver: Driver, numbers: Sequence[int], steps: int = 3, even: bool = False) -> Report:
    """Compare `steps` steps, and one with an uneven batch, on several numbers of devices and on one, until a claim does
    not hold. even: the uneven batch may differ; then there is a warning."""
    report = Report(unit=driver.unit)
    for k in numbers:
        for claim, reason in _Comparison(driver, k, steps, even, report).claims():
            report.claims[claim] = f"with {k} {UNITS[driver.unit]}: {reason}" if reason and k != numbers[0] else reason
            if reason:
                return report
    return report


class _Comparison:
    """Steps on k devices and on one. one, several: sessions in float32; double: those in float64, several first. first:
    the first step that changes something. weak: why not all steps were taken in float64. ignored: the running
    statistics; unsynced: those that the step itself must make equal. left_out: arrays that are not compared."""

    def __init__(self, driver: Driver, k: int, steps: int, even: bool, report: Report) -> None:
        self.driver, self.k, self.steps, self.even, self.unit = driver, k, steps, even, driver.unit
        self.how, self.notes = report.how, report.notes
        self.first, self.shards, self.left_out = 0, list[Shards](), set[str]()
        self._draw(steps)

    def _draw(self, steps: int) -> None:
        n, self.steps = -(-EXAMPLES // self.k) * self.k, steps
        self.sizes = [n] * steps + [n + 1] * self.driver.uneven
        self.batches = [self.driver.batch(i, size) for i, size in enumerate(self.sizes)]

    def claims(self) -> Iterator[Claim]:
        yield from self._on_one()
        self._take_steps()
        yield "compared", self.several.facts.reason
        yield "compared", self._leave_out()
        self._leave_own()
        names = names_that_differ(self.several.start)
        reason = f"the {UNITS[self.unit]} start with different parameters ({names}); give each a copy of the same"
        yield "start", reason if names else ""
        names = names_that_differ([*self.one.start[:1], *self.several.start[:1]])
        reason = f"it starts with other parameters ({names}); draw them with the same seed in every {self.unit}"
        yield "compared", reason if names else ""
        if self.several.steps:
            reason = f"float64 fails ({self.weak}), and the rounding of {self.low} hides mistakes"
            yield "compared", reason if self.weak and self.low != "float32" else ""
        wrong = self._first_wrong()
        if wrong and self.even and wrong[0] == self.steps:
            self.notes.append(f"warning: uneven batches are wrong: {wrong[2]}")
            wrong = None
        if not wrong:
            yield from self._right()
        yield from self.driver.checks(self.k, bool(wrong))
        for note in self.driver.notes:
            self._note(note)
        stale = "a step uses the gradients of an earlier batch; update with those of its own"
        if wrong and self.weak and self.several.steps:
            wrong = (*wrong[:2], f"{wrong[2]} (compared only in float32, because float64 fails: {self.weak})")
        yield wrong[1:] if wrong else ("update", stale if self.is_stale else "")

    def _run(self, k: int, batches: Sequence[Any], options: Options = AS_WRITTEN) -> Session:
        """Take steps; put together what is divided among the devices, and leave out what is not compared."""
        session = self.driver.run(k, batches, options)
        whole = self.one.start[0] if self.one.start else {}
        for devices, extra in [(session.start, 0), *((step.changes, 0) for step in session.steps)] + [
            (step.grads, 1) for step in session.steps
        ]:
            for name in [*devices[0]] if k > 1 and devices else ():
                join_parts(devices, name, whole.get(name), extra)
            for arrays in devices:
                for name in self.left_out & {*arrays}:
                    del arrays[name]
        return session

    def _leave_out(self) -> str:
        """Leave out the arrays that are others on one device. Returns a reason if these are parameters."""
        starts = [*self.one.start, *self.several.start]
        if len(starts) < 2:
            return ""
        shapes = [{name: a.shape for name, a in start.items()} for start in starts]
        every = dict.fromkeys(name for of_device in shapes for name in of_device)
        names = [name for name in every if len({of_device.get(name) for of_device in shapes}) > 1]
        params = {*(self.one.facts.params or every), *self.several.facts.params}
        if {*names} & params or len(names) == len(every) > 0:
            return f"it has arrays of other shapes ({some(names)}); leave what is divided out of the state"
        self._delete(names)
        if names:
            self.notes.append(f"warning: not compared, because the {UNITS[self.unit]} divide it: {some(names)}")
        return ""

    def _leave_own(self) -> None:
        """Leave out state that is no parameter, such as a moment, if each device has another one: sums of such arrays
        may be right, and what depends on them is compared."""
        session, own = self.double[0] if self.in_double else self.several, list[str]()
        for name in self.several.facts.soft:
            found = [[d[name] for d in devices if name in d] for devices in (session.start, *self._changes(session))]
            pairs = [(a, arrays[0]) for arrays in found for a in arrays[1:]]
            if any(norm(a - b) > TOLERANCE["float64" if self.in_double else self.low] * norm(b) for a, b in pairs):
                own.append(name)
        self._delete(own)
        if own:
            advice = f"synchronize {them(own)} if evaluation uses {them(own)}"
            self._note(f"warning: {differ(own)} between the {UNITS[self.unit]}; {advice}")

    def _changes(self, session: Session) -> list[list[Arrays]]:
        return [step.changes for step in session.steps]

    def _delete(self, names: Sequence[str]) -> None:
        """Do not compare some arrays."""
        self.left_out |= {*names}
        for session in (self.one, self.several, *self.double):
            for devices in [session.start, *self._changes(session), *(step.grads for step in session.steps)]:
                for arrays in devices:
                    for name in self.left_out & {*arrays}:
                        del arrays[name]

    def _on_one(self) -> Iterator[Claim]:
        """Whether there is a step on one device to compare with."""
        self.one = one = self.driver.run(1, self.batches)
        yield "compared", one.facts.reason
        yield "runs", one.failure if len(one.steps) < self.steps else not_finite(one.steps[0])
        steps = self.steps
        if not any(step.moves for step in one.steps):
            self._draw(MOST)
            one = self.driver.run(1, self.batches)
            claim, reason = self.driver.still
            yield claim, "" if any(step.moves for step in one.steps) else reason
        self.first = next((i for i, step in enumerate(one.steps) if step.moves), 0)
        if self.first:
            self._draw(self.first + steps)
            self.one = one = self.driver.run(1, self.batches)
        yield "update", ""
        last = min(self.first + 1, len(self.batches) - 1)
        other = self.driver.take(self.batches[last], [0] * self.sizes[last])
        again = self.driver.run(1, [*self.batches[: self.first + 1], other], Options(seed=1))
        same = [not names_that_differ([a.changes[0], b.changes[0]]) for a, b in zip(again.steps, one.steps)]
        reason = "a step draws random numbers, so that the same step twice gives different results; draw none"
        yield "repeatable", "" if same[: self.first + 1] == [True] * (self.first + 1) else reason
        after = self.first + 1
        self.is_stale = same[after:] == [step.moves for step in one.steps[after : after + 1]] == [True]

    def _take_steps(self) -> None:
        driver, batches = self.driver, self.batches
        is_normalized = self.one.facts.normalized
        if is_normalized:
            found = [driver.split(self.k, batch, size) for batch, size in zip(batches, self.sizes)]
            self.shards = [self._parts(examples, size) for examples, size in zip(found, self.sizes)]
            self.how.append(f"batch normalization of the examples of each {self.unit}")
        self.several = self._run(self.k, batches)
        if is_normalized:
            self.one = self._run(1, batches, Options(shards=self.shards))
        self.double = [Session(), Session()]
        if self.several.steps:
            in_double = Options(double=True, shards=self.shards)
            self.double = [self._run(n, batches, in_double) for n in (self.k, 1)]
        pairs = zip(self.double, (self.several, self.one))
        short = [double for double, single in pairs if len(double.steps) < min(len(single.steps), self.steps)]
        self.weak = short[0].failure or "it takes too long" if short else ""
        self.in_double = all(session.steps for session in self.double)
        facts = [session.facts for session in (self.one, self.several, *self.double)]
        self.low = max((f.low for f in facts), key=ROUNDING.__getitem__)
        self.how[:0] = dict.fromkeys(text for f in facts for text in f.how)
        self.ignored = {*self.one.facts.statistics}
        self.unsynced = self.ignored - {*self.several.facts.synced}

    def _parts(self, examples: Shards | None, n: int) -> Shards:
        """The examples of each device, if they are known, or those that it would usually have."""
        is_known = examples and all(examples) and not wrong_split(examples, n)
        return examples if examples and is_known else [part.tolist() for part in np.array_split(range(n), self.k)]

    def _first_wrong(self) -> tuple[int, str, str] | None:
        """The first step that fails or differs, a claim, and the reason."""
        for i in range(len(self.one.steps)):
            uneven = i == self.steps
            if len(self.several.steps) <= i:
                claim = "compared" if self.several.late else "several"
                only = f"only with uneven batches ({self.sizes[i]} examples): " if uneven else ""
                return i, claim, only + self.several.failure
            if self._differs(i):
                if i <= self.first or uneven:
                    return i, *self._diagnose(i)
                return i, "update", self._later(i)
        if len(self.one.steps) < len(self.sizes):
            self.notes.append(
                f"warning: uneven batches ({self.sizes[-1]} examples) are not compared, because they fail on one "
                f"{self.unit}: {self.one.failure}"
            )
        return None

    def _sides(self, i: int) -> tuple[StepResult, StepResult, bool]:
        """Step i on several devices and on one, and whether both are in float64."""
        double = all(len(session.steps) > i for session in self.double)
        several, one = (session.steps[i] for session in (self.double if double else (self.several, self.one)))
        return several, one, double

    def _differs(self, i: int) -> bool:
        """Whether step i on several devices is another one."""
        several, one, double = self._sides(i)
        statistics = [{n: change[n] for n in self.unsynced} for change in self.several.steps[i].changes]
        losses = wrong_losses(several.losses, one.losses, self.sizes[i])
        return bool(names_that_differ(statistics) or losses or self._wrong_arrays(several, one, double))

    def _wrong_arrays(self, several: StepResult, one: StepResult, double: bool) -> list[str]:
        ignored = self.ignored | self._without_gradient([*one.grads, *several.grads], double)
        expected = {name: a for name, a in one.changes[0].items() if name not in ignored}
        bound = self.bounds(expected, double)
        wrong = {name for change in several.changes for name in far(change, expected, bound)}
        return [name for name in expected if name in wrong]

    def _without_gradient(self, grads: Sequence[Arrays], double: bool) -> set[str]:
        """The arrays whose gradients are 0 except for rounding in float64, as of a bias before batch normalization.
        Adam makes a large step of them."""
        names = grads[0] if grads and double and self.one.facts.adaptive else ()
        sizes = {n: [norm(g.get(n, 0)) / (norm(flat(g, [*g])) or 1) for g in grads] for n in names}
        return {n for n, of_name in sizes.items() if 0 < max(of_name) < 1e-10}

    def bounds(self, expected: Arrays, double: bool, parts: Sequence[Arrays] = ()) -> dict[str, float]:
        """How far rounding can move each array (a norm). parts: what an update is the sum of."""
        tolerance, least = TOLERANCE["float64" if double else self.low], 1e-2 * norm(flat(expected, [*expected]))
        bound = {n: tolerance * max(norm(a), least, sum(norm(p[n]) for p in parts)) for n, a in expected.items()}
        if not double:  # a small change of a large number
            bound = {n: limit + 8 * ROUNDING["float32"] * norm(self.one.start[0][n]) for n, limit in bound.items()}
        return bound

    def _rates(self, several: StepResult, one: StepResult, i: int) -> str:
        """Whether an optimizer has other settings, such as the learning rate."""
        for key, value in one.rates[0].items() if one.rates else ():
            found = [rates.get(key, value) for rates in several.rates]
            wrong = [rank for rank, rate in enumerate(found) if abs(rate - value) > 1e-9 * abs(value)]
            if wrong:
                setting = "learning rate" if key.startswith("lr ") else key.partition(" ")[0]
                of = f" of {self.unit} {wrong[0]}" if len(wrong) < len(found) else ""
                when, on = f" in step {i + 1}" if i else "", f"on {self.k} {UNITS[self.unit]}, and {value:g} on one"
                return f"the {setting}{of} is {found[wrong[0]]:g}{when} {on}; use the same one on any number"
        return ""

    def _later(self, i: int) -> str:
        """What is wrong with step i, if the steps before were right."""
        several, one, double = self._sides(i)
        wrong = self._wrong_arrays(several, one, double)
        right = [name for name, a in one.changes[0].items() if name not in wrong and a.any()]
        if rates := self._rates(several, one, i):
            pairs = [(grads, one.grads[0]) for grads in several.grads] if one.grads else []
            if all(not far(*common(a, b), tolerances(b)) for a, b in pairs):
                return rates
        names = f" ({some(wrong)})" if wrong and right else ""
        own, others = self._rest(i - 1)
        advice = (
            f"{differ(own + others, 'already ')} before this step; compute {them(own + others)} from all examples"
            if own + others
            else LEFT
        )
        return f"step {i + 1} is the first that is not that of one {self.unit}{names}; {advice}"

    def _diagnose(self, i: int) -> Claim:
        """What is wrong with step i, taken by fresh copies of the code, after those before it if none has moved."""
        driver, n, k, shards = self.driver, self.sizes[i], self.k, self.shards
        chosen = slice(0 if i <= self.first else i, i + 1)
        batches = self.batches[chosen]
        of_batches = shards[chosen]

        options = Options(double=self.in_double)

        def taken(*sides: tuple[int, Any, Any], clips: bool = True) -> list[StepResult]:
            """The last step on each side; empty if one fails."""
            sessions = [self._run(k, some, replace(options, shards=s, clips=clips)) for k, some, s in sides]
            complete = all(len(session.steps) == len(batches) for session in sessions)
            return [session.steps[-1] for session in sessions] if complete else []

        def is_right(some: Sequence[Any], clips: bool = True) -> bool:
            both = taken((k, some, ()), (1, some, of_batches), clips=clips)
            return bool(both) and not self._wrong_arrays(both[0], both[1], self.in_double)

        examples = driver.split(k, batches[-1], n)
        if examples and (reason := wrong_split(examples, n, driver.divides, self.unit)):
            return "devices", reason
        parts = self._parts(examples, n)
        alone = [(1, [driver.take(batch, part) for batch in batches], ()) for part in parts]
        steps = taken((k, batches, ()), (1, batches, of_batches), *alone)
        if not steps:
            return "update", f"the update differs from that of one {self.unit}"
        evidence = Evidence(self, parts, *[step.changes for step in steps])
        replicas = evidence.replicas_differ()
        of_grads = None
        if all(step.grads and step.grads[0] for step in steps):
            # what the optimizer got is a sum, even if what it makes of it is none
            of_grads = Evidence(self, parts, *[step.grads for step in steps])
            evidence = of_grads if of_grads.is_wrong() else evidence
        if evidence is not of_grads and (rates := self._rates(steps[0], steps[1], i)):
            return "update", rates
        if own := evidence.not_summed():
            return "sum", own
        cause = "update", f"the update differs in step {i + 1}; {LEFT}"
        if evidence.is_wrong():
            tests = {
                "alike": lambda: is_right([driver.take(batch, [0] * n) for batch in batches]),
                "unclipped": lambda: driver.clips() and is_right(batches, clips=False),
                "no sum": lambda: self._is_no_sum(steps[1], steps[2:], parts),
                "begins": lambda: driver.begins(k, batches, replace(options, shards=of_batches)),
            }
            cause = evidence.update(tests, are_means(steps[0].losses, steps[1].losses))
        losses = wrong_losses(steps[0].losses, steps[1].losses, n)
        if losses and (replicas or cause[0] != "sum"):
            return "losses", losses
        return ("replicas", replicas) if replicas else cause

    def _is_no_sum(self, whole: StepResult, alone: Sequence[StepResult], parts: Shards) -> bool:
        """Whether, on one device, the gradients of the shards do not add up to those of the batch."""
        if not whole.raw or not whole.raw[0] or not all(step.raw and step.raw[0] for step in alone):
            return False
        total, raws = whole.raw[0], [step.raw[0] for step in alone]
        names = [name for name in total if all(name in raw for raw in raws)]
        shares = [len(part) / sum(map(len, parts)) for part in parts]
        sums = [
            {n: np.sum([w * raw[n] for w, raw in zip(of, raws)], axis=0) for n in names}
            for of in (shares, [1] * len(raws))
        ]
        expected = {name: total[name] for name in names}
        return all(far(some, expected, self.bounds(expected, self.in_double, raws)) for some in sums)

    def _right(self) -> Iterator[Claim]:
        """The claims if each step is the same in the precision in which they were compared."""
        compared = (
            [{n: a for n, a in change.items() if n not in self.ignored} for change in step.changes]
            for step in self.several.steps[self.first :]
        )
        if rounded := next(filter(None, map(names_that_differ, compared)), ""):
            advice = "add in the same order in each, or they drift apart"
            self.notes.append(f"warning: the replicas differ by rounding ({rounded}); {advice}")
        left = ""
        if self.one.facts.left:
            cleared = self._run(1, self.batches, Options(clear=True, shards=self.shards))
            pairs = zip(cleared.steps[self.first :], self.one.steps[self.first :])
            if any(names_that_differ([step.changes[0], other.changes[0]]) for step, other in pairs):
                left = f"a step adds to the gradients of the step before; {self.driver.advice['left']}"
        yield "update", left
        examples = self.driver.split(self.k, self.batches[0], self.sizes[0])
        split = wrong_split(examples, self.sizes[0], self.driver.divides, self.unit) if examples else ""
        if split and self.driver.infers:
            self.notes.append(f"warning: {split}, unless this is meant; the update is right")
            split = ""
        yield "devices", split
        for claim in ("sum", "losses", "replicas"):
            yield claim, ""
        self._compare_rest()
        if self.weak:
            self.how.append(
                f"compared only in float32, because float64 fails ({self.weak}), so that a mistake of less than "
                f"{TOLERANCE['float32']:g} of the update is not seen"
            )
        else:
            yield from self._rounding()
        yield from self._under_stress()

    def _rounding(self) -> Iterator[Claim]:
        """Whether float32 and float64 differ by rounding."""
        several, one, exact = (s.steps[self.first].changes[0] for s in (self.several, self.one, self.double[1]))
        names, trim = [name for name in exact if name not in self.ignored], self.one.facts.adaptive
        apart, of_one = (distance(change, exact, names, trim) for change in (several, one))
        numbers = f"{apart:.1e} on {self.k} {UNITS[self.unit]}, {of_one:.1e} on one"
        self.notes.append(f"distance from the same step in float64: {numbers}")
        if self.low != "float32":
            self.how.append(f"in float64, without the rounding of {self.low}")
        rounding = 30 * ROUNDING[self.low]
        start = norm(flat(self.one.start[0], names)) / (norm(flat(exact, names)) or 1)
        reason = f"float32 and float64 differ by {of_one:.0%} on one {self.unit}, more than rounding explains; "
        reason += "draw no random numbers"
        yield "compared", reason if of_one > max(1e-2, rounding * (1 + start)) else ""
        reason = f"the update is right in float64, but differs by {apart:.1g} in {self.low}"
        yield "update", reason if apart > max(1e-2, rounding, 8 * of_one) else ""

    def _rest(self, i: int) -> tuple[list[str], list[str]]:
        """Other state that steps change, such as a moving average in an attribute, that differs after step i: between
        the devices, or from that on one."""
        several, one, double = self._sides(i)
        sessions = self.double if double else (self.several, self.one)
        starts = [*sessions[1].kept, *sessions[0].kept]
        own, others = list[str](), list[str]()
        for name, value in one.rest[0].items() if one.rest else ():
            found = [rest.get(name, np.zeros(0)) for rest in several.rest]
            if any(a.shape != value.shape for a in found):
                continue
            if starts and all(equal(a, start.get(name, ())) for a, start in zip([value, *found], starts)):
                continue  # a constant, such as the number of devices
            limit = TOLERANCE["float64" if double else self.low] * max(norm(value), *map(norm, found))
            if all(near(a, value, limit) for a in found):
                continue
            if all(near(a, found[0], limit) for a in found):
                others.append(name)
            elif self.one.facts.others is None or name in self.one.facts.others:
                own.append(name)
        return own, others

    def _compare_rest(self) -> None:
        """Warn of other state that changes otherwise than on one device."""
        own, others = self._rest(self.steps - 1)
        advice = "if evaluation, a checkpoint or a later step uses"
        if own:
            where = f"between the {UNITS[self.unit]}; synchronize {them(own)}"
            self._note(f"warning: {differ(own)} {where} {advice} {them(own)}")
        if others:
            where = f"from {'that' if len(others) == 1 else 'those'} on one {self.unit}; correct {them(others)}"
            self._note(f"warning: {differ(others)} {where} {advice} {them(others)}")

    def _under_stress(self) -> Iterator[Claim]:
        """Whether the step is right, too, if it reaches lines and limits that it did not reach."""
        if not self.driver.missed():
            return
        for text, options in self.driver.stress().items():
            sides = [(self.k, ()), (1, self.shards[: self.first + 1])]
            batches = self.batches[: self.first + 1]
            several, one = (self._run(k, batches, replace(options, double=True, shards=s)) for k, s in sides)
            is_finite = len(one.steps) == len(batches) and not not_finite(one.steps[-1])
            if not is_finite or several.late or any(map(not_finite, one.steps)):
                continue
            if len(several.steps) < len(batches):
                yield "several", f"{text}: {several.failure}"
            elif names := self._wrong_arrays(several.steps[-1], one.steps[-1], True):
                advice = "decide, clip and scale after the sum, with numbers that are the same everywhere"
                yield "update", f"{text}, the update differs from that of one {self.unit} ({some(names)}); {advice}"
        if missed := self.driver.missed():
            self._note(f"warning: not checked, because these batches do not reach it: {', '.join(missed)}")

    def _note(self, note: str) -> None:
        """Add a note, unless it was added for another number of devices."""
        if note not in self.notes:
            self.notes.append(note)


class Evidence:
    """A step on several devices, on one, and with the examples of each device alone: what changed, or the gradients
    that the optimizer got. parts: what each device's examples add."""

    def __init__(
        self, of: _Comparison, parts: Shards, several: list[Arrays], whole: list[Arrays], *alone: list[Arrays]
    ) -> None:
        self.unit, self.advice, self.devices = of.unit, of.driver.advice, [f"{of.unit} {rank}" for rank in range(of.k)]
        self.changes, self.alone, self.unsynced = several, [arrays for [arrays] in alone], of.unsynced
        everywhere = [*self.changes, *self.alone]
        known = [n for n in whole[0] if n not in of.ignored and all(n in arrays for arrays in everywhere)]
        self.names = [n for n in known if all(arrays[n].shape == whole[0][n].shape for arrays in everywhere)]
        self.whole = {name: whole[0][name] for name in self.names}
        # an optimizer's gradients may be known of some arrays only
        changed = {n for step in of.one.steps for n, a in step.changes[0].items() if a.any()} - of.ignored
        self.every = {*self.names, *changed}
        # a share of what they do alone, unless the step computes sums
        self.sizes = [len(part) for part in parts]
        shares = [{n: own[n] * size / sum(self.sizes) for n in self.names} for size, own in zip(self.sizes, self.alone)]
        self.parts = min(shares, self.alone, key=lambda some: distance(self._sum(some), self.whole, self.names))
        self.bound = of.bounds(self.whole, of.in_double, self.parts)

    def _sum(self, parts: Sequence[Arrays]) -> Arrays:
        return {name: np.sum([part[name] for part in parts], axis=0) for name in self.names}

    def wrong(self, change: Arrays, expected: Arrays | None = None) -> list[str]:
        """The arrays that differ by more than rounding explains."""
        return far(change, expected or self.whole, self.bound)

    def is_wrong(self) -> bool:
        return any(self.wrong(change) for change in self.changes)

    def not_summed(self) -> str:
        """Whether each device updates with its own gradients only."""
        wrong = [self.wrong(change) for change in self.changes]
        own = [n for n in self.names if all(n in names and self._is_own(n, rank) for rank, names in enumerate(wrong))]
        of = "" if len(own) == len(self.every) else f" for {some(own)}"
        return f"each {self.unit} updates with its own gradients{of}; {self.advice['not summed']}" if own else ""

    def _is_own(self, name: str, rank: int) -> bool:
        """Whether a device's update of an array uses only the gradients of its own examples."""
        change, own, rest = self.changes[rank][name], self.alone[rank][name], 2 * self.bound[name]
        if own.any() and norm(change - own) <= rest:
            return True
        weights = fitted(change, [part[name] for part in self.parts], rest)
        return weights is not None and [i for i, w in enumerate(weights) if abs(w) > 0.01] == [rank]

    def replicas_differ(self) -> str:
        """Whether the replicas are the same after the step."""
        first = self.changes[0]
        if any(self.wrong(change, {n: first[n] for n in self.names}) for change in self.changes):
            right = [self.devices[rank] for rank, change in enumerate(self.changes) if not self.wrong(change)]
            names = names_that_differ([{n: change[n] for n in self.names} for change in self.changes])
            if right:
                advice = "update each with the sum, in the same way"
                return f"only the step of {', '.join(right)} is right ({names}); {advice}"
            return f"after a step, the replicas have different parameters ({names}); {self.advice['replicas']}"
        names = names_that_differ([{n: change[n] for n in self.unsynced} for change in self.changes])
        return f"the replicas have different running statistics ({names}); {self.advice['statistics']}" if names else ""

    def update(self, tests: dict[str, Callable[[], Any]], are_means: bool) -> Claim:
        """What a wrong update looks like. tests: whether it is right if all examples are alike, or unclipped; whether
        the loss is no sum; where the difference begins. are_means: whether the losses are the means of the shards."""
        change = max(self.changes, key=lambda change: len(self.wrong(change)))
        wrong, whole, k, unit = self.wrong(change), self.whole, len(self.devices), self.unit
        if infinite := [name for name in wrong if not np.isfinite(change[name]).all()]:
            return "update", f"the update is not finite ({some(infinite)})"
        if tests["unclipped"]():
            return "update", f"each {unit} clips its own gradients, or by another norm; clip after the sum"
        elements = {n: np.abs(change[n] - whole[n]) > self.bound[n] / whole[n].size ** 0.5 for n in wrong}
        where = "the update" + places(elements, whole, self.every)
        values, *columns = (np.concatenate([a[n][elements[n]] for n in wrong]) for a in (change, *self.parts))
        weights = fitted(values, columns, 1e-3 * norm(values))
        if weights is not None:
            used = [i for i in range(k) if abs(weights[i]) > 1e-3]
            if 0 < len(used) < k and np.ptp(weights[used]) < 1e-2 * abs(weights[used[0]]):
                names = ", ".join(self.devices[i] for i in used)
                where = f"the update of {some(wrong)}" if where == "the update" and len(wrong) < len(whole) else where
                return "sum", f"{where} uses only the gradients of {names}; add those of the others"
            if np.ptp(weights * self.sizes) < 1e-3 * abs(weights[0]) and np.ptp(weights) > 0.01:
                sizes = ", ".join(map(str, self.sizes))
                advice = "add the gradients of all examples, not the means of shards, and divide by the size of the "
                return "update", f"shards of different sizes ({sizes} examples) have the same weight; {advice}batch"
        found, expected = flat(change, wrong), flat(whole, wrong)
        factors = fitted(found, [expected], 5e-3 * norm(found - expected))
        if factors is not None:
            factor = factors[0] + 0.0  # not -0
            advice = f"use the same learning rate and divisor for any number of {UNITS[unit]}"
            if abs(factor - k) < 1e-3:
                advice = "add the gradients once, keep the learning rate, and divide by the size of the whole batch"
                advice += ", not of a shard, as a mean loss does"
                if are_means:
                    advice = f"each {unit} computes the mean loss of its shard; compute the sum, and divide once, by "
                    advice += "the size of the whole batch"
            elif abs(factor - 1 / k) < 1e-3:
                advice = "add the gradients, and divide only by the size of the batch"
            return "update", f"{where} is {factor:.5g} times that of one {unit}; {advice}"
        total = self._sum(self.parts)
        is_of_parts = bool(self.wrong(total)) and not self.wrong(change, total)
        is_scaled = weights is not None and np.abs(weights - 1).max() > 5e-5
        if tests["no sum"]():
            cause = (
                f"on one {unit}, the gradients of the shards do not add up to those of the batch, so the loss is no "
                "sum over examples: it may have a mean over tokens, weights, a choice of examples, negatives of "
                f"others, or statistics of a shard; add numerators and denominators over the {UNITS[unit]}, or gather "
                "what it needs, with gradients"
            )
            return "update", f"{where} differs: {cause}{tests['begins']()}"
        if is_of_parts:
            cause = (
                "by clipping or rounding (as in float16 or 8 bits), by a number or a choice of its own examples, or by "
                "random numbers that others draw, too"
            )
            return "update", f"each {unit} changes its gradients{where[10:]} before the sum: {cause}; sum first"
        if weights is not None and is_scaled:
            terms = " + ".join(f"{w:.5g} × {name}" for w, name in zip(np.round(weights, 5), self.devices) if w) or "0"
            advice = "each shard must count once; look for clipping or scaling before the sum"
            if np.abs(weights - 1).max() < 0.05:
                advice = f"a factor that is the same for all elements of a {unit} is not rounding; {advice}"
            return "update", f"{where} adds the shards' gradients as {terms}; {advice}"
        more = {n: norm(change[n] - whole[n]) / (norm(whole[n]) or 1) for n in wrong}
        worst = max(wrong, key=more.__getitem__)
        by = f"by {more[worst]:.0%} for {worst}"
        advice = (
            "if all else is right, look for clipping or weight decay before the sum, or for what is gathered from "
            "others without gradients"
        )
        if more[worst] < 0.02:
            by = f"by {more[worst]:.1g} for {worst}"
            advice = "the errors scatter by element, as with float16, bfloat16 or 8-bit numbers; "
            advice += "keep float32 until the sum is complete"
        elif tests["alike"]():
            by = "unless all examples are the same: labels may be those of others"
            advice = "divide X and y in the same way, and use what depends on other examples as on one"
        return "update", f"{where} differs from that of one {unit}, {by}; {advice}{tests['begins']()}"
