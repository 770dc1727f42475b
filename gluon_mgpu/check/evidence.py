"""What is wrong with a step on several devices: `CAUSES` is a table of causes, of which the first that fits is named.

`Evidence` is the wrong step, taken again by fresh copies of the code: on several devices, on one, and on one with the
examples of each device alone. `Terms` is what these examples add to the update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from gluon_mgpu.check.arrays import (
    are_means,
    differing,
    distance,
    equal_losses,
    fitted_weights,
    flat,
    listed,
    norm,
    only,
    places,
    spans,
    total,
    unequal,
    wrong_losses,
    wrong_split,
)
from gluon_mgpu.check.driver import UNITS, Arrays, Driver, Options, Shards, StepResult
from gluon_mgpu.check.sides import Sides

SMALL = 0.02  # an error that may be rounding
LEFT = "look for what a step leaves behind, such as gradients, a buffer or a counter"


class Terms:
    """Updates, or the gradients that the optimizers get, and what the examples of each device add to them.

    several, whole: on each device, and on one. alone: on one, with the examples of each device. sizes: the numbers of
    examples. parts: what they add. sum: of the parts. bound: how far rounding can move each array.
    """

    def __init__(
        self, sides: Sides, sizes: Sequence[int], several: Sequence[Arrays], whole: Arrays, alone: Sequence[Arrays]
    ) -> None:
        known = [n for n in sides.names if all(n in arrays for arrays in [whole, *several, *alone])]
        names = [n for n in known if all(arrays[n].shape == whole[n].shape for arrays in [*several, *alone])]
        self.several, self.alone, self.whole = several, alone, {name: whole[name] for name in names}
        # a share of what they do alone, unless the step computes sums
        shares = [{n: a[n] * size / sum(sizes) for n in names} for a, size in zip(alone, sizes)]
        self.parts = min(shares, alone, key=lambda parts: distance(total(parts, names), self.whole, names))
        self.sum = total(self.parts, names)
        self.bound = sides.bounds(self.whole, self.parts)

    def differing(self, arrays: Arrays, expected: Arrays | None = None) -> list[str]:
        return differing(arrays, expected or self.whole, self.bound)

    @property
    def adds_up(self) -> bool:
        """Whether what is done on one device is the sum of the parts."""
        return not self.differing(self.sum)

    @cached_property
    def worst(self) -> Arrays:
        """The arrays of the device on which most of them are wrong."""
        return max(self.several, key=lambda arrays: len(self.differing(arrays)))

    @cached_property
    def wrong(self) -> list[str]:
        """Which are wrong there."""
        return self.differing(self.worst)

    @cached_property
    def elements(self) -> Arrays:
        """Which of their elements are wrong."""
        limits = {n: self.bound[n] / self.whole[n].size ** 0.5 for n in self.wrong}
        return {n: np.abs(self.worst[n] - self.whole[n]) > limit for n, limit in limits.items()}

    @cached_property
    def weights(self) -> np.ndarray | None:
        """The weight of each device's part in these elements; None if they are no sum of the parts, or right."""
        if not self.wrong:
            return None
        values, *parts = (
            np.concatenate([arrays[n][self.elements[n]] for n in self.wrong]) for arrays in (self.worst, *self.parts)
        )
        return fitted_weights(values, parts, 1e-3 * norm(values))

    @property
    def largest_error(self) -> tuple[float, str]:
        """Relative to the right array, and its name."""
        return max((norm(self.worst[n] - self.whole[n]) / (norm(self.whole[n]) or 1), n) for n in self.wrong)

    def is_own(self, name: str, rank: int) -> bool:
        """Whether a device uses only the gradients of its own examples for an array."""
        found, own, rest = self.several[rank][name], self.alone[rank][name], 2 * self.bound[name]
        if own.any() and norm(found - own) <= rest:
            return True
        weights = fitted_weights(found, [part[name] for part in self.parts], rest)
        return weights is not None and [i for i, w in enumerate(weights) if abs(w) > 0.01] == [rank]


@dataclass
class Evidence:
    """A wrong step."""

    driver: Driver
    sides: Sides  # of all steps that were compared
    every: set[str]  # the names of what they change
    k: int
    number: int  # of the step, from 0
    size: int  # of its batch
    batches: Sequence[Any]  # of this step, and of those before it if they matter
    shards: Sequence[Shards]  # see `Options`

    def __post_init__(self) -> None:
        self.unit, self.units = self.driver.unit, UNITS[self.driver.unit]
        self.devices = [f"{self.unit} {rank}" for rank in range(self.k)]
        self.options = Options(double=self.sides.precision == "float64")
        self.examples = self.driver.split(self.k, self.batches[-1], self.size)
        self.parts = usual_parts(self.examples, self.k, self.size)
        self.sizes = [len(part) for part in self.parts]

    def take(self, k: int, batches: Sequence[Any], **options: Any) -> StepResult | None:
        """The last of some steps; None if one fails."""
        session = self.driver.run(k, batches, replace(self.options, **options))
        return session.steps[-1] if len(session.steps) == len(batches) else None

    def is_right(self, batches: Sequence[Any], **options: Any) -> bool:
        """Whether the step with other batches, or other options, is that of one device."""
        several = self.take(self.k, batches, **options)
        one = several and self.take(1, batches, shards=self.shards, **options)
        return several is not None and one is not None and not self.sides.wrong(several, one)

    @cached_property
    def steps(self) -> list[StepResult]:
        """The step on several devices, on one, and with the examples of each device alone; empty if one fails."""
        alone = [[self.driver.take(batch, part) for batch in self.batches] for part in self.parts]
        found = [self.take(self.k, self.batches), self.take(1, self.batches, shards=self.shards)]
        steps = [step for step in [*found, *(self.take(1, batches) for batches in alone)] if step]
        return steps if len(steps) == self.k + 2 else []

    @property
    def is_wrong_alone(self) -> bool:
        """Whether fresh copies of the code take a wrong step, too."""
        return bool(self.steps and self.terms.wrong)

    def _terms(self, several: list[Arrays], *others: list[Arrays]) -> Terms:
        whole, *alone = (arrays for [arrays] in others)
        return Terms(self.sides, self.sizes, several, whole, alone)

    @cached_property
    def updates(self) -> Terms:
        return self._terms(*(step.changes for step in self.steps))

    @cached_property
    def gradients(self) -> Terms | None:
        """What the optimizers get, if it is known and wrong: it is a sum, even if what they make of it is none."""
        if not all(step.grads and step.grads[0] for step in self.steps):
            return None
        terms = self._terms(*(step.grads for step in self.steps))
        return terms if terms.wrong else None

    @cached_property
    def terms(self) -> Terms:
        return self.gradients or self.updates

    @cached_property
    def raw(self) -> Terms | None:
        """The gradients of the backward passes on one device, if they are known."""
        one = self.steps[1:]
        return self._terms([], *(step.raw for step in one)) if all(step.raw for step in one) else None

    def places_left_out(self, examples: Sequence[int]) -> list[int]:
        """The places of a batch of some examples at which no example has an effect on one device. Others are only
        looked for if the first or the last is one."""
        n, names = len(examples), {*(self.sides.one.facts.params or self.sides.names)}

        def update(chosen: Sequence[int]) -> Arrays:
            step = self.take(1, [self.driver.take(batch, chosen) for batch in self.batches])
            return only(step.changes, names)[0] if step else Arrays()

        def have_no_effect(places: Sequence[int], other: int) -> bool:
            found = update([examples[other if i in places else i] for i in range(n)])
            return bool(found) and not differing(found, whole, bound)

        whole = update(examples)
        bound = self.sides.bounds(whole)
        if n == 1 or not any(have_no_effect([i], i - 1) for i in (n - 1, 0)):
            return []
        places = [i for i in range(n) if have_no_effect([i], i - 1)]
        used = [i for i in range(n) if i not in places]
        # an example that has an effect has none at these places: a mask would not leave it out
        return places if used and have_no_effect(places, used[0]) else []

    @cached_property
    def replicas(self) -> list[str]:
        """The names of what the replicas do not change equally; empty if they differ only by rounding."""
        changes = only(self.updates.several, self.updates.whole)
        return unequal(changes) if any(self.updates.differing(change, changes[0]) for change in changes) else []

    @property
    def reads_all(self) -> bool:
        """Whether each device uses all examples."""
        return all(len({*part}) == self.size for part in self.examples or ())

    @cached_property
    def is_random(self) -> bool:
        """Whether the step is right if all random numbers are the same."""
        return self.sides.several.facts.draws and self.is_right(self.batches, constant=True)

    @cached_property
    def factor(self) -> float | None:
        """The update as a multiple of the right one; None if it is none."""
        if not self.steps or not self.terms.wrong:
            return None
        found, expected = (flat(arrays, self.terms.wrong) for arrays in (self.terms.worst, self.terms.whole))
        factors = fitted_weights(found, [expected], 5e-3 * norm(found - expected))
        return None if factors is None else factors[0] + 0.0  # not -0

    @property
    def update(self) -> str:
        """Which arrays are wrong, or which part of one."""
        return "the update" + places(self.terms.elements, self.terms.whole, self.every)

    @property
    def what_is_no_sum(self) -> str:
        """What a loss may have that depends on other examples, and what to do."""
        return (
            "it may have a mean over tokens, weights, a choice of examples, negatives of others, or statistics of a "
            f"shard; add numerators and denominators over the {self.units}, or gather what it needs, with gradients"
        )

    @property
    def beginning(self) -> str:
        """Where it begins to be wrong, as the end of a sentence."""
        return self.driver.begins(self.k, self.batches, replace(self.options, shards=self.shards))


def usual_parts(examples: Shards | None, k: int, n: int) -> Shards:
    """The examples of each device, if they are known, or those that it usually has."""
    if examples and all(examples) and not wrong_split(examples, n):
        return examples
    return [part.tolist() for part in np.array_split(range(n), k)]


def is_close_to(factor: float | None, expected: float) -> bool:
    return factor is not None and abs(factor - expected) < 1e-3


# Causes. Each function returns the reason if the evidence supports it, else "".


def wrong_shards(e: Evidence) -> str:
    """Not each example is on exactly one device."""
    if not e.examples or e.driver.infers and e.reads_all and not is_close_to(e.factor, e.k):
        return ""  # a device may read all examples, as mixup does, and compute the gradients of some
    return wrong_split(e.examples, e.size, e.driver.divides, e.unit)


def fails_in_parts(e: Evidence) -> str:
    """The step fails with the examples of one device alone, so nothing more is known."""
    return "" if e.steps else f"the update differs from that of one {e.unit}"


def same_random_numbers(e: Evidence) -> str:
    """Each device draws what one device draws for these examples alone."""
    if not e.is_random or e.terms.differing(e.terms.worst, e.terms.sum):
        return ""
    advice = f"draw them for the whole batch and divide them, or fold the {e.unit}'s index into the key"
    return f"each {e.unit} draws the same random numbers for its examples; {advice}"


def own_random_numbers(e: Evidence) -> str:
    """Each device draws other random numbers than one does."""
    reason = f"each {e.unit} draws random numbers of its own; draw those of the whole batch, or none"
    return reason if e.is_random else ""


def other_settings(e: Evidence) -> str:
    """The optimizers get the right gradients, but have other settings."""
    several, one, *_ = e.steps
    return "" if e.gradients else e.sides.wrong_rates(several, one, e.number, e.unit)


def own_gradients(e: Evidence) -> str:
    """Each device updates with the gradients of its own examples: nothing is summed, or not all."""
    terms = e.terms
    wrong = [terms.differing(arrays) for arrays in terms.several]
    own = [n for n in terms.whole if all(n in names and terms.is_own(n, rank) for rank, names in enumerate(wrong))]
    if not own:
        return ""
    is_all, params = len(own) == len(e.every), e.sides.one.facts.params
    what, of, advice = "gradients", "" if is_all else f" for {listed(own)}", e.driver.advice["not summed"]
    if params and not {*own} & {*params}:
        what, advice = "statistics", f"average them over the {e.units}, or gather what they are computed from"
    elif not params and not is_all:
        what = "gradients or statistics"
    return f"each {e.unit} updates with its own {what}{of}; {advice}"


def other_losses(e: Evidence) -> str:
    """The step returns a loss for each example, but not that of the example."""
    several, one, *alone = e.steps
    reason = wrong_losses(several.losses, one.losses, e.size)
    if not reason:
        return ""
    expected, lengths = np.concatenate(one.losses).ravel(), [a.size for a in several.losses]
    if not wrong_losses(several.losses, [a for step in alone for a in step.losses], e.size):
        depends = f"the loss of an example depends on the other examples of its {e.unit}"
        return f"{depends}: its label may be theirs, or {e.what_is_no_sum}"
    if lengths == e.sizes:
        equal = [equal_losses(a.ravel(), expected[[*part]]) for a, part in zip(several.losses, e.parts)]
        others = ", ".join(device for device, is_equal in zip(e.devices, equal) if not is_equal)
        return reason if not any(equal) else reason.replace("the losses", f"the losses of {others}")
    return reason


def other_replicas(e: Evidence) -> str:
    """The replicas are not equal after the step."""
    if not e.replicas:
        return ""
    right = [device for device, change in zip(e.devices, e.updates.several) if not e.updates.differing(change)]
    if right:
        advice = "update each with the sum, in the same way"
        return f"only the step of {', '.join(right)} is right ({listed(e.replicas)}); {advice}"
    params = e.sides.one.facts.params
    if params and not {*e.replicas} & {*params}:
        return f"after a step, {listed(e.replicas)} differ between the {e.units}; compute them from all examples"
    return f"after a step, the replicas have different parameters ({listed(e.replicas)}); {e.driver.advice['replicas']}"


def other_statistics(e: Evidence) -> str:
    """The running statistics of batch normalization are not equal after the step."""
    names = e.sides.unsynced(e.updates.several)
    reason = f"the replicas have different running statistics ({listed(names)}); {e.driver.advice['statistics']}"
    return reason if names else ""


def left_by_earlier_steps(e: Evidence) -> str:
    """Taken by fresh copies of the code, the step is right."""
    return "" if e.terms.wrong else f"the update differs in step {e.number + 1}; {LEFT}"


def not_finite_update(e: Evidence) -> str:
    """The update is nan or infinite."""
    names = [name for name in e.terms.wrong if not np.isfinite(e.terms.worst[name]).all()]
    return f"the update is not finite ({listed(names)})" if names else ""


def frozen_on_one(e: Evidence) -> str:
    """What is wrong does not change on one device."""
    if any(e.terms.whole[name].any() for name in e.terms.wrong):
        return ""
    names = listed(e.terms.wrong)
    return f"{e.k} {e.units} change {names}, but one does not; freeze the same parameters on any number of {e.units}"


def clipped_alone(e: Evidence) -> str:
    """The step is right if nothing is clipped."""
    is_clipped = e.driver.clips() and e.is_right(e.batches, clips=False)
    return f"each {e.unit} clips its own gradients, or by another norm; clip after the sum" if is_clipped else ""


def means_of_uneven_shards(e: Evidence) -> str:
    """Shards of different sizes have the same weight."""
    weights = e.terms.weights
    if weights is None or np.ptp(weights * e.sizes) >= 1e-3 * abs(weights[0]) or np.ptp(weights) <= 0.01:
        return ""
    advice = "add the gradients of all examples, not the means of shards, and divide by the size of the batch"
    return f"shards of different sizes ({', '.join(map(str, e.sizes))} examples) have the same weight; {advice}"


def a_multiple(e: Evidence) -> str:
    """The update is a multiple of the right one, such as k times."""
    factor = e.factor
    if factor is None:
        return ""
    advice = f"use the same learning rate and divisor for any number of {e.units}"
    if is_close_to(factor, 1 / e.k):
        advice = "add the gradients, and divide only by the size of the batch"
    elif is_close_to(factor, e.k):
        several, one, *_ = e.steps
        advice = "add the gradients once, keep the learning rate, and divide by the size of the whole batch"
        advice += ", not of a shard, as a mean loss does"
        if are_means(several.losses, one.losses):
            advice = f"each {e.unit} computes the mean loss of its shard; compute the sum, and divide once, by the "
            advice += "size of the whole batch"
    return f"{e.update} is {factor:.5g} times that of one {e.unit}; {advice}"


def a_penalty_of_each(e: Evidence) -> str:
    """The update differs by a multiple of the parameters, as if a penalty were counted several times."""
    start = e.sides.one.start[0]
    for name in e.terms.wrong:
        error = e.terms.worst[name] - e.terms.whole[name]
        if fitted_weights(error, [start[name]], 1e-2 * norm(error)) is None:
            return ""
    return (
        f"{e.update} differs from that of one {e.unit} by a multiple of the parameters: weight decay, or a penalty in "
        f"the loss, counts once for each {e.unit}; add it after the sum, or share it out"
    )


def some_places_only(e: Evidence) -> str:
    """The step uses only some examples of a batch, also on one device."""
    if e.sides.precision != "float64":
        return ""
    for examples, of in ([*range(e.size)], str(e.size)), (e.parts[0], f"the {e.sizes[0]} examples of {e.devices[0]}"):
        if places := e.places_left_out(examples):
            used = spans([i for i in range(len(examples)) if i not in places])
            return (
                f"{e.update} differs: on one {e.unit}, the step uses only examples {used} of {of}, whatever these "
                "contain; use all, and sum the gradients of all"
            )
    return ""


def a_loss_that_is_no_sum(e: Evidence) -> str:
    """On one device, the gradients of the shards do not add up to those of the batch."""
    if not e.raw or e.raw.adds_up:
        return ""
    return (
        f"{e.update} differs: on one {e.unit}, the gradients of the shards do not add up to those of the batch, so the "
        f"loss is no sum over examples: {e.what_is_no_sum}{e.beginning}"
    )


def changed_before_the_sum(e: Evidence) -> str:
    """The update is the sum of what the devices do alone, which is not what one device does with the batch."""
    if e.terms.adds_up or e.terms.differing(e.terms.worst, e.terms.sum):
        return ""
    gradients = e.update.replace("the update", "its gradients")
    return (
        f"each {e.unit} changes {gradients} before the sum: by clipping or rounding (as in float16 or 8 bits), by a "
        "number or a choice of its own examples, or by random numbers that others draw, too; sum first"
    )


def other_weights(e: Evidence) -> str:
    """Some shards count more than others, or not at all."""
    weights = e.terms.weights
    if weights is None or np.abs(weights - 1).max() <= 5e-5:
        return ""
    used = [rank for rank, weight in enumerate(weights) if abs(weight) > 1e-3]
    if 0 < len(used) < e.k and np.ptp(weights[used]) < 0.01 * abs(weights[used[0]]):
        return f"{e.update} uses only the gradients of {', '.join(e.devices[i] for i in used)}; add those of the others"
    terms = " + ".join(f"{w:.5g} × {device}" for w, device in zip(np.round(weights, 5), e.devices) if w) or "0"
    advice = "each shard must count once; look for clipping or scaling before the sum"
    if np.abs(weights - 1).max() < 0.05:
        advice = f"a factor that is the same for all elements of a {e.unit} is not rounding; {advice}"
    return f"{e.update} adds the shards' gradients as {terms}; {advice}"


def labels_of_others(e: Evidence) -> str:
    """The step is right if all examples are the same."""
    is_rounding = e.terms.largest_error[0] < SMALL
    if is_rounding or not e.is_right([e.driver.take(batch, [0] * e.size) for batch in e.batches]):
        return ""
    by = "unless all examples are the same: labels may be those of others"
    advice = "divide X and y in the same way, and use what depends on other examples as on one"
    return f"{e.update} differs from that of one {e.unit}, {by}; {advice}{e.beginning}"


def unknown(e: Evidence) -> str:
    """None of the above."""
    error, name = e.terms.largest_error
    is_exact = e.sides.precision == "float64"
    by = f"{error:.1g}" if error < SMALL else f"{error:.0%}"
    advice = "look for clipping or weight decay before the sum, or for what is gathered from others without gradients"
    if error < SMALL:
        found = ["a term of the loss, such as a penalty, that is a mean over a shard"]
        if error > 1e-4 or not is_exact:
            found.append("rounding before the sum (to float16, bfloat16 or 8 bits)")
        if is_exact and e.sides.one.facts.adaptive:
            found.append("scaling, or clipping by another norm, which an optimizer like Adam nearly hides")
        advice = f"look for {', or for '.join(found)}"
    elif not e.terms.adds_up:
        advice = (
            f"on one {e.unit}, the updates of the shards do not add up to that of the batch; look for a mean, a "
            "weight, statistics or negatives of a shard, for clipping or weight decay before the sum, or for what is "
            "gathered from others without gradients"
        )
    return f"{e.update} differs from that of one {e.unit}, by {by} for {name}; {advice}{e.beginning}"


CAUSES = (  # (the claim that does not hold, the cause); a cause assumes that those above it do not fit
    ("devices", wrong_shards),
    ("update", fails_in_parts),
    ("update", same_random_numbers),
    ("compared", own_random_numbers),
    ("update", other_settings),
    ("sum", own_gradients),
    ("losses", other_losses),
    ("replicas", other_replicas),
    ("replicas", other_statistics),
    ("update", left_by_earlier_steps),
    ("update", not_finite_update),
    ("update", frozen_on_one),
    ("update", clipped_alone),
    ("update", means_of_uneven_shards),
    ("update", a_multiple),
    ("update", a_penalty_of_each),
    ("update", some_places_only),
    ("update", a_loss_that_is_no_sum),
    ("update", changed_before_the_sum),
    ("update", other_weights),
    ("update", labels_of_others),
    ("update", unknown),
)
