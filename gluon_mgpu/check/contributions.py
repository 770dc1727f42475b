"""What each process adds to an update, for steps in several processes: `gluon-mgpu check` of PyTorch and JAX files.

Each process's examples add their part to the update of an array. The weights of the parts, (1, 1) in a right step of
two processes, tell what a wrong step does. It extends `comparison`, and needs only NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gluon_mgpu.check import comparison
from gluon_mgpu.check.comparison import (
    EQUALLY,
    Arrays,
    Claims,
    distance,
    order_bound,
    rounding_bound,
    rounding_note,
)


@dataclass
class BatchResult:
    """What one step did, from the parameters `start`.

    changes: in each process. whole: in one process; turned: with the examples in reverse order; exact: in float64, if
    it can be computed. alone: in one process, with only the examples of each process. examples: those of which each
    process computed gradients, if known. losses: of each process, and of one, if the step returns them. terms: in the
    longest sum of a gradient. buffers: names of running statistics; synced: the next forward pass makes them equal.
    """

    n: int
    terms: int
    start: Arrays
    changes: list[Arrays]
    whole: Arrays
    turned: Arrays
    exact: Arrays | None
    alone: list[Arrays]
    examples: list[list[int]] | None = None
    losses: tuple[list[np.ndarray], np.ndarray] | None = None
    buffers: frozenset[str] = frozenset()
    synced: bool = False

    def __post_init__(self) -> None:
        k = len(self.changes)
        self.names = [name for name in self.whole if name not in self.buffers]
        self.processes = [f"process {rank}" for rank in range(k)]
        self.sizes = [len(e) for e in self.examples or np.array_split(range(self.n), k)]
        self.mean = self._sum(
            [{a: c * s / self.n for a, c in alone.items()} for s, alone in zip(self.sizes, self.alone)]
        )
        scale = np.divide(self.sizes, self.n)
        if self._far(self._sum(self.alone)) < self._far(self.mean):  # the step does not divide by the size of the batch
            scale = np.ones(k)
        self.parts = [{name: s * alone[name] for name in self.names} for s, alone in zip(scale, self.alone)]
        # batch normalization sees only a part of the batch
        self.by_part = bool(self.buffers) and distance(self.changes[0], self._sum(self.parts)) < self._far(
            self.changes[0]
        )
        if self.by_part:
            self.whole, self.exact = self._sum(self.parts), None
        self.whole = {name: self.whole[name] for name in self.names}
        self.start = {name: self.start[name] for name in self.names}
        if self.exact:
            self.exact = {name: self.exact[name] for name in self.names}
            self.bound = rounding_bound(self.whole, self.exact, self.parts, self.start, self.terms)
        else:
            self.bound = order_bound(self.parts, self.start, self.terms)

    def _sum(self, parts: Sequence[Arrays]) -> Arrays:
        return {name: np.sum([part[name] for part in parts], axis=0) for name in self.names}

    def _far(self, change: Arrays) -> float:
        return distance(change, {name: self.whole[name] for name in self.names})

    def notes(self) -> list[str]:
        """How far the updates are from that in float64, if it is known."""
        change = max(self.changes, key=self._far)
        return [rounding_note(change, self.whole, self.exact, self.bound)] if self.exact else []

    def wrong(self, change: Arrays, expected: Arrays | None = None) -> list[str]:
        """The arrays that differ by more than rounding explains."""
        expected = expected or self.whole
        return [n for n in self.names if not norm(change[n] - expected[n]) <= self.bound[n]]

    def weights(self, change: Arrays, name: str) -> np.ndarray | None:
        """The weight of each process's part in the change of an array; None if it is no sum of the parts."""
        if not np.isfinite(change[name]).all():
            return None
        parts = np.stack([part[name].ravel() for part in self.parts], 1)
        weights = np.linalg.lstsq(parts, change[name].ravel(), rcond=1e-6)[0]
        rest = norm(change[name].ravel() - parts @ weights)
        return weights if rest <= 2 * (1 + np.abs(weights).sum()) * self.bound[name] else None

    def claims(self) -> Claims:
        split = comparison.split(self.examples, self.n, "the step") if self.examples else ""
        return {
            "devices": split,
            "sum": _sum(self),
            "losses": _losses(self),
            "replicas": _replicas(self),
            "update": _update(self),
        }


def judge(
    start: Sequence[Arrays], even: BatchResult, uneven: BatchResult, later: BatchResult, same: BatchResult
) -> Claims:
    """The claims of all batches. start: the initial parameters of each process. later: the step after `even`. same: all
    labels are equal."""
    batches = [even, uneven, later]
    found = [batch.claims() for batch in batches]
    claims = {"start": comparison.start(start), **comparison.combine(found)}
    fails = [bool(of_batch["update"]) for of_batch in found]
    if not any(a.any() for b in batches for change in [b.whole, *b.changes] for a in change.values()):
        claims["update"] = "the steps do not change the parameters; assign in place"
    elif fails[2] and not fails[0]:  # what the first step leaves behind; the parts may look like a missing sum
        claims |= {"sum": "", "replicas": ""}
    elif {claim for claim, reason in found[0].items() if reason} == {"update"}:  # the even batch has the reason
        claims |= {"sum": "", "replicas": ""}
    elif fails[1] and not fails[0] and not claims["devices"]:  # a wrong weight for uneven parts, not a missing sum
        claims["sum"] = ""
    matches = not even.wrong(even.changes[0], even.mean)  # what the processes do alone
    if fails[0] and not matches and not any(same.wrong(change) for change in same.changes):
        claims["update"] = "examples get the labels of others; divide X and y in the same way"
    return claims


def norm(array: Any) -> float:
    return float(np.linalg.norm(array))


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _sum(batch: BatchResult) -> str:
    """Whether each process updates with the gradients of all."""
    wrong = [batch.wrong(change) for change in batch.changes]
    own: list[str] = []
    not_all: list[str] = []
    only: list[tuple[str, int]] = []
    for name in batch.names:
        ranks = [rank for rank, names in enumerate(wrong) if name in names and batch.whole[name].any()]
        contained = [_contained(batch, rank, name) for rank in range(len(wrong))]
        if ranks and all(contained[rank] == [rank] for rank in ranks):
            (own if len(ranks) == len(wrong) else not_all).append(name)
        elif ranks and len(contained[0]) == 1 and all(c == contained[0] for c in contained):
            only.append((name, contained[0][0]))
    if own:
        of = "" if len(own) == len(batch.names) else f" for {_some(own)}"
        return f"each process updates with its own gradients{of}; sum them in the last backward pass, before the update"
    if not_all:
        return (
            f"one process updates with its own gradients ({_some(not_all)}); leave the sum in all, as all_reduce does"
        )
    if only and not (batch.examples and comparison.split(batch.examples, batch.n)):
        names = _some([name for name, _ in only])
        return f"the update uses only the gradients of process {only[0][1]} ({names}); add those of the others"
    return ""


def _contained(batch: BatchResult, rank: int, name: str) -> list[int]:
    """The processes whose gradients are in a process's update of an array; empty if unknown."""
    change, own = batch.changes[rank][name], batch.alone[rank][name]
    if own.any() and norm(change - own) <= 2 * batch.bound[name]:
        return [rank]
    weights = batch.weights(batch.changes[rank], name)
    return [] if weights is None else [i for i, w in enumerate(weights) if abs(w) > 0.01]


def _losses(batch: BatchResult) -> str:
    """Whether the losses that the step returns are those of the examples, if it returns one for each."""
    if not batch.losses or len(batch.losses[1]) != batch.n:
        return ""
    several = np.concatenate(batch.losses[0])
    right = len(several) != batch.n or comparison.alike(several, batch.losses[1], batch.terms)
    return "" if right else "the losses are not those of the batch; divide X and y in the same way"


def _replicas(batch: BatchResult) -> str:
    def differ(names: Sequence[str]) -> str:
        first, *others = batch.changes
        return _some([n for n in names if any((first[n] != other[n]).any() for other in others)])

    if names := differ(batch.names):
        wrong = [rank for rank, change in enumerate(batch.changes) if batch.wrong(change)]
        if not wrong:
            return f"the processes have parameters that differ by rounding ({names}); add in the same order in each"
        if len(wrong) < len(batch.changes):
            return f"the step of process {wrong[0]} is not that of the others ({names}); leave the sum in each process"
        advice = "sum all gradients before the update; DDP does so in the last backward pass if it is not in no_sync"
        return f"after a step, the processes have different parameters ({names}); {advice}"
    if not batch.synced and (names := differ(sorted(batch.buffers))):
        return f"the processes have different running statistics ({names}); average or broadcast them, as DDP does"
    return ""


def _update(batch: BatchResult) -> str:
    change = max(batch.changes, key=batch._far)
    wrong = batch.wrong(change)
    if not wrong:
        return ""
    if infinite := [name for name in wrong if not np.isfinite(change[name]).all()]:
        return f"the update is not finite ({_some(infinite)})"
    weights = [batch.weights(change, name) for name in wrong if batch.whole[name].any()]
    if weights and all(
        w is not None and np.ptp(w * batch.sizes) < 0.01 * abs(w[0]) and np.ptp(w) > 0.01 for w in weights
    ):
        return f"the parts of {' and '.join(map(str, batch.sizes))} examples have the same weight; {EQUALLY}"
    factor = sum(np.vdot(change[n], a) for n, a in batch.whole.items()) / sum(
        np.vdot(a, a) for a in batch.whole.values()
    )
    scaled = distance(change, {name: factor * a for name, a in batch.whole.items()}) < 1e-3
    for extreme in (np.max, np.min):
        if not batch.wrong(change, {n: extreme([part[n] for part in batch.parts], axis=0) for n in batch.names}):
            return "the update has the largest or smallest of the processes' gradients; add them (ReduceOp.SUM)"
    if not batch.by_part and batch.wrong(batch.turned):
        return f"the update depends on the order of the examples, also in one process; {EQUALLY}"
    if not scaled and batch.wrong(batch.mean) and not batch.wrong(change, batch.mean):
        cause = "for example by clipping, or by dividing by a number of its own examples"
        return f"each process changes its gradients before the sum, {cause}; sum first"
    return comparison.update(batch.processes, change, batch.whole, batch.parts, batch.bound, batch.start)
