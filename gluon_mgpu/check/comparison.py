"""Whether a step on several devices is the step on one, and the likeliest mistake if not. NumPy only: the arrays may
come from MXNet, PyTorch or JAX.

Each function checks one claim, and returns what is wrong, or an empty string. A driver takes the steps: the whole batch
on several devices and on one, each shard alone on one, all from the same parameters. `combine` joins the claims of
several batches, and `verdict` is the line for the user.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

Arrays = dict[str, np.ndarray]
Claims = dict[str, str]  # {claim: what is wrong; empty if the claim holds}
EXAMPLES = (4, 3, 5)  # per device, in each of the three batches; the second one has one more example, so it is uneven
ROUNDING = 2.0**-24  # largest relative error of one float32 operation
LEFT = "look for what a step leaves behind, such as gradients, a buffer or a counter"
EQUALLY = "add the gradients of all examples, and divide by the size of the batch"


@dataclass
class Step:
    """What one step did. losses: of all examples, in any order. changes: of the parameters on each device, in float64.
    grads: the gradients after the step on each device, if known."""

    losses: np.ndarray
    changes: list[Arrays]
    grads: list[Arrays] = field(default_factory=list)


def start(devices: Sequence[Arrays]) -> str:
    """Whether all devices start with the same parameters."""
    differ = _differ(devices)
    return f"the devices start with different parameters ({differ}); give each a copy of the same" if differ else ""


def replicas(step: Step) -> str:
    """Whether the devices have the same parameters after a step."""
    differ = _differ(step.changes)
    if not differ:
        return ""
    other = _differ(step.grads)
    cause = "and different" if other else "but equal"
    advice = "leave the sum on each device" if other else "update each replica in the same way"
    return f"after a step, the devices have different parameters ({differ}), {cause} gradients; {advice}"


def split(shards: Sequence[Sequence[int]], n: int, function: str = "split_and_load") -> str:
    """Whether each of n examples is on exactly one device. shards: the indices of the examples on each device;
    negative: not an example of this batch."""
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
        return f"{function} drops {missing} of {n} examples; with a remainder, some shards need one more example"
    return f"{function} gives some of {n} examples to several devices"


def reduced(values: np.ndarray, results: np.ndarray, names: Sequence[str], function: str = "allreduce") -> str:
    """Whether each device has the sum. values, results (k, ...): what device i had before and after."""
    k = len(values)
    right, mean, first = (
        np.isclose(results, value, rtol=1e-5, atol=1e-5) for value in (values.sum(0), values.mean(0), values[0])
    )
    if right.all():
        return ""
    if mean.all():
        return f"{function} divides the sum by {k}, the number of devices; divide once, by the size of the batch"
    if first.all():
        return f"{function} copies the first device's array to the others, without adding theirs"
    if all(part.any() and not part.all() for part in right):
        return f"{function} sums only a part of the array: {right[0].sum()} of {right[0].size} elements"
    return f"{function} leaves no sum on {', '.join(name for name, part in zip(names, right) if not part.all())}"


def losses(step: Step, expected: np.ndarray, terms: int) -> str:
    """Whether the losses of a step are those of the batch, in any order. terms: see `rounding_bound`."""
    if step.losses.shape != expected.shape:
        n = len(expected)
        return f"the losses of a step on {n} examples are {step.losses.size}; return one for each example"
    if not alike(step.losses, expected, terms):
        return "the losses are not those of the batch; leave each image as it is, with its own label"
    return ""


def alike(losses: np.ndarray, expected: np.ndarray, terms: int) -> bool:
    """Whether losses are the same, in any order."""
    if losses.shape != expected.shape:
        return False
    return np.allclose(np.sort(losses), np.sort(expected), rtol=ROUNDING * terms, atol=ROUNDING * terms)


def weighted(shards: Sequence[Step], sizes: Sequence[int]) -> list[Arrays]:
    """What each shard adds to the update of the whole batch. shards: steps on each shard alone, on one device."""
    n = sum(sizes)
    return [{name: c * size / n for name, c in shard.changes[0].items()} for shard, size in zip(shards, sizes)]


def rounding_bound(parts: Sequence[Arrays], start: Arrays, terms: int) -> dict[str, float]:
    """How far the update of each parameter can be from another order of the same operations, in float32 (a norm).

    parts: as in `weighted`. start: the parameters before the step. terms: the number of terms in the longest sum of a
    gradient, such as the examples times the positions of a convolution.
    """
    bound = {}
    for name in start:
        size = sum(np.linalg.norm(part[name]) for part in parts)
        bound[name] = float(ROUNDING * (terms * size + 4 * np.linalg.norm(start[name])))
    return bound


def distance(change: Arrays, expected: Arrays) -> float:
    """How far an update is from another, relative to its size; for example, from the same update in float64."""
    error = sum(float(np.sum((change[name] - value) ** 2)) for name, value in expected.items())
    return (error / (sum(float(np.sum(value**2)) for value in expected.values()) or 1)) ** 0.5


def update(
    names: Sequence[str], change: Arrays, expected: Arrays, parts: Sequence[Arrays], bound: dict[str, float]
) -> str:
    """Whether an update is that of one device, or what it looks like. names: of the devices. parts: see `weighted`.
    bound: see `rounding_bound`."""
    error = {name: np.linalg.norm(change[name] - value) for name, value in expected.items()}
    differ = {n: error[n] / (np.linalg.norm(expected[n]) + 1e-30) for n in expected if error[n] > bound[n]}
    if not differ:
        return ""
    k, worst = len(names), max(differ, key=lambda name: differ[name])
    factor = np.vdot(change[worst], expected[worst]) / (np.vdot(expected[worst], expected[worst]) + 1e-30)

    def is_like(guess: Arrays, factor: float = 1) -> bool:
        return all(np.linalg.norm(change[n] - factor * guess[n]) <= k * bound[n] for n in differ)

    if is_like(expected, factor):
        advice = "use the same learning rate and divisor for any number of devices"
        if is_like(expected, k):
            advice = "add the gradients once, and divide by the size of the batch, not of a shard"
        elif is_like(expected, 1 / k):
            advice = "add the gradients, and divide only by the size of the batch"
        return f"the update is {factor:.4g} times that of one device; {advice}"
    for name, part in zip(names, parts):
        if is_like(part):
            return f"the update uses only the gradients of {name}; add those of the others"
    advice = "if all else is right, look for clipping or weight decay before the sum"
    return f"the update differs from that of one device, by {differ[worst]:.0%} for {worst}; {advice}"


def combine(batches: Sequence[Claims]) -> Claims:
    """The claims of all batches. There are three, with `EXAMPLES` per device: what goes wrong only later, or only in
    the uneven batch, has a reason of its own."""
    claims = {name: next((batch[name] for batch in batches if batch[name]), "") for name in batches[0]}
    even, uneven, later = (batch["update"] for batch in batches)
    if later and not even:
        claims["update"] = f"only the first update is that of one device; {LEFT}"
    elif uneven and not even:
        claims["update"] = f"the update is wrong where shards have different sizes; {EQUALLY}"
    return claims


def verdict(claims: Claims) -> str:
    """What to tell the user: empty if the step on several devices is the step on one, else the likeliest reason."""
    for claim, reason in claims.items():
        if reason:
            differs = "cannot be compared with" if claim == "repeatable" else "does not take the same step as on"
            return f"{differs} one device: {reason}"
    return ""


def _differ(devices: Sequence[Arrays]) -> str:
    """The first names of arrays that are not the same on all devices."""
    if not devices:
        return ""
    first, *others = devices
    return ", ".join([name for name in first if any((first[name] != other[name]).any() for other in others)][:4])
