"""What oneDNN uses of this processor."""

from __future__ import annotations

import os
import re
from pathlib import Path


def channel_block() -> int:
    """The number of channels that oneDNN's fast code computes at once: 16 with AVX-512, 8 with AVX2, else 1.

    This depends on the processor and on DNNL_MAX_CPU_ISA, which limits what oneDNN uses.
    """
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"^flags\s*:(.*)", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else None
    flags, limit = found[1].split() if found else [], os.environ.get("DNNL_MAX_CPU_ISA", "ALL").upper()
    if limit in ("SSE41", "AVX") or "avx2" not in flags:
        return 1
    return 16 if "avx512bw" in flags and not limit.startswith("AVX2") else 8
