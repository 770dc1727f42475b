"""Whether a step on several devices is the step on one, and the likeliest mistake if not: for MXNet, PyTorch and JAX.

`compare` lets a driver take the same steps on several devices and on one, in float32 and in float64, each time with a
fresh copy of the user's code. In float64, rounding is so small that it cannot be confused with a mistake. If a step
differs, `evidence` tells what went wrong. Needs only NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain

from gluon_mgpu.check.arrays import (
    ROUNDING,
    TOLERANCE,
    differing,
    distance,
    flat,
    listed,
    norm,
    not_finite,
    only,
    unequal,
    wrong_losses,
    wrong_split,
)
from gluon_mgpu.check.driver import UNITS, Claim, Driver, Options, Session, Shards, StepResult
from gluon_mgpu.check.evidence import (
    CAUSES,
    LEFT,
    Evidence,
    left_by_earlier_steps,
    means_of_uneven_shards,
    usual_parts,
)
from gluon_mgpu.check.sides import Sides

SAME, DIFFERENT, UNKNOWN = 0, 1, 3  # verdicts; also the exit status of the command
EXAMPLES = 12  # at least, in a batch
MOST = 16  # steps, until one changes something
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
        return self.verdict or ", ".join([f"takes the same step as on one {self.unit}", *self.how])

    def explain(self) -> str:
        """The verdict and the numbers, one per line."""
        return "\n".join([self.line, *self.notes])


def compare(driver: Driver, numbers: Sequence[int], steps: int = 3, even: bool = False) -> Report:
    """Compare `steps` steps, and one with an uneven batch, on several numbers of devices and on one, until a claim does
    not hold. even: the uneven batch may differ; then there is a warning."""
    report, references = Report(unit=driver.unit), dict[int, Reference]()
    for k in numbers:
        n = -(-EXAMPLES // k) * k
        reference = references.setdefault(n, Reference(driver, n, steps))
        for claim, reason in Comparison(driver, k, reference, even, report).claims():
            report.claims[claim] = f"with {k} {UNITS[driver.unit]}: {reason}" if reason and k != numbers[0] else reason
            if reason:
                return report
    return report


class Reference:
    """Steps on one device: some with n examples and, if the driver can, one with an uneven batch.

    first: the first step that changes something. is_stale: whether a step uses the gradients of an earlier batch.
    """

    def __init__(self, driver: Driver, n: int, steps: int) -> None:
        self.driver, self.n, self.wanted = driver, n, steps
        self.session, self.first, self.is_stale = Session(), 0, False

    def claims(self) -> Iterator[Claim]:
        """Take the steps, once for all numbers of devices. Whether there is something to compare with."""
        if self.session.steps:
            return
        self._take(self.wanted)
        yield "compared", self.session.facts.reason
        even = self.session.steps[: self.wanted]
        yield "runs", self.session.failure if len(even) < self.wanted else not_finite(even)
        if self._first_that_moves() is None:
            self._take(MOST)
            if self._first_that_moves() is None and self.driver.finds_more(self.session):
                self._take(self.wanted)
            claim, reason = self.driver.still
            yield claim, reason if self._first_that_moves() is None else ""
        self.first = self._first_that_moves() or 0
        if self.first:
            self._take(self.first + self.wanted)
        yield "update", ""
        yield "repeatable", self._draws()

    @cached_property
    def exact(self) -> Session:
        """The same steps in float64."""
        return self.driver.run(1, self.batches, Options(double=True))

    def _take(self, steps: int) -> None:
        """steps: with even batches."""
        self.steps, self.sizes = steps, [self.n] * steps + [self.n + 1] * self.driver.uneven
        self.batches = [self.driver.batch(i, size) for i, size in enumerate(self.sizes)]
        self.session = self.driver.run(1, self.batches)

    def _first_that_moves(self) -> int | None:
        return next((i for i, step in enumerate(self.session.steps) if step.moves), None)

    def _draws(self) -> str:
        """Whether a step draws random numbers. The steps are taken again, and then one with another batch."""
        after, steps = self.first + 1, self.session.steps
        last = min(after, len(self.batches) - 1)
        other = self.driver.take(self.batches[last], [0] * self.sizes[last])
        again = self.driver.run(1, [*self.batches[:after], other], Options(seed=1))
        same = [not unequal([a.changes[0], b.changes[0]]) for a, b in zip(again.steps, steps)]
        self.is_stale = same[after:] == [step.moves for step in steps[after : after + 1]] == [True]
        reason = "a step draws random numbers, so that the same step twice gives different results; draw none"
        return "" if same[:after] == [True] * after else reason


class Comparison:
    """Steps on k devices and on one.

    sides: in the precision of the code. exact: in float64, if that works. weak: why it does not. shards: the examples
    that batch normalization sees at a time.
    """

    def __init__(self, driver: Driver, k: int, reference: Reference, even: bool, report: Report) -> None:
        self.driver, self.k, self.reference, self.even, self.report = driver, k, reference, even, report
        self.unit, self.units = driver.unit, UNITS[driver.unit]
        self.shards = list[Shards]()

    def claims(self) -> Iterator[Claim]:
        yield from self.reference.claims()
        self._take_steps()
        yield from self._starts()
        reason = f"float64 fails ({self.weak}), and the rounding of {self.sides.precision} hides mistakes"
        yield "compared", reason if self.weak and self.sides.precision != "float32" else ""
        claim, reason = self._first_wrong()
        if not reason:
            yield from self._right()
        yield from self.driver.checks(self.k, bool(reason), self._note)
        if reason and self.weak:
            reason += f" (compared only in float32, because float64 fails: {self.weak})"
        if not reason and self.reference.is_stale:
            reason = "a step uses the gradients of an earlier batch; update with those of its own"
        yield claim, reason

    # Stage 1: the steps

    def _take_steps(self) -> None:
        reference, how, run = self.reference, list[str](), self.driver.run
        batches, one = reference.batches, reference.session
        if one.facts.normalized:
            found = [self.driver.split(self.k, batch, n) for batch, n in zip(batches, reference.sizes)]
            self.shards = [usual_parts(examples, self.k, n) for examples, n in zip(found, reference.sizes)]
            how = [f"batch normalization of the examples of each {self.unit}"]
        several = run(self.k, batches)
        if self.shards:
            one = run(1, batches, Options(shards=self.shards))
        exact = Session(), Session()
        if several.steps:
            options = Options(double=True, shards=self.shards)
            exact = run(self.k, batches, options), run(1, batches, options) if self.shards else reference.exact
        pairs = zip(exact, (several, one))
        short = [a for a, b in pairs if len(a.steps) < min(len(b.steps), reference.steps)] if several.steps else []
        self.weak = short[0].failure or "it takes too long" if short else ""
        facts = [session.facts for session in (one, several, *exact)]
        self._how(*(text for of_session in facts for text in of_session.how), *how)
        precision = max((of_session.low for of_session in facts), key=ROUNDING.__getitem__)
        self.sides, self.exact = Sides(several, one, precision), Sides(*exact, "float64")

    def _starts(self) -> Iterator[Claim]:
        """Whether all start with the same arrays."""
        several, one, names = self.sides.several, self.sides.one, self.sides.names
        yield "compared", several.facts.reason
        divided = self.sides.divided
        reason = f"it has arrays of other shapes ({listed(divided)}); leave what is divided out of the state"
        yield "compared", reason if {*divided} & {*(one.facts.params or divided), *several.facts.params} else ""
        if divided:
            self._note(f"warning: not compared, because the {self.units} divide it: {listed(divided)}")
        starts = only(several.start, names)
        other = listed(unequal(starts))
        reason = f"the {self.units} start with different parameters ({other}); give each a copy of the same"
        yield "start", reason if other else ""
        other = listed(unequal([*only(one.start, names), *starts[:1]]))
        reason = f"it starts with other parameters ({other}); draw them with the same seed in every {self.unit}"
        yield "compared", reason if other else ""

    # Stage 2: the first step that is wrong, and why

    def _first_wrong(self) -> Claim:
        """A claim that does not hold, and the reason; no reason if all steps are right."""
        reference, steps = self.reference, len(self.sides.one.steps)
        for i in range(steps):
            (claim, reason), cause = self._judged(i)
            if reason and self.even and i == reference.steps:
                self._note(f"warning: uneven batches are wrong: {reason}")
            elif reason and i == reference.steps and cause not in (means_of_uneven_shards, left_by_earlier_steps):
                return claim, f"only with uneven batches ({reference.sizes[i]} examples): {reason}"
            elif reason:
                return claim, reason
        if steps < len(reference.sizes):
            uneven = f"uneven batches ({reference.sizes[-1]} examples)"
            failure = f"because they fail on one {self.unit}: {self.sides.one.failure}"
            self._note(f"warning: {uneven} are not compared, {failure}")
        return "update", ""

    def _judged(self, i: int) -> tuple[Claim, Callable[[Evidence], str] | None]:
        """What is wrong with step i, and its cause in `CAUSES`, if it is one of these."""
        reference, several, sides = self.reference, self.sides.several, self._sides(i)
        uneven = i == reference.steps
        if len(several.steps) <= i:
            return ("compared" if several.late else "several", several.failure), None
        here, there = sides.step(i)
        wrong = sides.wrong(here, there)
        losses = wrong_losses(here.losses, there.losses, reference.sizes[i])
        if not (wrong or losses or sides.unsynced(several.steps[i].changes)):
            return ("update", ""), None
        chosen = slice(0 if i <= reference.first else i, i + 1)
        changed = {name for step in sides.one.steps for name, a in step.changes[0].items() if a.any()}
        evidence = Evidence(
            self.driver,
            sides,
            changed & {*sides.names},
            self.k,
            i,
            reference.sizes[i],
            reference.batches[chosen],
            self.shards[chosen],
        )
        if i > reference.first and not uneven and not evidence.is_wrong_alone:
            return ("update", self._later(i, wrong)), None
        return next(((claim, reason), cause) for claim, cause in CAUSES if (reason := cause(evidence)))

    def _sides(self, i: int) -> Sides:
        """Those that have taken step i, in float64 if possible."""
        return self.exact if len(self.exact) > i else self.sides

    def _later(self, i: int, wrong: Sequence[str]) -> str:
        """What is wrong with step i, if the steps before were right."""
        sides, driver = self._sides(i), self.driver
        several, one = sides.step(i)
        expected = one.grads[0] if one.grads else {}
        gradients = [differing(found, expected, sides.bounds(expected)) for found in several.grads]
        if (rates := sides.wrong_rates(several, one, i, self.unit)) and not any(gradients):
            return rates
        options = Options(double=sides is self.exact, shards=self.shards)
        if sides.several.facts.left:
            batches = self.reference.batches[: i + 1]
            cleared = [driver.run(k, batches, replace(options, clear=True)).steps for k in (self.k, 1)]
            if all(len(steps) > i for steps in cleared) and not sides.wrong(*(steps[i] for steps in cleared)):
                return self._adds_to_gradients
        first, *others = only(several.changes, wrong)
        apart = [n for n in wrong if any(differing(other, {n: first[n]}, sides.bounds(first)) for other in others)]
        right = [name for name, a in one.changes[0].items() if name not in wrong and a.any()]
        which = f" ({listed(wrong)})" if wrong and right else ""
        if 0 < len(apart) < len(wrong):
            which = f" (of {listed(apart)}, the {self.units} make different updates)"
        kept = driver.kept_apart(self.k, self.reference.batches[:i], options)
        state = [*kept, *chain(*self._sides(i - 1).other_state(i - 1))]
        advice = f"other state already differs before it ({listed(state)}); compute it from all examples"
        return f"step {i + 1} is the first that is not that of one {self.unit}{which}; {advice if state else LEFT}"

    @property
    def _adds_to_gradients(self) -> str:
        return f"a step adds to the gradients of the step before; {self.driver.advice['left']}"

    # Stage 3: what else can be said if all steps are right

    def _right(self) -> Iterator[Claim]:
        driver, reference, sides = self.driver, self.reference, self.sides
        changes = (only(step.changes, sides.names) for step in sides.several.steps[reference.first :])
        if rounded := next(filter(None, map(unequal, changes)), []):
            advice = "add in the same order in each, or they drift apart"
            self._note(f"warning: the replicas differ by rounding ({listed(rounded)}); {advice}")
        yield "update", self._added_to()
        examples = driver.split(self.k, reference.batches[0], reference.n)
        split = wrong_split(examples, reference.n, driver.divides, self.unit) if examples else ""
        if split and driver.infers:
            self._note(f"warning: {split}, unless this is meant; the update is right")
            split = ""
        yield "devices", split
        for claim in ("sum", "losses", "replicas"):
            yield claim, ""
        last = reference.steps - 1
        between, from_one = self._sides(last).other_state(last)
        self._warn_of(between, f"the {self.units} keep different state", "synchronize it")
        given = [name for name in from_one if name in sides.one.facts.soft]
        reason = f"what the step is given besides parameters differs ({listed(given)}); compute it from all examples"
        yield "update", reason if given else ""
        self._warn_of(from_one, f"state differs from that on one {self.unit}", "correct it")
        if self.weak:
            self._how(
                f"compared only in float32, because float64 fails ({self.weak}), so that a mistake of less than "
                f"{TOLERANCE['float32']:g} of the update is not seen"
            )
        else:
            yield from self._rounding()
        yield from self._under_stress()

    def _added_to(self) -> str:
        """Whether a step adds to gradients that an earlier one has left."""
        first, one = self.reference.first, self.sides.one
        if not one.facts.left:
            return ""
        cleared = self.driver.run(1, self.reference.batches, Options(clear=True, shards=self.shards))
        pairs = zip(cleared.steps[first:], one.steps[first:])
        return self._adds_to_gradients if any(unequal([a.changes[0], b.changes[0]]) for a, b in pairs) else ""

    def _rounding(self) -> Iterator[Claim]:
        """Whether float32 and float64 differ by rounding."""
        first, low, facts = self.reference.first, self.sides.precision, self.sides.one.facts
        several, one = (step.changes[0] for step in self.sides.step(first))
        exact, names = self.exact.one.steps[first].changes[0], self.sides.names
        apart, of_one = (distance(change, exact, names, facts.adaptive) for change in (several, one))
        numbers = f"{apart:.1e} on {self.k} {self.units}, {of_one:.1e} on one"
        self._note(f"distance from the same step in float64: {numbers}")
        if low != "float32":
            self._how(f"in float64, without the rounding of {low}")
        rounding = 30 * ROUNDING[low]
        start = norm(flat(self.sides.one.start[0], names)) / (norm(flat(exact, names)) or 1)
        reason = f"float32 and float64 differ by {of_one:.0%} on one {self.unit}, more than rounding explains; "
        reason += "draw no random numbers"
        yield "compared", reason if of_one > max(1e-2, rounding * (1 + start)) else ""
        reason = f"the update is right in float64, but differs by {apart:.1g} in {low}"
        yield "update", reason if apart > max(1e-2, rounding, 8 * of_one) else ""

    def _under_stress(self) -> Iterator[Claim]:
        """Whether the step is right, too, if it reaches lines and limits that it did not reach."""
        if not self.driver.missed():
            return
        batches = self.reference.batches[: self.reference.first + 1]
        for text, options in self.driver.stress().items():
            several = self.driver.run(self.k, batches, replace(options, double=True))
            one = self.driver.run(1, batches, replace(options, double=True, shards=self.shards[: len(batches)]))
            updates = [StepResult(step.changes) for step in one.steps]  # the step may skip what is not finite
            if several.late or len(one.steps) < len(batches) or not_finite(updates):
                continue
            if len(several.steps) < len(batches):
                yield "several", f"{text}: {several.failure}"
            elif names := self.exact.wrong(several.steps[-1], one.steps[-1]):
                advice = "decide, clip and scale after the sum, with numbers that are the same everywhere"
                yield "update", f"{text}, the update differs from that of one {self.unit} ({listed(names)}); {advice}"
        if missed := self.driver.missed():
            self._note(f"warning: not checked, because these batches do not reach it: {', '.join(missed)}")

    def _warn_of(self, names: Sequence[str], what: str, advice: str) -> None:
        """Warn of state that differs. A global variable may also have a longer name, by a function that uses it."""
        if names := [name for name in names if not any(name.endswith(f".{other}") for other in names)]:
            use = "if evaluation, a checkpoint or a later step uses it"
            self._note(f"warning: {what} ({listed(names)}); {advice} {use}")

    def _how(self, *texts: str) -> None:
        """Say how the steps are compared."""
        self.report.how += [text for text in dict.fromkeys(texts) if text not in self.report.how]

    def _note(self, note: str) -> None:
        """Add a note, unless it was added for another number of devices."""
        if note not in self.report.notes:
            self.report.notes.append(note)
