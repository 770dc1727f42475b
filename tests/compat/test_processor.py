"""What oneDNN uses of a processor, from stand-ins for /proc/cpuinfo."""

import pytest

from gluon_mgpu.compat import processor

NONE = "fpu sse4_1 avx"
PROCESSORS = [  # flags in /proc/cpuinfo, values of DNNL_MAX_CPU_ISA, channels at once
    (f"{NONE} avx2 avx512f avx512bw", ("", "ALL", "AVX512_CORE"), 16),
    (f"{NONE} avx2 avx512f avx512bw", ("AVX2", "avx2"), 8),
    (f"{NONE} avx2", ("", "ALL", "AVX512_CORE"), 8),
    (f"{NONE} avx2", ("AVX", "SSE41"), 1),
    (NONE, ("", "ALL"), 1),
]


@pytest.mark.parametrize("flags, limits, block", PROCESSORS)
def test_the_block_is_that_of_the_instructions_that_onednn_uses(flags, limits, block, monkeypatch):
    monkeypatch.setattr(processor.Path, "read_text", lambda _: f"processor\t: 0\nflags\t\t: {flags}\nbugs\t\t:\n")
    for limit in limits:
        monkeypatch.setenv("DNNL_MAX_CPU_ISA", limit)
        if not limit:
            monkeypatch.delenv("DNNL_MAX_CPU_ISA")
        assert processor.channel_block() == block
