"""What parity finds: a claim, whether it holds, and the figure that says so."""

from typing import NamedTuple, Optional


class Finding(NamedTuple):
    check: str  # the group that it belongs to
    claim: str
    holds: Optional[bool]  # None: cannot be shown here
    figure: str  # what was found

    @property
    def failed(self):
        return self.holds is not None and not self.holds
