"""Checks that this project reproduces the accuracies and values in the notebooks and the lecture.

`checks` calls `examples` (printed values), `drift` (training steps) and `bands` (accuracies). docs/parity.md explains
the criteria.
"""

from __future__ import annotations

from typing import NamedTuple


class Finding(NamedTuple):
    """The result of one check."""

    check: str  # the group that the claim belongs to
    claim: str
    holds: bool
    evidence: str
