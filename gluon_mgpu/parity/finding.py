"""What parity finds: a claim, whether it holds, and the figure that says so."""

from __future__ import annotations

from typing import NamedTuple


class Finding(NamedTuple):
    check: str  # the group that it belongs to
    claim: str
    holds: bool | None  # None: cannot be shown here
    figure: str  # what was found

    @property
    def failed(self) -> bool:
        return self.holds is not None and not self.holds
