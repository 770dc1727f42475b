"""Checks that this project reproduces the accuracies, values and claims in the notebooks and the lecture.

`run` calls all checks: `examples` (printed values), `drift` (training steps), `bands` (accuracies) and `claims` (the
lecture). `report` formats the result. docs/parity.md explains the criteria and which errors they detect.
"""

from __future__ import annotations

from typing import NamedTuple


class Finding(NamedTuple):
    """The result of one check."""

    check: str  # the group that the claim belongs to
    claim: str
    holds: bool | None  # None: cannot be decided on this machine
    evidence: str
