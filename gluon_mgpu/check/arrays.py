"""Comparisons of arrays by name: what differs by more than rounding explains."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from gluon_mgpu.check.driver import UNITS, Arrays, Shards, StepResult

# relative differences that may come from rounding; in float64, from the user's constants in float32
TOLERANCE = {"float64": 1e-6, "float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
ROUNDING = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}  # largest relative error of one operation


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


def not_finite(steps: Sequence[StepResult]) -> str:
    """Whether all numbers of some steps are finite."""
    for step in steps:
        arrays = {"losses": np.concatenate([*map(np.ravel, step.losses), np.zeros(0)]), **step.changes[0]}
        wrong = [name for name, array in arrays.items() if not np.isfinite(array).all()]
        if wrong:
            value = "nan" if np.isnan(arrays[wrong[0]]).any() else "infinite"
            what = "losses" if wrong[0] == "losses" else f"gradients ({listed(wrong)})"
            return f"the {what} of a step are {value}; look for log(0), division by 0, or overflow"
    return ""


def only(devices: Sequence[Arrays], names: Collection[str]) -> list[Arrays]:
    """The arrays of each device that have these names."""
    return [{name: a for name, a in arrays.items() if name in names} for arrays in devices]


def wrong_losses(several: Sequence[np.ndarray], one: Sequence[np.ndarray], n: int) -> str:
    """Whether the losses that the step returns are those of the examples, if it returns one for each."""
    expected, found = (np.concatenate([*map(np.ravel, losses), np.zeros(0)]) for losses in (one, several))
    if len(expected) != n or len(found) != n or equal_losses(found, expected):
        return ""
    advice = "compute each as on one device, from its own image and label"
    return f"the losses are not those of the batch; divide X and y in the same way, and {advice}"


def are_means(several: Sequence[np.ndarray], one: Sequence[np.ndarray]) -> bool:
    """Whether each device returns one loss, and these are the means of the shards."""
    is_single = all(len(losses) == 1 for losses in [*several, *one]) and len(one) == 1
    return is_single and bool(np.isclose(np.mean(several), one[0][0], rtol=1e-4))


def equal_losses(losses: np.ndarray, expected: np.ndarray) -> bool:
    """Whether losses are the same, in any order."""
    return losses.shape == expected.shape and np.allclose(np.sort(losses), np.sort(expected), rtol=1e-4, atol=1e-4)


def distance(change: Arrays, expected: Arrays, names: Sequence[str], trim: bool = True) -> float:
    """How far an update is from another, relative to its size. trim: without the tenth of the elements that are
    farthest, because an optimizer such as Adam makes a large step of a gradient that is 0 except for rounding."""
    error = np.sort(np.abs(flat(change, names) - flat(expected, names)))
    return norm(error[: len(error) - trim * len(error) // 10]) / (norm(flat(expected, names)) or 1)


def norm(array: Any) -> float:
    return float(np.linalg.norm(array))


def flat(arrays: Arrays, names: Collection[str]) -> np.ndarray:
    return np.concatenate([np.ravel(arrays[name]) for name in names] or [np.zeros(0)])


def total(parts: Sequence[Arrays], names: Collection[str]) -> Arrays:
    """The sum of some arrays by name."""
    return {name: np.sum([part[name] for part in parts], axis=0) for name in names}


def differing(found: Arrays, expected: Arrays, bound: dict[str, float]) -> list[str]:
    """The arrays that differ from what is expected by more than a bound (a norm), or are not finite."""
    both = {name: (found[name], a) for name, a in expected.items() if name in found}
    return [name for name, (a, b) in both.items() if a.shape != b.shape or not norm(a - b) <= bound[name]]


def unequal(devices: Sequence[Arrays]) -> list[str]:
    """The arrays that are not the same on all devices."""
    first, *others = devices or [Arrays()]
    return [name for name, a in first.items() if not all(np.array_equal(a, other.get(name, ())) for other in others)]


def is_same(a: np.ndarray | None, b: np.ndarray | None, limit: float = 0) -> bool:
    """Whether two arrays have the same shape and differ by at most a limit (a norm; nan is equal to nan), or there are
    none."""
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and (np.array_equal(a, b, equal_nan=True) or norm(a - b) <= limit < np.inf)


def places(wrong: Arrays, expected: Arrays, every: set[str]) -> str:
    """In which arrays an update is wrong, or in which part of one; empty: in most of all. wrong: for each element.
    every: the names of what changes."""
    right = [name for name in every - {*wrong} if name not in expected or expected[name].any()]
    if not right and sum(m.sum() for m in wrong.values()) > 0.5 * sum(np.count_nonzero(v) for v in expected.values()):
        return ""
    counts = {name: f"{mask.sum()} of {mask.size} elements of {name}" for name, mask in wrong.items()}
    return " of " + listed([counts[name] if mask.mean() < 0.5 else name for name, mask in wrong.items()])


def fitted_weights(result: np.ndarray, parts: Sequence[np.ndarray], rest: float) -> np.ndarray | None:
    """The weights with which a result is a sum of parts, except for a rest; None if it is no such sum, or too short to
    tell."""
    if result.size <= len(parts) or not np.isfinite(result).all():
        return None
    columns = np.stack([np.ravel(part) for part in parts], axis=1)
    weights = np.linalg.lstsq(columns, np.ravel(result), rcond=1e-6)[0]
    return weights if norm(columns @ weights - np.ravel(result)) <= rest * (1 + np.abs(weights).sum()) else None


def spans(numbers: Sequence[int]) -> str:
    """Runs of numbers, such as "0 to 5, 8"."""
    runs = list[list[int]]()
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{first} to {others[-1]}" if others else str(first) for first, *others in runs)


def listed(names: Sequence[str]) -> str:
    """The first names, and the number of the others."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
