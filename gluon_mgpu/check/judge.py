"""Whether a step on several devices is the step on one, and the likeliest mistake if not: for MXNet, PyTorch and JAX.

`compare` lets a driver take the same steps on several devices and on one, in float32 and in float64, each time with a
fresh copy of the user's code. In float64, rounding is so small that it cannot be confused with a mistake. If a step
differs, `Evidence` tells from what each device's examples add to the update what went wrong. Needs only NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]
Claim = tuple[str, str]  # a claim, and what is wrong; "": nothing
Shards = Sequence[Sequence[int]]  # the indices of the examples of each device
SAME, DIFFERENT, UNKNOWN = 0, 1, 3  # verdicts; also the exit status of the command
UNITS = {"device": "devices", "process": "processes"}
# relative differences that may come from rounding; in float64, from the user's constants in float32
TOLERANCE = {"float64": 1e-6, "float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
ROUNDING = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}  # largest relative error of one operation
EXAMPLES = 12  # at least, in a batch
LEFT = "look for what a step leaves behind, such as gradients, a buffer or a counter"
NOT_COMPARED = {"runs", "compared", "repeatable"}
BEGINNINGS = {
    **dict.fromkeys(NOT_COMPARED, "cannot be compared with one {unit}"),
    "several": "fails on several {units}",
    "called": "does not use all of its functions",
    "accuracy": "does not measure the same accuracy as on one {unit}",
}


@dataclass
class Step:
    """What one step did on each device. changes: of the parameters. grads: what the optimizer got, if known. losses:
    what the step returned. examples: those it used, if asked."""

    changes: list[Arrays]
    grads: list[Arrays] = field(default_factory=list)
    losses: list[np.ndarray] = field(default_factory=list)
    examples: Shards = ()


@dataclass
class Session:
    """Steps that were taken one after the other. start: the parameters of each device before the first step. failure:
    why the steps ended early; late: because of the time limit. facts: see `Driver.run`."""

    start: list[Arrays] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    failure: str = ""
    late: bool = False
    facts: dict[str, Any] = field(default_factory=dict)

    def add(self, before: list[Arrays], after: list[Arrays], losses: Sequence[np.ndarray] = ()) -> None:
        """Add a step. before, after: the parameters of each device."""
        changes = [{n: a - old[n] for n, a in new.items()} for old, new in zip(before, after)]
        self.steps.append(Step(changes, losses=[*losses]))


class Driver:
    """Takes steps with one framework. unit: "device" or "process". divides: what divides a batch. uneven: whether it
    can be uneven. notes: for the user, after `checks`. advice: what to do in this framework, for {what is wrong}."""

    unit = "device"
    divides = "the step"
    image_shape: Sequence[int] = (1, 28, 28)
    classes = 10
    uneven = True
    notes: Sequence[str] = ()
    advice: Mapping[str, str] = {
        "not summed": "sum them before the update",
        "replicas": "sum all gradients before the update",
        "statistics": "average them, or send those of the first to the others",
        "left": "set them to 0 after each update",
    }

    def batch(self, i: int, n: int) -> Any:
        """Batch i, of n examples. Here, random images and labels."""
        rng = np.random.default_rng(i)
        return rng.random((n, *self.image_shape), np.float32), rng.integers(0, self.classes, n).astype(np.int32)

    def take(self, batch: Any, examples: Sequence[int]) -> Any:
        """Some examples of a batch."""
        return tuple(array[[*examples]] for array in batch)

    def split(self, k: int, batch: Any, n: int) -> Shards | None:
        """The examples on each of k devices; None if unknown."""
        return None

    def run(self, k: int, batches: Sequence[Any], **options: Any) -> Session:
        """Take a step with each batch on k devices, with a fresh copy of the user's code.

        double: in float64. shards: for each batch, what batch normalization sees at a time. seed: of the random numbers
        that a step draws. clear: set gradients that a step leaves to 0. Facts: "normalized": whether the network
        has batch normalization; "statistics": the names of its running statistics; "synced": whether a step makes them
        equal; "low": the lowest precision that is used; "how": for the user; "left": whether a step leaves gradients;
        "reason": why the step cannot be compared.
        """
        raise NotImplementedError

    def checks(self, k: int, is_wrong: bool) -> Iterator[Claim]:
        """What else can be said after the steps on k devices, most important first. is_wrong: if they differ."""
        yield from ()


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
    """Steps on k devices and on one. one, several: sessions in float32; double: those in float64, several first.
    ignored: the running statistics; unsynced: those that the step itself must make equal."""

    def __init__(self, driver: Driver, k: int, steps: int, even: bool, report: Report) -> None:
        self.driver, self.k, self.steps, self.even, self.unit = driver, k, steps, even, driver.unit
        self.how, self.notes = report.how, report.notes
        n = -(-EXAMPLES // k) * k
        self.sizes = [n] * steps + [n + 1] * driver.uneven
        self.batches = [driver.batch(i, size) for i, size in enumerate(self.sizes)]
        self.shards: list[Shards] | None = None

    def claims(self) -> Iterator[Claim]:
        yield from self._on_one()
        self._take_steps()
        yield "compared", self.several.facts.get("reason") or ""
        shapes = [{n: np.array(a.shape) for n, a in start.items()} for start in [*self.one.start, *self.several.start]]
        reason = f"it has arrays of other shapes ({names_that_differ(shapes)}); leave what is divided out of the state"
        yield "compared", reason if names_that_differ(shapes) else ""
        names = names_that_differ(self.several.start)
        reason = f"the {UNITS[self.unit]} start with different parameters ({names}); give each a copy of the same"
        yield "start", reason if names else ""
        names = names_that_differ([*self.one.start[:1], *self.several.start[:1]])
        reason = f"it starts with other parameters ({names}); draw them with the same seed in every {self.unit}"
        yield "compared", reason if names else ""
        wrong = self._first_wrong()
        if wrong and self.even and wrong[0] == self.steps:
            self.notes.append(f"warning: uneven batches are wrong: {wrong[2]}")
            wrong = None
        if not wrong:
            yield from self._right()
        yield from self.driver.checks(self.k, bool(wrong))
        self.notes += [note for note in self.driver.notes if note not in self.notes]
        stale = "a step uses the gradients of an earlier batch; update with those of its own"
        yield wrong[1:] if wrong else ("update", stale if self.is_stale else "")

    def _on_one(self) -> Iterator[Claim]:
        """Whether there is a step on one device to compare with."""
        self.one = one = self.driver.run(1, self.batches)
        yield "compared", one.facts.get("reason") or ""
        yield "runs", one.failure if len(one.steps) < self.steps else not_finite(one.steps[0])
        moves = [any(a.any() for a in step.changes[0].values()) for step in one.steps]
        reason = f"the steps on one {self.unit} do not change the parameters; assign in place"
        yield "update", "" if any(moves) else reason
        other = self.driver.take(self.batches[0], [0] * self.sizes[0])
        again = self.driver.run(1, [self.batches[0], other], seed=1)
        same = [not names_that_differ([a.changes[0], b.changes[0]]) for a, b in zip(again.steps, one.steps)]
        reason = "a step draws random numbers, so that the same step twice gives different results; draw none"
        yield "repeatable", "" if same[:1] == [True] else reason
        self.is_stale = same[1:] == moves[1:2] == [True]

    def _take_steps(self) -> None:
        driver, batches = self.driver, self.batches
        if self.one.facts.get("normalized"):
            found = [driver.split(self.k, batch, size) for batch, size in zip(batches, self.sizes)]
            self.shards = [self._parts(examples, size) for examples, size in zip(found, self.sizes)]
            self.one = driver.run(1, batches, shards=self.shards)
            self.how.append(f"batch normalization of the examples of each {self.unit}")
        self.several = driver.run(self.k, batches)
        self.double = [Session(), Session()]
        if self.several.steps:
            self.double = [driver.run(n, batches, double=True, shards=self.shards) for n in (self.k, 1)]
        self.in_double = all(session.steps for session in self.double)
        facts = [session.facts for session in (self.one, self.several, *self.double)]
        self.low = max((f.get("low") or "float32" for f in facts), key=ROUNDING.__getitem__)
        self.how[:0] = dict.fromkeys(text for f in facts for text in f.get("how", []))
        self.ignored = {*(self.one.facts.get("statistics") or ())}
        self.unsynced = set() if self.several.facts.get("synced") else self.ignored

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
                if i == 0 or uneven:
                    return i, *self._diagnose(i)
                return i, "update", f"only the first update is that of one {self.unit}; {LEFT}"
        return None

    def _differs(self, i: int) -> bool:
        """Whether step i on several devices is another one."""
        double = all(len(session.steps) > i for session in self.double)
        several, one = (session.steps[i] for session in (self.double if double else (self.several, self.one)))
        statistics = [{n: change[n] for n in self.unsynced} for change in self.several.steps[i].changes]
        losses = _losses(several.losses, one.losses, self.sizes[i])
        return bool(names_that_differ(statistics) or losses or self._updates_differ(several, one, double))

    def _updates_differ(self, several: Step, one: Step, double: bool) -> bool:
        ignored = self.ignored | (_without_gradient([*one.grads, *several.grads]) if double else set())
        expected = {name: a for name, a in one.changes[0].items() if name not in ignored}
        bound = self.bounds(expected, double)
        return any(far(change, expected, bound) for change in several.changes)

    def bounds(self, expected: Arrays, double: bool, parts: Sequence[Arrays] = ()) -> dict[str, float]:
        """How far rounding can move each array (a norm). parts: what an update is the sum of."""
        tolerance, least = TOLERANCE["float64" if double else self.low], 1e-2 * norm(flat(expected, [*expected]))
        bound = {n: tolerance * max(norm(a), least, sum(norm(p[n]) for p in parts)) for n, a in expected.items()}
        if not double:  # a small change of a large number
            bound = {n: limit + 8 * ROUNDING["float32"] * norm(self.one.start[0][n]) for n, limit in bound.items()}
        return bound

    def _diagnose(self, i: int) -> Claim:
        """What is wrong with step i, taken by fresh copies of the code."""
        driver, batch, n, k = self.driver, self.batches[i], self.sizes[i], self.k
        shards = self.shards and [self.shards[i]]

        def taken(*sides: tuple[int, Any, list[Shards] | None]) -> list[Step]:
            """A step on each side; empty if one fails."""
            sessions = [driver.run(k, [some], double=self.in_double, shards=shards) for k, some, shards in sides]
            return [session.steps[0] for session in sessions] if all(session.steps for session in sessions) else []

        examples = driver.split(k, batch, n)
        if examples and (reason := wrong_split(examples, n, driver.divides, self.unit)):
            return "devices", reason
        parts = self._parts(examples, n)
        alone = [(1, driver.take(batch, part), None) for part in parts]
        steps = taken((k, batch, None), (1, batch, shards), *alone)
        if not steps:
            return "update", f"the update differs from that of one {self.unit}"
        evidence = Evidence(self, parts, *[step.changes for step in steps])
        replicas = evidence.replicas_differ()
        if all(step.grads and step.grads[0] for step in steps):
            # what the optimizer got is a sum, even if what it makes of it is none
            of_grads = Evidence(self, parts, *[step.grads for step in steps])
            evidence = of_grads if of_grads.is_wrong() else evidence
        if own := evidence.not_summed():
            return "sum", own

        def is_right_if_alike() -> bool:
            alike = driver.take(batch, [0] * n)
            both = taken((k, alike, None), (1, alike, shards))
            return bool(both) and not self._updates_differ(both[0], both[1], self.in_double)

        cause = "update", f"the update differs in step {i + 1}; {LEFT}"
        if evidence.is_wrong():
            cause = evidence.update(is_right_if_alike, _are_means(steps[0].losses, steps[1].losses))
        losses = _losses(steps[0].losses, steps[1].losses, n)
        if losses and (replicas or cause[0] != "sum"):
            return "losses", losses
        return ("replicas", replicas) if replicas else cause

    def _right(self) -> Iterator[Claim]:
        """The claims if each step is the same in the precision in which they were compared."""
        changes = self.several.steps[0].changes
        if rounded := names_that_differ([{n: a for n, a in c.items() if n not in self.ignored} for c in changes]):
            advice = "add in the same order in each, or they drift apart"
            self.notes.append(f"warning: the replicas differ by rounding ({rounded}); {advice}")
        left = ""
        if self.one.facts.get("left"):
            cleared = self.driver.run(1, self.batches, clear=True, shards=self.shards)
            pairs = zip(cleared.steps[:2], self.one.steps[:2])
            if any(names_that_differ([step.changes[0], other.changes[0]]) for step, other in pairs):
                left = f"a step adds to the gradients of the step before; {self.driver.advice['left']}"
        yield "update", left
        examples = self.driver.split(self.k, self.batches[0], self.sizes[0])
        yield "devices", wrong_split(examples, self.sizes[0], self.driver.divides, self.unit) if examples else ""
        for claim in ("sum", "losses", "replicas"):
            yield claim, ""
        if not self.in_double:
            self.notes.append(f"compared only in float32, because float64 fails: {self.double[0].failure}")
            return
        several, one, exact = (s.steps[0].changes[0] for s in (self.several, self.one, self.double[1]))
        names = [name for name in exact if name not in self.ignored]
        apart, of_one = (distance(change, exact, names) for change in (several, one))
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


class Evidence:
    """A step on several devices, on one, and with the examples of each device alone: what changed, or the gradients
    that the optimizer got. parts: what each device's examples add."""

    def __init__(
        self, of: _Comparison, parts: Shards, several: list[Arrays], whole: list[Arrays], *alone: list[Arrays]
    ) -> None:
        self.unit, self.advice, self.devices = of.unit, of.driver.advice, [f"{of.unit} {rank}" for rank in range(of.k)]
        self.changes, self.alone, self.unsynced = several, [arrays for [arrays] in alone], of.unsynced
        everywhere = [*self.changes, *self.alone]
        self.names = [n for n in whole[0] if n not in of.ignored and all(n in arrays for arrays in everywhere)]
        self.whole = {name: whole[0][name] for name in self.names}
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
        of = "" if len(own) == len(self.names) else f" for {some(own)}"
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

    def update(self, is_right_if_alike: Callable[[], bool], are_means: bool) -> Claim:
        """What a wrong update looks like. is_right_if_alike: whether it is right if all examples are the same.
        are_means: whether the losses are the means of the shards."""
        change = max(self.changes, key=lambda change: len(self.wrong(change)))
        wrong, whole, k, unit = self.wrong(change), self.whole, len(self.devices), self.unit
        if infinite := [name for name in wrong if not np.isfinite(change[name]).all()]:
            return "update", f"the update is not finite ({some(infinite)})"
        elements = {n: np.abs(change[n] - whole[n]) > self.bound[n] / whole[n].size ** 0.5 for n in wrong}
        where = "the update" + _where(elements, whole)
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
        if self.wrong(total) and not self.wrong(change, total):
            cause = (
                "by clipping or rounding (as in float16 or 8 bits), by a number or a choice of its own examples, or by "
                "random numbers that others draw, too"
            )
            return "update", f"each {unit} changes its gradients before the sum: {cause}; sum first"
        if weights is not None and np.abs(weights - 1).max() > 5e-5:
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
        elif is_right_if_alike():
            by = "unless all examples are the same: labels may be those of others"
            advice = "divide X and y in the same way, and use what depends on other examples as on one"
        return "update", f"{where} differs from that of one {unit}, {by}; {advice}"


def wrong_split(shards: Shards, n: int, function: str = "the step", unit: str = "device") -> str:
    """Whether each of n examples is on exactly one device. shards: the indices of the examples on each device;
    negative or too large: not an example of this batch."""
    indices = [list(shard) for shard in shards]
    found, batch, k = sorted(sum(indices, [])), list(range(n)), len(indices)
    if found == batch:
        return ""
    if not {*found} <= {*batch}:
        return f"{function} returns examples of an earlier batch, or changes them; make a new copy of each batch"
    if k > 1 and all(shard == indices[0] for shard in indices):
        part = "whole batch" if len(indices[0]) == n else "same shard"
        return f"{function} gives the {part} to each of {k} {UNITS[unit]}; give each a different part"
    if missing := n - len({*found}):
        advice = "with a remainder, some shards need one more example" if n % k else "return each example once"
        return f"{function} drops {missing} of {n} examples; {advice}"
    return f"{function} gives some of {n} examples to several {UNITS[unit]}"


def not_finite(step: Step) -> str:
    """Whether all numbers of a step are finite."""
    arrays = {"losses": np.concatenate([*step.losses, np.zeros(0)]), **step.changes[0]}
    wrong = [name for name, array in arrays.items() if not np.isfinite(array).all()]
    if not wrong:
        return ""
    value = "nan" if np.isnan(arrays[wrong[0]]).any() else "infinite"
    where = "losses" if wrong[0] == "losses" else f"gradients ({some(wrong)})"
    return f"the {where} of a step are {value}; look for log(0), division by 0, or overflow"


def _without_gradient(grads: Sequence[Arrays]) -> set[str]:
    """The arrays whose gradients are 0 except for rounding in float64, as of a bias before batch normalization. Adam
    makes a large step of them."""
    names = grads[0] if grads else ()
    return {n for n in names if all(norm(g.get(n, 0)) < 1e-10 * norm(flat(g, [*g])) for g in grads)}


def _losses(several: Sequence[np.ndarray], one: Sequence[np.ndarray], n: int) -> str:
    """Whether the losses that the step returns are those of the examples, if it returns one for each."""
    expected, found = (np.concatenate([*map(np.ravel, losses), np.zeros(0)]) for losses in (one, several))
    if len(expected) != n or len(found) != n or equal_losses(found, expected):
        return ""
    advice = "compute each as on one device, from its own image and label"
    return f"the losses are not those of the batch; divide X and y in the same way, and {advice}"


def _are_means(several: Sequence[np.ndarray], one: Sequence[np.ndarray]) -> bool:
    """Whether each device returns one loss, and these are the means of the shards."""
    is_single = all(len(losses) == 1 for losses in [*several, *one]) and len(one) == 1
    return is_single and bool(np.isclose(np.mean(several), one[0][0], rtol=1e-4))


def equal_losses(losses: np.ndarray, expected: np.ndarray) -> bool:
    """Whether losses are the same, in any order."""
    return losses.shape == expected.shape and np.allclose(np.sort(losses), np.sort(expected), rtol=1e-4, atol=1e-4)


def distance(change: Arrays, expected: Arrays, names: Sequence[str]) -> float:
    """How far an update is from another, relative to its size; without the tenth of the elements that are farthest,
    because an optimizer such as Adam makes a large step of a gradient that is 0 except for rounding."""
    error = np.sort(np.abs(flat(change, names) - flat(expected, names)))
    return norm(error[: len(error) - len(error) // 10]) / (norm(flat(expected, names)) or 1)


def norm(array: Any) -> float:
    return float(np.linalg.norm(array))


def flat(arrays: Arrays, names: Sequence[str]) -> np.ndarray:
    return np.concatenate([np.ravel(arrays[name]) for name in names] or [np.zeros(0)])


def far(change: Arrays, expected: Arrays, bound: dict[str, float]) -> list[str]:
    """The arrays that differ by more than a bound, or are not finite."""
    return [name for name, array in expected.items() if not norm(change[name] - array) <= bound[name]]


def _where(wrong: Arrays, expected: Arrays) -> str:
    """In which arrays an update is wrong, or in which part of one; empty: in most. wrong: for each element."""
    if sum(mask.sum() for mask in wrong.values()) > 0.5 * sum(np.count_nonzero(value) for value in expected.values()):
        return ""
    counts = {name: f"{mask.sum()} of {mask.size} elements of {name}" for name, mask in wrong.items()}
    return " of " + some([counts[name] if mask.mean() < 0.5 else name for name, mask in wrong.items()])


def fitted(result: np.ndarray, parts: Sequence[np.ndarray], rest: float) -> np.ndarray | None:
    """The weights with which a result is a sum of parts, except for a rest; None if it is no such sum, or too short to
    tell."""
    if result.size <= len(parts) or not np.isfinite(result).all():
        return None
    columns = np.stack([np.ravel(part) for part in parts], axis=1)
    weights = np.linalg.lstsq(columns, np.ravel(result), rcond=1e-6)[0]
    return weights if norm(columns @ weights - np.ravel(result)) <= rest * (1 + np.abs(weights).sum()) else None


def some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def names_that_differ(devices: Sequence[Arrays]) -> str:
    """The first names of arrays that are not the same on all devices."""
    if not devices:
        return ""
    first, *others = devices
    return some([n for n, a in first.items() if not all(np.array_equal(a, other.get(n, ())) for other in others)])
