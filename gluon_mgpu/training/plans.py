"""The plans that `tuning` can use to compute a network, and a cache of the plans that were the fastest.

Which plan is the fastest depends on the processor, the network and the size of the shards. This module does not import
mxnet: `doctor` shows the cache, even if MXNet is broken.
"""

from __future__ import annotations

import json
import math
import os
import platform
import zlib
from pathlib import Path
from typing import Any, NamedTuple

from gluon_mgpu import __version__
from gluon_mgpu.runtime.errors import Error, UsageError
from gluon_mgpu.training import checkpoint, datasets

CACHE = "tuning.json"  # {machine: {case: [block, piece]}}
# Environment variables that make oneDNN and OpenBLAS compute as on another processor.
EMULATION = ("DNNL_MAX_CPU_ISA", "OPENBLAS_CORETYPE")
MARGIN = 1.03  # plans whose times differ by at most this factor count as equally fast


class Plan(NamedTuple):
    """block: channels are padded so that their number is a multiple of block; 1: no padding. piece: the number of
    examples that are computed at once; 0: the whole shard."""

    block: int
    piece: int

    def __str__(self) -> str:
        blocks = f"channels in blocks of {self.block}, " if self.block > 1 else ""
        return blocks + (f"shards in pieces of {self.piece} examples" if self.piece else "whole shards")

    @classmethod
    def create(cls, value: Any) -> Plan:
        """Create a plan from its two numbers. Raises UsageError if they are invalid."""
        pair = isinstance(value, (list, tuple)) and [type(number) for number in value] == [int, int]
        if not pair or value[0] not in BLOCKS or not 0 <= value[1] <= 65536:
            raise UsageError(f"tune={value}: must be True, False, or (1 or 16, examples per piece), such as (16, 64)")
        return cls(*value)


BLOCKS = (1, 16)  # oneDNN's direct convolutions require multiples of 16 channels
DEFAULT = Plan(1, 0)  # the network as written
PLANS = (DEFAULT, *(Plan(block, piece) for block in BLOCKS for piece in (64, 32)), Plan(16, 0))


def fastest(times: dict[Plan, list[float]]) -> Plan:
    """Return the first of PLANS that takes at most MARGIN times as long as the fastest. times: {plan: seconds}.

    Other programs can only make a step slower, so the shortest of several times has the smallest error.
    """
    limit = MARGIN * min(map(min, times.values()))
    return next(plan for plan in PLANS if min(times.get(plan, [math.inf])) <= limit)


def machine() -> str:
    """Describe what the fastest plan depends on besides the case: the processor, emulation and gluon_mgpu's version."""
    with open("/proc/cpuinfo") as file:
        facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in file)}
    # A virtual machine may hide the exact model, or some of the instruction sets.
    flags = f"flags {zlib.crc32(facts.get('flags', '').encode()):08x}"
    emulated = [f"{name}={os.environ[name]}" for name in EMULATION if name in os.environ]
    return ", ".join([facts.get("model name", platform.machine()), flags, *emulated, f"gluon_mgpu {__version__}"])


def read() -> dict[str, Plan]:
    """Read {case: plan} for this machine from the cache. Raises Error if the cache is damaged or cannot be read."""
    return {case: Plan.create(plan) for case, plan in _read().get(machine(), {}).items()}


def add(case: str, plan: Plan) -> Plan:
    """Add a case to the cache, unless another process has added it. Returns the cached plan.

    If two processes add different cases at the same moment, one case may be lost; it is then measured again.
    Raises Error if the cache cannot be written.
    """
    content, file = _read(), _path()
    kept = content.setdefault(machine(), {}).setdefault(case, plan)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Error(f"cannot create {file.parent} ({error.strerror})") from None
    checkpoint.write_whole(file, lambda opened: opened.write(json.dumps(content, indent=1).encode()))
    return Plan.create(kept)


def _read() -> dict[str, dict[str, Any]]:
    try:
        found = json.loads(checkpoint.read(_path()))
        for plan in (plan for cases in found.values() for plan in cases.values()):
            Plan.create(plan)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise Error(f"cannot read {_path()} ({error.strerror})") from None
    except (ValueError, AttributeError, RecursionError, UsageError) as error:
        raise Error(f"{_path()} is damaged ({error}): remove it") from None
    return found


def _path() -> Path:
    return datasets.cache_folder(CACHE)
