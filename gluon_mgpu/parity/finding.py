"""The result of one check: a claim, whether it holds, and the evidence."""

from __future__ import annotations

from typing import NamedTuple


class Finding(NamedTuple):
    check: str  # the group of claims
    claim: str
    holds: bool | None  # None: it cannot be decided on this machine
    evidence: str
