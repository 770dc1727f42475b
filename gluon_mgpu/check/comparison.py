"""Whether a step on several devices is the step on one, and the likeliest mistake if not. NumPy only: the arrays may
come from MXNet, PyTorch or JAX.

Each function checks one claim, and returns what is wrong, or an empty string. A driver takes the steps: the whole batch
on several devices and on one, each shard alone on one, all from the same parameters. `combine` joins the claims of
several batches, and a `Report` has the line for the user.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Optional

import numpy as np

Arrays = dict[str, np.ndarray]
Claims = dict[str, Optional[str]]  # {claim: what is wrong}; "": nothing; None: there was nothing to check
EXAMPLES = (4, 3, 5)  # per device, in each of the three batches; the second one has one more example, so it is uneven
RATES = (0.7, 0.9, 0.6)  # the learning rate in each batch; not 1, so that a power of it is another number
ROUNDING = 2.0**-24  # largest relative error of one float32 operation
LEFT = "look for what a step leaves behind, such as gradients, a buffer or a counter"
EQUALLY = "add the gradients of all examples, and divide by the size of the batch"
LESS_PRECISE = "as with float16 or 8-bit numbers; keep float32 until the sum is complete"
MAY_BE_RIGHT = {"split", "sum"}  # an unusual split or sum may be right, if the step is that of one device


@dataclass
class StepResult:
    """What one step did. losses: of all examples, in any order. changes: of the parameters on each device, in float64.
    grads: the gradients after the step on each device, if known."""

    losses: np.ndarray
    changes: list[Arrays]
    grads: list[Arrays] = field(default_factory=list)


@dataclass
class Report:
    """The claims, how the step was compared (such as "with dropout off"), and lines with numbers, if there are any."""

    claims: Claims
    how: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """Empty if the step on several devices is the step on one, else the likeliest reason."""
        wrong = {claim: reason for claim, reason in self.claims.items() if reason}
        if not {*wrong} - MAY_BE_RIGHT:
            return ""
        claim, reason = next(iter(wrong.items()))
        beginnings = {
            "runs": "cannot be compared with one device",
            "repeatable": "cannot be compared with one device",
            "called": "does not use all of its functions",
            "accuracy": "does not measure the same accuracy as on one device",
        }
        return f"{beginnings.get(claim, 'does not take the same step as on one device')}: {reason}"

    @property
    def line(self) -> str:
        """What to tell the user, whatever the verdict."""
        return self.verdict or ", ".join(["takes the same step as on one device", *self.how])


def start(devices: Sequence[Arrays]) -> str:
    """Whether all devices start with the same parameters."""
    differ = _differ(devices)
    return f"the devices start with different parameters ({differ}); give each a copy of the same" if differ else ""


def replicas(step: StepResult) -> str:
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


def reduced(values: np.ndarray, results: np.ndarray, names: Sequence[str], function: str = "allreduce") -> str:
    """Whether each device has the sum. values, results (k, ...): what device i had before and after."""
    k, total = len(values), values.sum(0)
    right, mean, first, unchanged = (
        np.isclose(results, value, rtol=1e-5, atol=1e-5) for value in (total, values.mean(0), values[0], values)
    )
    if right.all():
        return ""
    if unchanged.all():
        return f"{function} does not change the arrays; write the sum into them, as in d[:] = total"
    if mean.all():
        return f"{function} divides the sum by {k}, the number of devices; divide once, by the size of the batch"
    if first.all():
        return f"{function} copies the first device's array to the others, without adding theirs"
    error = np.abs(results - total).max() / np.abs(total).max()
    if error < 0.02:
        return f"{function} leaves a sum with only about {_bits(error)} correct bits, {LESS_PRECISE}"
    if all(part.any() and not part.all() for part in right):
        return f"{function} sums only a part of the array: {right[0].sum()} of {right[0].size} elements"
    wrong = [i for i in range(k) if not right[i].all()]
    left = [_weighted_names(_weights(results[i], [*values]), names) for i in wrong]
    if not all(left):
        return f"{function} leaves no sum on {', '.join(names[i] for i in wrong)}"
    if len({*left}) == 1:
        return f"{function} leaves {left[0]} on {', '.join(names[i] for i in wrong)}, not the sum"
    return f"{function} leaves {', '.join(f'{sum} on {names[i]}' for i, sum in zip(wrong, left))}, not the sum"


def not_finite(step: StepResult) -> str:
    """Whether all numbers are finite."""
    arrays = {"losses": step.losses, **step.changes[0]}
    wrong = [name for name, array in arrays.items() if not np.isfinite(array).all()]
    if not wrong:
        return ""
    value = "nan" if np.isnan(arrays[wrong[0]]).any() else "infinite"
    where = "losses" if wrong[0] == "losses" else f"gradients ({', '.join(wrong[:4])})"
    return f"the {where} of a step are {value}; look for log(0), division by 0, or overflow"


def losses(step: StepResult, expected: np.ndarray, n: int, terms: int, by_shard: np.ndarray | None = None) -> str:
    """Whether the losses of a step on n examples are those of the batch, in any order. terms: see `order_bound`.
    by_shard: the losses if each shard is computed alone."""
    if len(step.losses) != n or len(expected) != n:
        return f"a step on {n} examples returns {step.losses.size} losses; return one for each example"
    if alike(step.losses, expected, terms):
        return ""
    if by_shard is not None and alike(step.losses, by_shard, terms):
        return (
            "losses depend on the shard's other examples, as with statistics (mean, variance) of a shard; use constants"
        )
    factor = step.losses.sum() / expected.sum()
    if alike(step.losses, expected * factor, terms):
        return f"the losses are {factor:.4g} times those of one device; do not scale them by the number of devices"
    return "the losses are not those of the batch; compute each as on one device, with its own image and label"


def alike(losses: np.ndarray, expected: np.ndarray, terms: int) -> bool:
    """Whether losses are the same, in any order."""
    if losses.shape != expected.shape:
        return False
    return np.allclose(np.sort(losses), np.sort(expected), rtol=ROUNDING * terms, atol=ROUNDING * terms)


def weighted(shards: Sequence[StepResult], sizes: Sequence[int]) -> list[Arrays]:
    """What each shard adds to the update of the whole batch. shards: steps on each shard alone, on one device."""
    n = sum(sizes)
    return [{name: c * size / n for name, c in shard.changes[0].items()} for shard, size in zip(shards, sizes)]


def rounding_bound(one: Arrays, exact: Arrays, parts: Sequence[Arrays], start: Arrays, terms: int) -> dict[str, float]:
    """How far the update of each parameter can be from that of one device because of rounding (a norm): 8 times as far
    as that of one device is from the same update in float64, or as random errors in a sum of `terms` numbers add up to.

    one, exact: the update on one device, in float32 and in float64. parts: see `weighted`. start: the parameters before
    the step. terms: see `order_bound`. A mistake does not shrink with the precision, so it is farther away.
    """
    bound = {}
    for name, value in exact.items():
        size = sum(np.linalg.norm(part[name]) for part in parts)
        random = ROUNDING * (terms**0.5 * size + np.linalg.norm(start[name]))
        bound[name] = 8 * float(max(np.linalg.norm(one[name] - value), random))
    return _not_below_cancelled(bound, parts)


def order_bound(parts: Sequence[Arrays], start: Arrays, terms: int) -> dict[str, float]:
    """The same bound if a step cannot be taken in float64: the largest error of sums in another order.

    terms: the number of terms in the longest sum of a gradient, such as the examples times the positions of a
    convolution.
    """
    bound = {}
    for name in start:
        size = sum(np.linalg.norm(part[name]) for part in parts)
        bound[name] = float(ROUNDING * (terms * size + 4 * np.linalg.norm(start[name])))
    return _not_below_cancelled(bound, parts)


def _not_below_cancelled(bound: dict[str, float], parts: Sequence[Arrays]) -> dict[str, float]:
    """A gradient may be a small difference of large sums: that of a bias before batch normalization is 0 but for
    rounding. Its error is that of these sums, which are about as large as the other gradients."""
    least = 8 * ROUNDING * sum(sum(float(np.sum(a**2)) for a in part.values()) ** 0.5 for part in parts)
    return {name: max(value, least) for name, value in bound.items()}


def distance(change: Arrays, expected: Arrays) -> float:
    """How far an update is from another, relative to its size; for example, from the same update in float64."""
    error = sum(float(np.sum((change[name] - value) ** 2)) for name, value in expected.items())
    return (error / (sum(float(np.sum(value**2)) for value in expected.values()) or 1)) ** 0.5


def rounding_note(several: Arrays, one: Arrays, exact: Arrays, bound: dict[str, float]) -> str:
    """How far both updates are from the same update in float64, and how far rounding explains."""
    explained = (
        sum(b**2 for b in bound.values()) / (sum(float(np.sum(value**2)) for value in exact.values()) or 1)
    ) ** 0.5
    return (
        f"distance from the same step in float64: {distance(several, exact):.1e} on several devices, "
        f"{distance(one, exact):.1e} on one; rounding explains {explained:.1e}"
    )


def update(
    names: Sequence[str],
    change: Arrays,
    expected: Arrays,
    parts: Sequence[Arrays],
    bound: dict[str, float],
    start: Arrays,
) -> str:
    """Whether an update is that of one device, or what it looks like. names: of the devices. parts: see `weighted`.
    bound: see `rounding_bound`. start: the parameters before the step."""
    error = {name: np.linalg.norm(change[name] - value) for name, value in expected.items()}
    differ = {n: error[n] / (np.linalg.norm(expected[n]) + 1e-30) for n in expected if error[n] > bound[n]}
    if not differ:
        return ""
    if not any(value.any() for value in expected.values()):
        return "the step changes the parameters on several devices, but not on one; treat all devices alike"
    k, worst = len(names), max(differ, key=lambda name: error[name] / bound[name] if bound[name] else np.inf)

    def is_like(guess: Arrays, tolerance: float = k) -> bool:
        return all(np.linalg.norm(change[n] - guess[n]) <= tolerance * bound[n] for n in differ)

    factor = np.vdot(change[worst], expected[worst]) / (np.vdot(expected[worst], expected[worst]) + 1e-30)
    if is_like({name: factor * value for name, value in expected.items()}):
        advice = "use the same learning rate and divisor for any number of devices"
        if abs(factor - k) < 1e-3:
            advice = (
                "add the gradients once, keep the learning rate, and divide by the size of the batch, not of a shard"
            )
        elif abs(factor - 1 / k) < 1e-3:
            advice = "add the gradients, and divide only by the size of the batch"
        elif abs(factor) < 1e-3:
            advice = "let each device change all parameters"
        of = f" of {', '.join([*differ][:4])}" if len(differ) < len(expected) else ""
        return f"the update{of} is {factor:.4g} times that of one device; {advice}"
    wrong = {name: np.abs(change[name] - expected[name]) > bound[name] / expected[name].size ** 0.5 for name in differ}
    flat = [np.concatenate([part[name][wrong[name]] for name in wrong]) for part in parts]
    weights = _weights(np.concatenate([change[name][wrong[name]] for name in wrong]), flat, 1e-3)
    where = _where(wrong, expected)
    if weights is not None and np.abs(weights - 1).max() > 0.01:
        used = [name for name, weight in zip(names, weights) if abs(weight) > 1e-3]
        if len(used) < k and np.allclose(weights[np.abs(weights) > 1e-3], 1, atol=1e-2):
            return f"the update{where} uses only the gradients of {', '.join(used)}; add those of the others"
        advice = "each shard must count once; look for clipping or scaling before the sum"
        return f"the update{where} adds the shards' gradients as {_weighted_names(weights, names)}; {advice}"
    more = {name: change[name] - value for name, value in expected.items()}
    decay = sum(np.vdot(more[n], start[n]) for n in more) / (sum(np.vdot(a, a) for a in start.values()) + 1e-30)
    if abs(decay) > 1e-6 and all(np.linalg.norm(more[n] - decay * start[n]) <= 2 * k * bound[n] for n in differ):
        return f"the update differs by {decay:.2g} times the parameters; add weight decay once, after the sum"
    if max(differ.values()) < 0.02:
        return (
            f"the update differs from that of one device, by {differ[worst]:.1g} for {worst}; rounding explains only "
            f"{bound[worst] / np.linalg.norm(expected[worst]):.1g}; {LESS_PRECISE}"
        )
    by = f"{differ[worst]:.0%}" if differ[worst] < 100 else "far"
    advice = "if all else is right, look for clipping or weight decay before the sum"
    return f"the update differs from that of one device, by {by} for {worst}; {advice}"


def _where(wrong: Arrays, expected: Arrays) -> str:
    """In which arrays an update is wrong, or in which part of one; empty: in most. wrong: for each element."""
    if sum(mask.sum() for mask in wrong.values()) > 0.5 * sum(value.size for value in expected.values()):
        return ""
    parts = [
        name if mask.mean() > 0.5 else f"{mask.sum()} of {mask.size} elements of {name}" for name, mask in wrong.items()
    ]
    return f" of {', '.join(parts[:4])}"


def combine(batches: Sequence[Claims]) -> Claims:
    """The claims of all batches. There are three, with `EXAMPLES` per device: what goes wrong only later, or only in
    the uneven batch, has a reason of its own."""
    claims = {name: next((batch[name] for batch in batches if batch[name]), batches[0][name]) for name in batches[0]}
    even, uneven, later = (batch["update"] for batch in batches)
    if later and not even:
        claims["update"] = f"only the first update is that of one device; {LEFT}"
    elif uneven and not even:
        claims["update"] = f"the update is wrong where shards have different sizes; {EQUALLY}"
    return claims


def _weights(result: np.ndarray, parts: Sequence[np.ndarray], tolerance: float = 1e-4) -> np.ndarray | None:
    """The weights with which a result is a sum of parts; None if it is no such sum, or too short to tell."""
    if result.size <= len(parts):
        return None
    columns = np.stack([np.ravel(part).astype(np.float64) for part in parts], axis=1)
    weights = np.linalg.lstsq(columns, np.ravel(result).astype(np.float64), rcond=None)[0]
    error = np.linalg.norm(columns @ weights - np.ravel(result))
    return weights if error <= tolerance * np.linalg.norm(result) else None


def _weighted_names(weights: np.ndarray | None, names: Sequence[str]) -> str:
    """A sum in words, such as 2 × cpu(0) + 1 × cpu(1)."""
    if weights is None:
        return ""
    return " + ".join(f"{w:.2g} × {name}" for w, name in zip(np.round(weights, 3), names) if w) or "0"


def _bits(error: float) -> int:
    return round(float(-np.log2(error)))


def _differ(devices: Sequence[Arrays]) -> str:
    """The first names of arrays that are not the same on all devices."""
    if not devices:
        return ""
    first, *others = devices
    return ", ".join([name for name in first if any((first[name] != other[name]).any() for other in others)][:4])
