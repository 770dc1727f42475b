"""Compares a step in several processes with the same step in one, and names the likeliest reason if they differ.

Each process's examples add their part to an update. The weights of the parts in each array, (1, 1) in a right step of two
processes, say what a wrong one does. It needs only NumPy, so that any engine can use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

ROUNDING = 2.0**-24  # largest relative error of one float32 operation
CLAIMS = {
    "start": "all processes start with the same parameters",
    "split": "each example is in exactly one process",
    "sum": "each update contains the gradients of all processes",
    "losses": "the losses are those of the batch's examples",
    "replicas": "after a step, all processes have the same parameters",
    "update": "the step changes the parameters as in one process",
    "repeatable": "the same step twice gives the same result",
}
Arrays = dict[str, Any]  # {name: array}


@dataclass
class Case:
    """What a step changes. n: the size of the batch. start: before the step. whole: in one process; exact: there, with
    float64. examples: those whose gradients each process computed, if known. parts: what each process's examples add to
    whole; alone: how a step on only these examples changes the parameters. buffers: running statistics; synced: the
    next forward pass makes them equal."""

    n: int
    terms: int  # of the longest sum in a gradient
    start: Arrays
    replicas: list[Arrays]
    whole: Arrays
    exact: Arrays | None
    alone: list[Arrays]
    examples: list[list[int]] | None
    losses: list[Any] = field(default_factory=list)
    whole_losses: Any = None
    buffers: frozenset[str] = frozenset()
    synced: bool = False

    def __post_init__(self) -> None:
        known = self.examples and all(self.examples)
        sizes = [len(e) for e in self.examples] if known else shard_sizes(self.n, len(self.replicas))  # type: ignore
        self.sizes = sizes
        self.parts = [{a: c * size / self.n for a, c in alone.items()} for size, alone in zip(sizes, self.alone)]
        self.names = [a for a in self.whole if a not in self.buffers]
        summed = {a: sum(alone[a] for alone in self.alone) for a in self.names}
        if self.distance(self.whole, summed) < self.distance(self.whole, self.total()):
            self.parts = self.alone  # the step does not divide by the size of the batch
        if self.buffers and self.distance(self.replicas[0], self.total()) < self.distance(self.replicas[0], self.whole):
            self.whole, self.exact = {**self.whole, **self.total()}, None  # batch normalization sees only a part

    def total(self) -> Arrays:
        return {a: sum(part[a] for part in self.parts) for a in self.names}

    def distance(self, a: Arrays, b: Arrays) -> float:
        """The largest difference of an array, relative to its update."""
        return max((_norm(a[n] - b[n]) / (_norm(self.whole[n]) + 1e-30) for n in self.names), default=0.0)

    def tolerance(self, name: str) -> float:
        """The difference in an array that rounding explains."""
        size = sum(_norm(part[name]) for part in self.parts) + _norm(self.whole[name])
        expected = ROUNDING * (8 * self.terms**0.5 * size + 4 * _norm(self.start[name]))
        return max(expected, 8 * _norm(self.whole[name] - self.exact[name]) if self.exact else 0.0)

    def bound(self) -> float:
        return max((self.tolerance(n) / (_norm(self.whole[n]) + 1e-30) for n in self.names if self.whole[n].any()), default=0.0)

    def wrong(self, change: Arrays, expected: Arrays | None = None) -> list[str]:
        """The arrays that differ by more than rounding explains, the worst first."""
        expected = expected or self.whole
        over = {n: _norm(change[n] - expected[n]) for n in self.names}
        found = [n for n in self.names if not over[n] <= self.tolerance(n)]
        return sorted(found, key=lambda n: -over[n] / (_norm(expected[n]) + 1e-30))

    def weights(self, change: Arrays, name: str) -> Any:
        """The weight of each process's part in the change of an array; None if it is no sum of the parts."""
        parts = np.stack([part[name].ravel() for part in self.parts], 1)
        weights = np.linalg.lstsq(parts, change[name].ravel(), rcond=1e-6)[0]
        residual = _norm(change[name].ravel() - parts @ weights)
        return weights if residual <= 2 * (1 + np.abs(weights).sum()) * self.tolerance(name) else None


def judge(start: Sequence[Arrays], cases: Sequence[Case], again: bool = False) -> dict[str, str]:
    """{claim: what is wrong; empty if the claim holds}. start: the initial parameters of each process. cases: steps on
    an even batch, on the next one, and on an uneven one. again: later steps start with what the first left behind."""
    claims = dict.fromkeys(("start", "split", "sum", "losses", "replicas", "update"), "")
    if differ := _differing(start):
        claims["start"] = f"the processes start with different parameters ({differ}); seed each in the same way, or broadcast"
    found = [{"split": _split(c), "sum": _sum(c), "losses": _losses(c), "replicas": _replicas(c), "update": _update(c)} for c in cases]
    for name in found[0]:
        claims[name] = claims[name] or next((reasons[name] for reasons in found if reasons[name]), "")
    first, following, uneven = (reasons["update"] for reasons in found)
    if not any(c.whole[n].any() for c in cases for n in c.names) and not any(r[n].any() for c in cases for r in c.replicas for n in c.names):
        claims["update"] = "the steps do not change the parameters"
    elif not first and not found[0]["sum"] and following:
        claims["sum"], claims["update"] = "", "only the first update is that of one process; look for what a step leaves behind, such as gradients"
    elif not first and uneven and not claims["split"] and not claims["sum"]:
        claims["update"] = "the update is wrong where shards have different sizes; add the gradients of all examples, and divide by the size of the whole batch"
    return claims


def _norm(array: Any) -> float:
    return float(np.linalg.norm(array))


def shard_sizes(n: int, k: int) -> list[int]:
    return [n // k + (i < n % k) for i in range(k)]


def _differing(replicas: Sequence[Arrays], leave_out: frozenset[str] = frozenset()) -> str:
    first, *others = replicas
    names = [n for n in first if n not in leave_out and any((first[n] != other[n]).any() for other in others)]
    return _list(names)


def _list(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _split(case: Case) -> str:
    """Whether each example is in one process."""
    if not case.examples:
        return ""
    n, found = case.n, [set(e) for e in case.examples]
    if all(len(e) == n for e in found):
        return f"each process computes all {n} examples; give each its own part of the batch"
    if found[0] == found[1]:
        return f"all processes compute the same {len(found[0])} of {n} examples; give each its own part"
    if missing := set(range(n)) - set.union(*found):
        return f"no process computes {len(missing)} of {n} examples ({_list([str(i) for i in sorted(missing)])}); with a remainder, some parts need one more"
    if twice := set.intersection(*found):
        return f"{len(twice)} of {n} examples are in more than one process ({_list([str(i) for i in sorted(twice)])})"
    return ""


def _sum(case: Case) -> str:
    """Whether each process's update contains the gradients of all."""
    own, only, one_has = [], {}, {}
    for name in case.names:
        if not case.whole[name].any() or all(name not in case.wrong(change) for change in case.replicas):
            continue
        is_own = []
        for rank, change in enumerate(case.replicas):
            weights = case.weights(change, name)
            size = _norm(case.alone[rank][name])
            alone = size > 0 and _norm(change[name] - case.alone[rank][name]) <= 2 * case.tolerance(name)
            zero = [abs(w) < 1e-2 for w in weights] if weights is not None else [False] * len(case.replicas)
            others = [z for i, z in enumerate(zero) if i != rank]
            is_own.append(alone or (all(others) and not zero[rank]))
            if weights is not None:
                contained = [i for i, z in enumerate(zero) if not z]
                if len(contained) == 1:
                    only.setdefault(name, []).append(contained[0])
        if all(is_own):
            own.append(name)
        elif any(is_own) and name not in case.wrong(case.replicas[0]):
            one_has[name] = 0
    if own:
        of = "" if len(own) == len(case.names) else f" for {_list(own)}"
        return f"each process uses only its own gradients{of}; sum them before the update, in the last backward pass of the step"
    if one_has:
        return f"only process 0 has the sum ({_list(list(one_has))}); leave it in each process, as all_reduce does"
    same = [name for name, ranks in only.items() if len(ranks) == len(case.replicas) and len(set(ranks)) == 1]
    if same and not _split(case):
        return f"the updates use only the gradients of process {only[same[0]][0]} ({_list(same)}); add those of the others"
    return ""


def _losses(case: Case) -> str:
    """Whether the losses that the step returns, if any, are those of the examples."""
    if case.whole_losses is None or len(case.whole_losses) != case.n:
        return ""
    losses = np.concatenate(case.losses)
    if len(losses) == case.n and not np.allclose(np.sort(losses), np.sort(case.whole_losses), rtol=1e-3, atol=1e-3):
        return "the losses are not those of the batch; divide X and y in the same way"
    return ""


def _replicas(case: Case) -> str:
    """Whether all processes have the same parameters after the step."""
    if differ := _differing(case.replicas, case.buffers):
        if not any(case.wrong(change) for change in case.replicas):
            return f"after a step, the processes have parameters that differ by rounding ({differ}); add in the same order"
        return f"after a step, the processes have different parameters ({differ}); use the same gradients and the same update"
    if not case.synced and (differ := _differing([{n: r[n] for n in case.buffers} for r in case.replicas])):
        return f"the processes have different running statistics ({differ}); broadcast or average them, as DDP and SyncBatchNorm do"
    return ""


def _update(case: Case) -> str:
    """Whether the update is that of one process, or what it looks like."""
    change = max(case.replicas, key=lambda change: case.distance(change, case.whole))
    wrong = case.wrong(change)
    if not wrong:
        return ""
    k, name = len(case.replicas), wrong[0]
    if not np.isfinite(change[name]).all():
        return f"the update of {name} is not finite"
    weights = [case.weights(change, n) for n in wrong if case.whole[n].any()]
    if weights and all(w is not None for w in weights):
        w, every = weights[0], np.concatenate(weights)
        if every.std() <= 1e-2 * abs(every.mean()):
            advice = "use the same learning rate and divisor for any number of processes"
            if np.isclose(w[0], k, rtol=1e-2):
                advice = "sum the gradients once, and divide by the size of the whole batch, not of a part"
            elif np.isclose(w[0], 1 / k, rtol=1e-2):
                advice = f"divide once: DDP already averages over {k} processes, so the loss is the sum times {k}, divided by the size of the batch"
            return f"the update is {w[0]:.4g} times that of one process; {advice}"
        if np.allclose(w * case.sizes, w[0] * case.sizes[0], rtol=1e-2):
            return f"each process has the same weight, with {' and '.join(map(str, case.sizes))} examples; add the gradients of all examples, and divide by the size of the whole batch"
    mean = {n: sum(alone[n] * size / case.n for alone, size in zip(case.alone, case.sizes)) for n in case.names}
    if not case.wrong(change, mean) and case.wrong(mean):
        return "each process changes its gradients before the sum, for example by clipping; sum first"
    relative = _norm(change[name] - case.whole[name]) / (_norm(case.whole[name]) + 1e-30)
    if case.distance(change, case.whole) < 2**-7:
        return f"the update differs from that of one process by {relative:.2%} for {name}: more than rounding in float32 explains, but bfloat16 or float16 could"
    advice = "are X and y divided in the same way, and the gradients changed (clipping, weight decay) only after the sum?"
    return f"the update differs from that of one process by {relative:.0%} for {name}; {advice}"
