"""Compares an answer with our solution, case by case, and names the mistake.

A known mistake is an edit of our solution, so it is tried, too: an answer that does the same on a case makes the same
mistake. Results that no known mistake explains are described.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from fractions import Fraction
from itertools import product
from types import ModuleType

import mxnet as mx
import numpy as np
from numpy import allclose, isclose  # here, because an answer may replace np.allclose

from gluon_mgpu import exercises
from gluon_mgpu.exercises import Mistake
from gluon_mgpu.exercises.cases import (
    REPLACED,
    Case,
    Function,
    Numbers,
    Results,
    Trial,
    first,
    processes,
    same,
    shown,
    steps,
    sums,
)
from gluon_mgpu.exercises.cases.events import Call, traffic, waits

Message = Callable[[BaseException], str]  # describes an error in one line
Known = Iterator[tuple[str, "Trial | str"]]  # known mistakes: their names, and their trials or error messages


def cases(name: str) -> Sequence[Case]:
    """The hidden cases of an exercise, from the function of its name."""
    return next(getattr(module, name) for module in (steps, sums, processes) if hasattr(module, name))()


def diagnose(name: str, answer: Function, message: Message) -> None:
    """Try an answer on the hidden cases. Raises the first Mistake, or the answer's own error, unless a known mistake
    has the same error."""
    solution = _function(name, exercises.solution(name))
    for case in cases(name):
        right, known = case.call(solution), _known(name, case, message)
        try:
            mine = case.call(answer)
        except Mistake:
            raise
        except Exception as error:
            found = message(error)
            for mistake, other in known:
                if other == found:
                    raise Mistake(mistake, f"{case.text}\n{found}") from None
            raise
        if _differences(mine.results, right.results):
            raise _explain(case, mine, right, known)
        broken = _broken(case, mine)
        if broken:
            for mistake, other in known:
                if isinstance(other, Trial) and not _differences(_everything(other), _everything(mine)):
                    if _broken(case, other):
                        raise Mistake(mistake, broken.case)
            raise broken


def _broken(case: Case, trial: Trial) -> Mistake | None:
    """The mistake in how right results were found."""
    try:
        case.check(trial.events)
    except Mistake as mistake:
        return mistake
    return None


def _function(name: str, code: str) -> Function:
    """The function that solves an exercise, in code of this package."""
    module = ModuleType(name)
    exec(compile(code, f"<{name}>", "exec"), module.__dict__)  # nosec B102
    return getattr(module, exercises.answer_of(name).name)


def _known(name: str, case: Case, message: Message) -> Known:
    """Try the known mistakes on a case."""
    for mistake, code in exercises.known(name):
        try:
            yield mistake, case.call(_function(name, code))
        except Mistake:  # no results
            continue
        except Exception as error:
            yield mistake, message(error)
            with suppress(mx.MXNetError):
                mx.nd.waitall()  # an operator that fails must not do so later, in the answer


def _differences(found: Results, right: Results) -> int:
    """The number of results that differ."""
    return sum(not same(found.get(what, []), right.get(what, [])) for what in {**found, **right})


def _everything(trial: Trial) -> Results:
    """The results, and how the function found them, as numbers."""
    sent, received = traffic(trial.events)
    devices = sorted({*sent, *received}, key=lambda device: device.device_id)
    calls = sorted((event.context.device_id, event.size) for event in trial.events if isinstance(event, Call))
    return {
        "copied": [np.array([device.device_id, sent[device], received[device]]) for device in devices],
        "calls": [np.array(calls, float)],
        "waits": [np.array(float(waits(trial.events)))],
        **trial.notes,
        **trial.results,
    }


def _explain(case: Case, mine: Trial, right: Trial, known: Known) -> Mistake:
    """The mistake in results that differ from our solution's."""
    what = next(what for what in right.results if not same(mine.results[what], right.results[what]))
    found, expected = mine.results[what], right.results[what]
    notes = "".join(f"\n{note}:  {shown(arrays)}" for note, arrays in mine.notes.items())
    text = f"{case.text}{notes}{what and f'; {what}:'}\nexpected  {shown(expected)}\nfound     {shown(found)}"
    if REPLACED in mine.events:
        return Mistake("not-in-place", text)
    best, fewest = "", math.inf  # the known mistake with these results that differs least in how it worked
    for name, other in known:
        if isinstance(other, Trial) and same(other.results[what], found):
            differences = _differences(_everything(other), _everything(mine))
            if differences < fewest:
                best, fewest = name, differences
            if not differences:
                break
    if best:
        return Mistake(best, text)
    name, hint = first(case.mistakes(mine, right)), ""
    if not name:
        name, hint = _describe(found, expected, case.before.get(what))
    return Mistake(name, text + hint)


def _describe(found: Numbers, right: Numbers, before: Numbers | None) -> tuple[str, str]:
    """Describe results that no known mistake explains. Returns a name in mistakes.ini, and a line for the case."""
    sizes = [array.size for array in found], [array.size for array in right]
    if sizes[0] != sizes[1]:
        return "wrong-size", f"\nnumbers of elements: expected {sizes[1]}, found {sizes[0]}"
    summed = before and _describe_sum(found, right, before)
    if summed:
        return summed, ""
    before = before or [np.full(array.size, np.nan) for array in right]  # nothing is equal to nan
    result, wanted, start = map(np.concatenate, (found, right, before))
    if not result.any():
        return "zeros", ""
    if same([np.sort(result)], [np.sort(wanted)]):
        return "wrong-order", ""
    if len({*sizes[1]}) == 1:
        kept = np.equal(right, before).all(axis=0)  # elements that are the same on each device, before and after
        if kept.any() and not same([x[kept] for x in found], [x[kept] for x in right]):
            return "changes-others", ""
    for what, done, needed in (("changes: ", result - start, wanted - start), ("", result, wanted)):
        factor = done @ needed / max(needed @ needed, 1e-9)
        if not np.isfinite(factor) or not allclose(done, factor * needed, rtol=1e-3, atol=1e-6):
            continue
        simple = float(Fraction(abs(float(factor))).limit_denominator(12))
        if factor and (len(set(needed)) > 2 or math.isclose(abs(factor), simple, rel_tol=1e-4)):  # any fits one number
            name = "wrong-sign" if isclose(factor, -1, rtol=1e-3) else "wrong-factor"
            return name, f"\n{what}found / expected = {factor:.4g}"
    wrong = [i for i in range(len(found)) if not same(found[i : i + 1], right[i : i + 1])]
    if len(wrong) < len(found):
        unchanged = all(np.array_equal(found[i], before[i]) for i in wrong)
        devices = ", ".join(f"device {i}" for i in wrong)
        return "unchanged-devices" if unchanged else "some-devices", f"\nwrong on: {devices}"
    elements = [i for i in range(min(sizes[1])) if all(isclose(f[i], r[i]) for f, r in zip(found, right))]
    if elements:
        unchanged = bool(np.all(isclose(result, wanted) | isclose(result, start)))
        return "unchanged-elements" if unchanged else "some-elements", f"\nright on all devices: elements {elements}"
    equal = same(right, [right[0]] * len(right)) and not same(found, [found[0]] * len(found))
    return "different-devices" if equal else "wrong-result", ""


def _describe_sum(found: Numbers, right: Numbers, before: Numbers) -> str:
    """Describe results that should be the sum or the mean of the devices' arrays. Returns a mistake's name, or ""."""
    total, k = np.sum(before, axis=0), len(before)
    scale = total[0] / right[0][0]  # 1, or k for a mean
    if k == 1 or not same([x * scale for x in right], [total] * k):
        return ""
    others = [operation(before, axis=0) for operation in (np.max, np.min, np.prod)]
    others += [2 * before[0] - total, *[np.median(before, axis=0)] * (k > 2)]  # differences, and what is no mean
    if any(same(found, [other / divisor] * k) for other in others for divisor in (1, scale)):
        return "not-a-sum"
    sums_of_elements = [[np.full(total.size, np.sum(x)) for x in xs] for xs in ([before] * k, before)]
    if any(same(found, [x / divisor for x in xs]) for xs in sums_of_elements for divisor in (1, scale)):
        return "over-elements"
    if same(found[:1], right[:1]):
        return "no-broadcast"
    if k > 4:
        return ""
    counts = np.array([*product(range(5), repeat=k)][1:])  # how often each array may have been added
    fits = [counts[[allclose(x, y * scale) for x in counts @ np.array(before)]][:1] for y in found]
    if not all(map(len, fits)):
        return ""
    if not np.sum(fits, axis=0).all():
        return "overwritten"
    return "sums-twice" if np.max(fits) > 1 else "missing-arrays"
