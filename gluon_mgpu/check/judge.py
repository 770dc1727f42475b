"""Whether a step on several devices is the step on one, and the likeliest mistake if not: for MXNet, PyTorch and JAX.

`compare` lets a driver take the same steps on several devices and on one, in float32 and in float64, each time with a
fresh copy of the user's code. In float64, rounding is so small that it cannot be confused with a mistake. If a step
differs, `Evidence` tells from what each device's examples add to the update what went wrong. Needs only NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Optional, Protocol

import numpy as np

Arrays = dict[str, np.ndarray]
Claims = dict[str, Optional[str]]  # {claim: what is wrong}; "": nothing; None: there was nothing to check
Shards = Sequence[Sequence[int]]  # the indices of the examples of each device
SAME, DIFFERENT, UNKNOWN = 0, 1, 3  # verdicts; also the exit status of the command
UNITS = {"device": "devices", "process": "processes"}
TOLERANCE = 1e-6  # relative difference in float64 that may come from constants in float32
ROUNDING = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}  # largest relative error of one operation
EXAMPLES = 12  # at least, in a batch
TERMS = 1000  # of a typical sum in a gradient
LEFT = "look for what a step leaves behind, such as gradients, a buffer or a counter"
EQUALLY = "add the gradients of all examples, and divide by the size of the batch"
MAY_BE_RIGHT = {"split", "sum"}  # an unusual split or sum may be right, if the step is that of one device
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
    what the step returned."""

    changes: list[Arrays]
    grads: list[Arrays] = field(default_factory=list)
    losses: list[np.ndarray] = field(default_factory=list)


@dataclass
class Session:
    """Steps that were taken one after the other. start: the parameters of each device before the first step. failure:
    why the steps ended early; late: because of the time limit. facts: see `Driver.run`."""

    start: list[Arrays] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    failure: str = ""
    late: bool = False
    facts: dict[str, Any] = field(default_factory=dict)

    def fact(self, name: str) -> Any:
        return self.facts.get(name)


class Driver(Protocol):
    """Takes steps with one framework. unit: "device" or "process"."""

    unit: str

    def batch(self, i: int, n: int) -> Any:
        """Batch i, of n examples."""

    def take(self, batch: Any, examples: Sequence[int]) -> Any:
        """Some examples of a batch."""

    def same_labels(self, batch: Any) -> Any:
        """A batch in which all examples have the label of the first; None if unknown."""

    def split(self, k: int, batch: Any, n: int) -> Shards | None:
        """The examples on each of k devices; None if unknown."""

    def run(self, k: int, batches: Sequence[Any], **options: Any) -> Session:
        """Take a step with each batch on k devices, with a fresh copy of the user's code.

        double: in float64. shards: for each batch, what batch normalization sees at a time. seed: of the random numbers
        that a step draws. clear: set gradients that a step leaves to 0. Facts: "normalized": whether the network
        has batch normalization; "statistics": the names of its running statistics; "synced": whether a step makes them
        equal; "low": the lowest precision that is used; "how": for the user; "left": whether a step leaves gradients;
        "random": whether a step draws random numbers; "reason": why the step cannot be compared; "wrong": a mistake
        that the driver has seen.
        """


@dataclass
class Report:
    """The claims, how the steps were compared (such as "with dropout off"), warnings, and lines with numbers."""

    claims: Claims
    unit: str = "device"
    how: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def _wrong(self) -> list[tuple[str, str]]:
        wrong = [(claim, reason) for claim, reason in self.claims.items() if reason]
        return wrong if {claim for claim, _ in wrong} - MAY_BE_RIGHT else []

    @property
    def status(self) -> int:
        """SAME, DIFFERENT or UNKNOWN."""
        wrong = self._wrong()
        if not wrong:
            return SAME
        return UNKNOWN if wrong[0][0] in NOT_COMPARED else DIFFERENT

    @property
    def same(self) -> bool:
        return self.status == SAME

    @property
    def verdict(self) -> str:
        """Empty if the step on several devices is the step on one, else the likeliest reason."""
        if not (wrong := self._wrong()):
            return ""
        claim, reason = wrong[0]
        beginning = BEGINNINGS.get(claim, "does not take the same step as on one {unit}")
        return f"{beginning.format(unit=self.unit, units=UNITS[self.unit])}: {reason}"

    @property
    def line(self) -> str:
        """What to tell the user, whatever the verdict."""
        return self.verdict or ", ".join([f"takes the same step as on one {self.unit}", *self.how])

    def explain(self) -> str:
        """The verdict and the numbers, one per line."""
        return "\n".join([self.line, *self.notes])


def compare(driver: Driver, k: int, steps: int = 3, even: bool = False) -> Report:
    """Compare `steps` steps, and one with an uneven batch, on k devices and on one. even: the uneven batch may differ;
    then there is a warning."""
    n = -(-EXAMPLES // k) * k
    sizes = [n] * steps + [n + 1]
    batches = [driver.batch(i, size) for i, size in enumerate(sizes)]
    one = driver.run(1, batches)
    if one.fact("reason") or len(one.steps) < steps:
        return Report({"runs" if one.failure else "compared": one.fact("reason") or one.failure}, driver.unit)
    again = driver.run(1, batches[:1], seed=1)
    if not again.steps or differ([again.steps[0].changes[0], one.steps[0].changes[0]]):
        reason = "a step draws random numbers, so that the same step twice gives different results; draw none"
        return Report({"repeatable": reason}, driver.unit)
    comparison = _Comparison(driver, k, sizes, batches, one)
    return comparison.report(even)


class _Comparison:
    """several, one: sessions in float32; double: in float64, empty if the code cannot."""

    def __init__(self, driver: Driver, k: int, sizes: Sequence[int], batches: Sequence[Any], one: Session) -> None:
        self.driver, self.k, self.sizes, self.batches, self.one = driver, k, sizes, batches, one
        self.unit, self.names = driver.unit, [f"{driver.unit} {rank}" for rank in range(k)]
        self.shards: list[Shards] | None = None
        if one.fact("normalized"):
            self.shards = [self._shards(batch, size) for batch, size in zip(batches, sizes)]
            self.one = driver.run(1, batches, shards=self.shards)
        self.several = driver.run(k, batches)
        self.double = [Session(), Session()]
        if self.several.steps and not self.several.fact("wrong"):
            self.double = [driver.run(n, batches, double=True, shards=self.shards) for n in (k, 1)]
        self.in_double = len(self.double[1].steps) >= min(1, len(self.one.steps)) and bool(self.double[0].steps)
        facts = [session.facts for session in (self.one, self.several, *self.double)]
        self.low = max((f.get("low") or "float32" for f in facts), key=ROUNDING.__getitem__)
        self.how = [*dict.fromkeys(text for f in facts for text in f.get("how", []))]
        if self.shards:
            self.how.append(f"batch normalization of the examples of each {self.unit}")
        self.statistics = {*(self.one.fact("statistics") or ())}

    def _shards(self, batch: Any, n: int) -> Shards:
        found = self.driver.split(self.k, batch, n)
        usual = [part.tolist() for part in np.array_split(range(n), self.k)]
        return found if found and sorted(sum(map(list, found), [])) == [*range(n)] else usual

    def report(self, even: bool) -> Report:
        report = Report({}, self.unit, self.how)
        report.claims = self._claims(report, even)
        return report

    def _claims(self, report: Report, even: bool) -> Claims:
        last = len(self.batches) - 1
        if self.several.fact("reason"):
            return {"compared": self.several.fact("reason")}
        claims: Claims = {"start": start(self.several.start) if self.several.start else ""}
        wrong = [i for i in range(len(self.one.steps)) if self._wrong(i)]
        failed = len(self.several.steps)
        if failed < len(self.one.steps) and failed not in wrong and not [i for i in wrong if i < failed]:
            claim = "compared" if self.several.late else "several"
            reason = self.several.failure
            if failed == last:
                reason = f"only with uneven batches ({self.sizes[last]} examples): {reason}"
            if even and failed == last:
                report.notes.append(f"warning: uneven batches fail: {self.several.failure}")
            else:
                return {**claims, claim: reason}
        if self.several.fact("wrong"):
            return {**claims, "update": self.several.fact("wrong")}
        if even and wrong == [last]:
            found = self._diagnose(last)
            reason = next((reason for reason in found.values() if reason), "the update differs")
            report.notes.append(f"warning: uneven batches ({self.sizes[last]} examples) are wrong: {reason}")
            wrong = []
        if not wrong:
            return {**claims, **self._right(report)}
        if claims["start"]:
            return claims
        if wrong[0] in (0, last):
            found = self._diagnose(wrong[0])
        else:
            found = {"update": f"only the first update is that of one {self.unit}; {LEFT}"}
        if not any(found.values()):
            found = {"update": f"the update differs in step {wrong[0] + 1}; {LEFT}"}
        return {**claims, **found}

    def _wrong(self, i: int) -> bool:
        """Whether step i on several devices is another one."""
        sessions = self.double if self.in_double else [self.several, self.one]
        if any(len(session.steps) <= i for session in sessions):
            sessions = [self.several, self.one]
        if any(len(session.steps) <= i for session in sessions):
            return False
        several, one = (session.steps[i] for session in sessions)
        expected, bound = one.changes[0], {}
        names = [name for name in expected if name not in self.statistics]
        if sessions[0] is self.several:
            exact = self.double[1].steps[i].changes[0] if len(self.double[1].steps) > i else None
            bound = rounding_bound(expected, exact, self.one.start[0], ROUNDING[self.low])
        else:
            bound = exact_bound(expected)
        return (
            _replicas_differ(self, i)
            or any(
                not norm(change[name] - expected[name]) <= bound[name] for change in several.changes for name in names
            )
            or bool(_losses(several.losses, one.losses, self.sizes[i]))
        )

    def _right(self, report: Report) -> Claims:
        """The claims if each step is the same in the precision in which they were compared."""
        if self.one.fact("left"):
            cleared = self.driver.run(1, self.batches, clear=True, shards=self.shards)
            pairs = zip(cleared.steps[:2], self.one.steps[:2])
            if any(differ([a.changes[0], b.changes[0]]) for a, b in pairs):
                return {"update": "a step adds to the gradients of the step before; call zero_grad after each update"}
        if not any(a.any() for step in self.one.steps for a in step.changes[0].values()):
            return {"update": "the steps do not change the parameters; assign in place"}
        claims: Claims = dict.fromkeys(["devices", "sum", "losses", "replicas", "update"], "")
        if examples := self.driver.split(self.k, self.batches[0], self.sizes[0]):
            claims["devices"] = split(examples, self.sizes[0], "the step")
        if not self.in_double:
            report.notes.append(f"compared only in float32, because float64 fails: {self.double[0].failure}")
            return claims
        exact = {n: a for n, a in self.double[1].steps[0].changes[0].items() if n not in self.statistics}
        several, one = ({n: s.steps[0].changes[0][n] for n in exact} for s in (self.several, self.one))
        unit = ROUNDING[self.low]
        # an optimizer such as Adam may make a large step of a gradient that is 0 except for rounding
        zero = [n for n in exact if norm(one[n] - exact[n]) > max(0.1, 30 * unit) * norm(exact[n])]
        if zero and sum(exact[n].size for n in zero) < 0.1 * sum(a.size for a in exact.values()):
            report.notes.append(f"compared only in float64, because rounding decides in {self.low}: {_some(zero)}")
            several, one, exact = ({n: a for n, a in x.items() if n not in zero} for x in (several, one, exact))
        apart, far = distance(several, exact), distance(one, exact)
        bound = rounding_bound(one, exact, self.one.start[0], unit)
        explained = norm(np.array([*bound.values()])) / (norm_of(exact) or 1)
        report.notes.append(
            f"distance from the same step in float64: {apart:.1e} on several {UNITS[self.unit]}, {far:.1e} on one; "
            f"rounding in {self.low} explains {explained:.1e}"
        )
        if self.low != "float32":
            report.how.append(f"in float64; rounding in {self.low} changes it by {apart:.0e}")
        if far > max(1e-2, 30 * unit * (1 + norm_of(self.one.start[0]) / (norm_of(exact) or 1))):
            reason = f"float32 and float64 differ by {far:.0%} on one {self.unit}, more than rounding explains"
            return {"compared": reason}
        if apart > max(1e-2, 30 * unit, 8 * explained):
            reason = f"the update is right in float64, but differs by {apart:.1g} in {self.low}"
            return {**claims, "update": f"{reason}; rounding explains only {explained:.1g}"}
        return claims

    def _diagnose(self, i: int) -> Claims:
        """What is wrong with step i, taken by fresh copies of the code."""
        batch, n, k = self.batches[i], self.sizes[i], self.k
        options: dict[str, Any] = {"double": True} if self.in_double else {}
        shards = [self.shards[i]] if self.shards else None

        def on_one(some: Any, **more: Any) -> Step | None:
            session = self.driver.run(1, [some], **options, **more)
            return session.steps[0] if session.steps else None

        several = self.driver.run(k, [batch], **options)
        whole = on_one(batch, shards=shards)
        if not several.steps or not whole:
            return {"several": several.failure}
        examples = self.driver.split(k, batch, n)
        parts = examples if examples and all(examples) else self._shards(batch, n)
        alone = [on_one(self.driver.take(batch, part)) for part in parts]
        if not all(alone):
            return {"update": f"the update differs from that of one {self.unit}"}
        evidence = Evidence(self, n, parts, several, whole, [step for step in alone if step], examples)
        if not self.in_double:
            evidence.bound = rounding_bound(whole.changes[0], None, several.start[0], ROUNDING[self.low])
        turned = on_one(self.driver.take(batch, range(n)[::-1])) if not shards else None
        claims = evidence.claims(turned.changes[0] if turned else None)
        same = self.driver.same_labels(batch)
        if claims["update"] and same is not None and evidence.differs(evidence.mean):
            labels = self.driver.run(k, [same], **options), on_one(same, shards=shards)
            if (
                labels[0].steps
                and labels[1]
                and not any(evidence.wrong(change, labels[1].changes[0]) for change in labels[0].steps[0].changes)
            ):
                claims["update"] = "examples get the labels of others; divide X and y in the same way"
        return claims


def _replicas_differ(of: _Comparison, i: int) -> bool:
    """Whether the devices have different parameters after step i."""
    if len(of.several.steps) <= i:
        return False
    names = [n for n in of.several.steps[i].changes[0] if not (of.several.fact("synced") and n in of.statistics)]
    return bool(differ([{n: change[n] for n in names} for change in of.several.steps[i].changes]))


class Evidence:
    """A step on several devices, on one, and with the examples of each device alone."""

    def __init__(
        self, of: _Comparison, n: int, parts: Shards, several: Session, whole: Step, alone: list[Step], examples: Any
    ) -> None:
        self.unit, self.processes, self.n, self.synced = of.unit, of.names, n, several.fact("synced")
        self.random = several.fact("random")
        self.low, self.examples, self.sizes = of.low, examples, [len(part) for part in parts]
        self.statistics, self.float32 = of.statistics, of.several.steps[0]
        step = several.steps[0]
        self.losses = step.losses, whole.losses
        self.changes, self.whole = step.changes, whole.changes[0]
        self.names = [name for name in self.whole if name not in of.statistics]
        self.set_parts([step.changes[0] for step in alone])
        # what the optimizer got is a sum, even if what it makes of it is none
        self.linear: tuple[Arrays, list[Arrays]] | None = None
        if step.grads and step.grads[0] and whole.grads and all(one.grads for one in alone):
            self.linear = step.grads[0], self._scaled([one.grads[0] for one in alone], whole.grads[0])

    def set_parts(self, alone: list[Arrays]) -> None:
        self.alone = alone
        self.mean = self._sum([{a: c * s / self.n for a, c in one.items()} for s, one in zip(self.sizes, alone)])
        self.whole = {name: self.whole[name] for name in self.names}
        self.parts = self._scaled(alone, self.whole)
        self.bound = exact_bound(self.whole, self.parts)

    def _scaled(self, alone: Sequence[Arrays], whole: Arrays) -> list[Arrays]:
        """What each device's examples add: a share of what they do alone, unless the step computes sums."""
        shares = [{n: a * s / self.n for n, a in one.items()} for s, one in zip(self.sizes, alone)]
        names = [name for name in whole if all(name in one for one in alone)]
        sums, means = ({n: np.sum([p[n] for p in parts], axis=0) for n in names} for parts in (alone, shares))
        whole = {name: whole[name] for name in names}
        return [dict(p) for p in (alone if distance(sums, whole) < distance(means, whole) else shares)]

    def _sum(self, parts: Sequence[Arrays]) -> Arrays:
        return {name: np.sum([part[name] for part in parts], axis=0) for name in self.names}

    def _far(self, change: Arrays) -> float:
        return distance(change, self.whole)

    def wrong(self, change: Arrays, expected: Arrays | None = None) -> list[str]:
        """The arrays that differ by more than rounding explains."""
        expected = expected or self.whole
        return [n for n in self.names if not norm(change[n] - expected[n]) <= self.bound[n]]

    def differs(self, expected: Arrays) -> bool:
        return any(self.wrong(change, expected) for change in self.changes)

    def weights(self, change: Arrays, name: str) -> np.ndarray | None:
        """The weight of each device's part in the change of an array; None if it is no sum of the parts."""
        if not np.isfinite(change[name]).all():
            return None
        return fitted(change[name], [part[name] for part in self.parts], 2 * self.bound[name])

    def claims(self, turned: Arrays | None) -> Claims:
        claims: Claims = {
            "devices": split(self.examples, self.n, "the step") if self.examples else "",
            "sum": self._missing(),
            "losses": _losses(*self.losses, self.n),
            "replicas": self._replicas(),
            "update": self._update(turned),
        }
        right = not any(self.wrong(change) for change in self.changes)
        if right and claims["replicas"] == "":
            return {**claims, "sum": ""}
        if claims["update"] and not claims["devices"] and self._decided(claims):
            claims |= {"sum": "", "replicas": ""}
        return claims

    def _decided(self, claims: Claims) -> bool:
        """Whether a wrong weight explains more than a missing sum."""
        return str(claims["update"]).startswith("shards of different sizes")

    def _missing(self) -> str:
        """Whether each device updates with the gradients of all."""
        wrong = [self.wrong(change) for change in self.changes]
        own: list[str] = []
        not_all: list[str] = []
        only: list[tuple[str, int]] = []
        for name in self.names:
            ranks = [rank for rank, names in enumerate(wrong) if name in names and self.whole[name].any()]
            contained = [self._contained(rank, name) for rank in range(len(wrong))]
            if ranks and all(contained[rank] == [rank] for rank in ranks):
                (own if len(ranks) == len(wrong) else not_all).append(name)
            elif ranks and len(contained[0]) == 1 and all(c == contained[0] for c in contained):
                only.append((name, contained[0][0]))
        if own:
            of = "" if len(own) == len(self.names) else f" for {_some(own)}"
            return (
                f"each {self.unit} updates with its own gradients{of}; sum them in the last backward pass, before the "
                "update"
            )
        if not_all:
            return f"one {self.unit} updates with its own gradients ({_some(not_all)}); leave the sum in all"
        if only and not (self.examples and split(self.examples, self.n)):
            names = _some([name for name, _ in only])
            return f"the update uses only the gradients of {self.processes[only[0][1]]} ({names}); add the others'"
        return ""

    def _contained(self, rank: int, name: str) -> list[int]:
        """The devices whose gradients are in a device's update of an array; empty if unknown."""
        change, own = self.changes[rank][name], self.alone[rank][name]
        if own.any() and norm(change - own) <= 2 * self.bound[name]:
            return [rank]
        weights = self.weights(self.changes[rank], name)
        return [] if weights is None else [i for i, w in enumerate(weights) if abs(w) > 0.01]

    def _replicas(self) -> str:
        names = differ([{n: change[n] for n in self.names} for change in self.changes])
        if names:
            wrong = [rank for rank, change in enumerate(self.changes) if self.wrong(change)]
            if not wrong:
                advice = "add in the same order in each"
                return f"the replicas have parameters that differ by rounding ({names}); {advice}"
            if len(wrong) < len(self.changes):
                advice = f"leave the sum in each {self.unit}"
                return f"the step of {self.processes[wrong[0]]} is not that of the others ({names}); {advice}"
            advice = "sum all gradients before the update, as DDP does in a backward pass that is not in no_sync"
            return f"after a step, the replicas have different parameters ({names}) and different gradients; {advice}"
        changes = [{n: change[n] for n in self.statistics} for change in self.changes]
        if not self.synced and (names := differ(changes)):
            return f"the replicas have different running statistics ({names}); average or broadcast them, as DDP does"
        return ""

    def _update(self, turned: Arrays | None) -> str:
        change = max(self.changes, key=self._far)
        wrong = self.wrong(change)
        if not wrong:
            return ""
        if infinite := [name for name in wrong if not np.isfinite(change[name]).all()]:
            return f"the update is not finite ({_some(infinite)})"
        weights = [self.weights(change, name) for name in wrong if self.whole[name].any()]
        if weights and all(
            w is not None and np.ptp(w * self.sizes) < 1e-3 * abs(w[0]) and np.ptp(w) > 0.01 for w in weights
        ):
            sizes = ", ".join(map(str, self.sizes))
            return f"shards of different sizes ({sizes} examples) have the same weight; {EQUALLY}"
        factor = np.vdot(flat(change, wrong), flat(self.whole, wrong)) / (norm(flat(self.whole, wrong)) ** 2 or 1)
        rest, error = (norm(flat(change, wrong) - f * flat(self.whole, wrong)) for f in (factor, 1))
        scaled = rest < 0.05 * error
        for extreme in (np.max, np.min):
            if not self.wrong(change, {n: extreme([part[n] for part in self.parts], axis=0) for n in self.names}):
                return f"the update has the largest or smallest of the {UNITS[self.unit]}' gradients; add them"
        if turned and self.wrong(turned) and not self.random:
            return f"the update depends on the order of the examples, also on one {self.unit}; {EQUALLY}"
        scatters = all(norm(change[n] - self.whole[n]) < 0.02 * norm(self.whole[n]) for n in wrong)
        if not scaled and not scatters and self.wrong(self.mean) and not self.wrong(change, self.mean):
            if self.random:
                return f"each {self.unit} draws the same random numbers; use another key or seed in each"
            cause = "for example by clipping, or by dividing by a number of its own examples"
            return f"each {self.unit} changes its gradients before the sum, {cause}; sum first"
        return self._explained(change, wrong, factor, scaled)

    def _explained(self, change: Arrays, wrong: list[str], factor: float, scaled: bool) -> str:
        """What a wrong update looks like. factor: the update of one device that is nearest; scaled: it is that one."""
        whole, k, unit = self.whole, len(self.processes), self.unit
        if not any(value.any() for value in whole.values()):
            return f"the step changes the parameters on several {UNITS[unit]}, but not on one; treat all alike"
        of = f" of {_some(wrong)}" if len(wrong) < len(self.names) else ""
        if scaled and abs(factor - 1) > TOLERANCE:
            advice = f"use the same learning rate and divisor for any number of {UNITS[unit]}"
            if abs(factor - k) < 1e-3:
                advice = "add the gradients once, keep the learning rate, and divide by the size of the whole batch"
                advice += ", not of a shard"
            elif abs(factor - 1 / k) < 1e-3:
                advice = "add the gradients, and divide only by the size of the batch"
            elif abs(factor) < 1e-3:
                advice = f"let each {unit} change all parameters"
            return f"the update{of} is {factor:.5g} times that of one {unit}; {advice}"
        found, parts = self.linear or (change, self.parts)
        names = [name for name in (found if self.linear else wrong) if all(name in part for part in parts)]
        where, masked = "", names
        if not self.linear:
            mask = {n: np.abs(change[n] - whole[n]) > self.bound[n] / whole[n].size ** 0.5 for n in wrong}
            where = _where(mask, whole)
            found = {n: change[n][mask[n]] for n in names}
            parts = [{n: part[n][mask[n]] for n in names} for part in parts]
        values, columns = flat(found, masked), [flat(part, masked) for part in parts]
        weights = fitted(values, columns, 1e-3 * norm(values))
        if weights is not None and np.abs(weights - 1).max() > 5e-5:
            used = [name for name, weight in zip(self.processes, weights) if abs(weight) > 1e-3]
            if len(used) < k and np.allclose(weights[np.abs(weights) > 1e-3], 1, atol=1e-2):
                return f"the update{where} uses only the gradients of {', '.join(used)}; add those of the others"
            advice = "each shard must count once; look for clipping or scaling before the sum"
            sum_ = weighted_names(weights, self.processes)
            if np.abs(weights - 1).max() < 0.05:
                advice = f"a factor that is the same for all elements of a {unit} is not rounding; {advice}"
            return f"the update{where} adds the shards' gradients as {sum_}; {advice}"
        more = {name: change[name] - whole[name] for name in wrong}
        error = max((norm(more[n]) / (norm(whole[n]) or 1) for n in wrong), default=0.0)
        worst = max(wrong, key=lambda n: norm(more[n]) / (norm(whole[n]) or 1))
        if error < 0.02:
            advice = "keep float32 until the sum is complete"
            return (
                f"the update differs from that of one {unit}, by {error:.1g} for {worst}; the errors scatter by "
                f"element, as with float16, bfloat16 or 8-bit numbers; {advice}"
            )
        by = f"{error:.0%}" if error < 100 else "far"
        advice = "if all else is right, look for clipping or weight decay before the sum"
        return f"the update differs from that of one {unit}, by {by} for {worst}; {advice}"


def start(devices: Sequence[Arrays]) -> str:
    """Whether all devices start with the same parameters."""
    names = differ(devices)
    return f"the devices start with different parameters ({names}); give each a copy of the same" if names else ""


def split(shards: Shards, n: int, function: str = "split_and_load") -> str:
    """Whether each of n examples is on exactly one device. shards: the indices of the examples on each device;
    negative or too large: not an example of this batch."""
    indices = [list(shard) for shard in shards]
    found, batch, k = sorted(sum(indices, [])), list(range(n)), len(indices)
    if found == batch:
        return ""
    if not {*found} <= {*batch}:
        return f"{function} returns examples of an earlier batch; make a new copy of each batch"
    if k > 1 and all(shard == indices[0] for shard in indices):
        part = "whole batch" if len(indices[0]) == n else "same shard"
        return f"{function} gives the {part} to each of {k} devices; give each a different part"
    if missing := n - len({*found}):
        advice = "with a remainder, some shards need one more example" if n % k else "return each example once"
        return f"{function} drops {missing} of {n} examples; {advice}"
    return f"{function} gives some of {n} examples to several devices"


def exact_bound(expected: Arrays, parts: Sequence[Arrays] = ()) -> dict[str, float]:
    """How far updates in float64 may be apart."""
    least = 1e-2 * norm_of(expected)
    sizes = {n: max([norm(a), least, sum(norm(part[n]) for part in parts)]) for n, a in expected.items()}
    return {name: TOLERANCE * size for name, size in sizes.items()}


def rounding_bound(one: Arrays, exact: Arrays | None, start: Arrays, unit: float) -> dict[str, float]:
    """How far rounding can move the update of each parameter (a norm): 8 times as far as one device is from float64,
    or as random errors in a sum of TERMS numbers add up to. unit: the relative error of one operation."""
    bound, least, float32 = {}, 1e-3 * norm_of(one), ROUNDING["float32"]
    for name, value in one.items():
        size = max(norm(value), least)
        random = float32 * (TERMS**0.5 * size + norm(start[name])) + (unit > float32) * unit * size
        bound[name] = 8 * max(norm(value - exact[name]) if exact else 0.0, random)
    return bound


def _losses(several: Sequence[np.ndarray], one: Sequence[np.ndarray], n: int) -> str:
    """Whether the losses that the step returns are those of the examples, if it returns one for each."""
    expected, found = (np.concatenate([*map(np.ravel, losses), np.zeros(0)]) for losses in (one, several))
    if len(expected) != n or len(found) != n:
        return ""
    return "" if alike(found, expected) else "the losses are not those of the batch; divide X and y in the same way"


def alike(losses: np.ndarray, expected: np.ndarray, tolerance: float = 1e-4) -> bool:
    """Whether losses are the same, in any order."""
    same = losses.shape == expected.shape
    return same and np.allclose(np.sort(losses), np.sort(expected), rtol=tolerance, atol=tolerance)


def distance(change: Arrays, expected: Arrays) -> float:
    """How far an update is from another, relative to its size; without the few elements that are farthest, because an
    optimizer such as Adam may make a large step of a gradient that is 0 except for rounding."""
    names = [*expected]
    error = np.sort(np.abs(flat(change, names) - flat(expected, names)))
    error = error[: len(error) - len(error) // 500]
    return norm(error) / (norm_of(expected) or 1)


def norm(array: Any) -> float:
    return float(np.linalg.norm(array))


def norm_of(arrays: Arrays) -> float:
    return sum(norm(a) ** 2 for a in arrays.values()) ** 0.5


def flat(arrays: Arrays, names: Sequence[str]) -> np.ndarray:
    return np.concatenate([np.ravel(arrays[name]) for name in names] or [np.zeros(0)])


def _where(wrong: Arrays, expected: Arrays) -> str:
    """In which arrays an update is wrong, or in which part of one; empty: in most. wrong: for each element."""
    if sum(mask.sum() for mask in wrong.values()) > 0.5 * sum(value.size for value in expected.values()):
        return ""
    parts = [
        name if mask.mean() > 0.5 else f"{mask.sum()} of {mask.size} elements of {name}" for name, mask in wrong.items()
    ]
    return f" of {', '.join(parts[:4])}"


def fitted(result: np.ndarray, parts: Sequence[np.ndarray], rest: float) -> np.ndarray | None:
    """The weights with which a result is a sum of parts, except for a rest; None if it is no such sum, or too short to
    tell."""
    if result.size <= len(parts):
        return None
    columns = np.stack([np.ravel(part) for part in parts], axis=1)
    weights = np.linalg.lstsq(columns, np.ravel(result), rcond=1e-6)[0]
    return weights if norm(columns @ weights - np.ravel(result)) <= rest * (1 + np.abs(weights).sum()) else None


def weighted_names(weights: np.ndarray | None, names: Sequence[str]) -> str:
    """A sum in words, such as 2 × cpu(0) + 1 × cpu(1)."""
    if weights is None:
        return ""
    return " + ".join(f"{w:.5g} × {name}" for w, name in zip(np.round(weights, 5), names) if w) or "0"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def differ(devices: Sequence[Arrays]) -> str:
    """The first names of arrays that are not the same on all devices."""
    if not devices:
        return ""
    first, *others = devices
    return _some([name for name in first if any((first[name] != other[name]).any() for other in others)])


def merged(reports: Sequence[tuple[int, Report]], unit: str) -> Report:
    """One report for several numbers of devices: the first that is not right, or the first."""
    k, report = next(((k, report) for k, report in reports if not report.same), reports[0])
    if not report.same and k != reports[0][0]:
        report.claims = {c: f"with {k} {UNITS[unit]}: {r}" if r else r for c, r in report.claims.items()}
    return report
