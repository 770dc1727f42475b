"""Comparisons of arrays by name: what differs by more than rounding explains, and how to say so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gluon_mgpu.check.driver import UNITS, Arrays, Shards, StepResult

# relative differences that may come from rounding; in float64, from the user's constants in float32
TOLERANCE = {"float64": 1e-6, "float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}


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


def not_finite(step: StepResult) -> str:
    """Whether all numbers of a step are finite."""
    arrays = {"losses": np.concatenate([*step.losses, np.zeros(0)]), **step.changes[0]}
    wrong = [name for name, array in arrays.items() if not np.isfinite(array).all()]
    if not wrong:
        return ""
    value = "nan" if np.isnan(arrays[wrong[0]]).any() else "infinite"
    where = "losses" if wrong[0] == "losses" else f"gradients ({some(wrong)})"
    return f"the {where} of a step are {value}; look for log(0), division by 0, or overflow"


def join_parts(devices: list[Arrays], name: str, whole: np.ndarray | None, extra: int) -> None:
    """Put an array together, if each device has a part of it. extra: axes before those of the array."""
    parts = [arrays[name] for arrays in devices if name in arrays]
    if whole is None or len(parts) < len(devices) or any(part.shape[extra:] == whole.shape for part in parts):
        return
    flat_parts = [part.reshape(*part.shape[:extra], -1) for part in parts]
    if sum(part.shape[-1] for part in flat_parts) == whole.size and len({p.shape[:-1] for p in flat_parts}) == 1:
        joined = np.concatenate(flat_parts, axis=-1).reshape(*flat_parts[0].shape[:-1], *whole.shape)
        for arrays in devices:
            arrays[name] = joined


def common(first: Arrays, second: Arrays) -> tuple[Arrays, Arrays]:
    """The arrays that both have, in the same shape."""
    names = [name for name, a in second.items() if name in first and first[name].shape == a.shape]
    return {name: first[name] for name in names}, {name: second[name] for name in names}


def tolerances(arrays: Arrays) -> dict[str, float]:
    """How far arrays of float64 may be apart."""
    least = 1e-2 * norm(flat(arrays, [*arrays]))
    return {name: TOLERANCE["float64"] * max(norm(a), least) for name, a in arrays.items()}


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


def flat(arrays: Arrays, names: Sequence[str]) -> np.ndarray:
    return np.concatenate([np.ravel(arrays[name]) for name in names] or [np.zeros(0)])


def far(change: Arrays, expected: Arrays, bound: dict[str, float]) -> list[str]:
    """The arrays that differ by more than a bound, or are not finite."""
    return [n for n, array in expected.items() if n in change and not norm(change[n] - array) <= bound[n]]


def places(wrong: Arrays, expected: Arrays, every: set[str]) -> str:
    """In which arrays an update is wrong, or in which part of one; empty: in most of all. wrong: for each element.
    every: the names of what changes."""
    right = [name for name in every - {*wrong} if name not in expected or expected[name].any()]
    if not right and sum(m.sum() for m in wrong.values()) > 0.5 * sum(np.count_nonzero(v) for v in expected.values()):
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


def differ(names: Sequence[str], how: str = "") -> str:
    return f"{some(names)} {how}{'differs' if len(names) == 1 else 'differ'}"


def them(names: Sequence[str]) -> str:
    return "it" if len(names) == 1 else "them"


def equal(a: Any, b: Any) -> bool:
    """Whether arrays have the same shape and elements; nan is equal to nan."""
    return np.array_equal(a, b, equal_nan=True)


def near(a: np.ndarray, b: np.ndarray, limit: float) -> bool:
    """Whether arrays are equal, or differ by at most a limit (a norm)."""
    return equal(a, b) or norm(a - b) <= limit < np.inf


def names_that_differ(devices: Sequence[Arrays]) -> str:
    """The first names of arrays that are not the same on all devices."""
    if not devices:
        return ""
    first, *others = devices
    return some([n for n, a in first.items() if not all(np.array_equal(a, other.get(n, ())) for other in others)])
