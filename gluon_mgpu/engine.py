"""What must stand before libmxnet loads, because MXNet 1.9.1 reads it once. docs/engine.md has reasons and figures.

NumPy's dropped names, OpenMP threads, the engine's temporary space, the allocator. Nothing here imports mxnet; NumPy is
imported by `configure` alone, since `gluon_mgpu.doctor` must start where it is broken.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import sys
import threading
from typing import TYPE_CHECKING

from gluon_mgpu import cuda
from gluon_mgpu.distributed import place
from gluon_mgpu.errors import Error

if TYPE_CHECKING:
    from mxnet import Context

TEMP_COPIES = 64  # for several contexts: each copy can grow to the largest temporary space of a step
SPINS = (
    "20000"  # how often an OpenMP thread looks for work before it sleeps; libgomp's own number starves a busy machine
)
ONE_WORKER_ENGINES = ("", "ThreadedEnginePerDevice", "NaiveEngine")

# mallopt's parameters (malloc.h) with the variable by which a user sets the same thing.
ALLOCATOR = (
    ("MALLOC_MMAP_MAX_", -4, 0),  # take large arrays from the heap, not from a mapping of their own
    ("MALLOC_TRIM_THRESHOLD_", -1, 2**31 - 1),  # and keep what is freed: the next operator needs it again
    ("MALLOC_TOP_PAD_", -2, 64 << 20),  # bytes by which the heap grows
    ("MALLOC_ARENA_MAX", -8, 1),  # one heap: a worker reuses what another one freed
)

# With one of these set, libgomp may start fewer threads than oneDNN divided its work for: the result is then wrong.
FEWER_THREADS = ("OMP_DYNAMIC", "OMP_THREAD_LIMIT", "OMP_MAX_ACTIVE_LEVELS")
# These bind the workers of all contexts to the core of the thread that started them.
BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY")

# What the libmxnet.so of either wheel takes from the system, with Debian's package of it.
LIBRARIES = {
    "libgomp.so.1": "libgomp1",
    "libquadmath.so.0": "libquadmath0",
    "libstdc++.so.6": "libstdc++6",
    "libgcc_s.so.1": "libgcc-s1",
}

# Modules that pip knows by another name.
PACKAGES = {"PIL": "pillow", "distutils": "setuptools"}

# What `configure` may set or remove.
TOUCHED = ("OMP_NUM_THREADS", "MXNET_OMP_MAX_THREADS", "MXNET_CPU_TEMP_COPY", "GOMP_SPINCOUNT", cuda.CHECKS, *BINDING)

_configured = False
# TOUCHED as the user gave them and as `configure` left them, where that differs; None: not set.
_before: dict[str, str | None] = {}
_after: dict[str, str | None] = {}
_set: dict[str, str] = {}  # what this module put into the environment, so that it is not taken for the user's


def configure(contexts: int | None = None) -> None:
    """Prepare this process for training on `contexts` CPU contexts; call it before the first `import mxnet`.

    contexts: how many contexts will compute side by side. None means that it is not known: several are assumed, unless
    an earlier call said how many. What the environment already sets is kept where it is safe; what is overruled is
    named on standard error. Raises Error where MXNet is missing, where mxnet was imported first with settings under
    which `contexts` CPU contexts can hang, and as cuda.prepare does.
    """
    global _configured
    if contexts is None and _configured:
        return
    if contexts is not None and contexts < 1:
        raise Error(f"{contexts} contexts: at least 1 is needed")
    if "mxnet" in sys.modules:
        _check_threads(contexts or 1)
        copies = os.environ.get("MXNET_CPU_TEMP_COPY", "4")
        if not _configured and contexts != 1 and (not copies.isdigit() or int(copies) < TEMP_COPIES):
            _say("mxnet was imported before gluon_mgpu.configure(): CPU contexts will take turns, not run side by side")
    else:
        given = {name: _before.get(name, os.environ.get(name)) for name in TOUCHED}
        if importlib.util.find_spec("mxnet") is None:
            raise Error("MXNet is not installed: run `make install`, or `pip install --no-deps mxnet==1.9.1`")
        from gluon_mgpu import numpy_names

        numpy_names.lend()
        _set_threads(contexts)
        cuda.prepare()  # after the threads: a library of the system's may load libgomp
        if contexts != 1:
            os.environ.setdefault("MXNET_CPU_TEMP_COPY", str(TEMP_COPIES))
        for name in TOUCHED:
            if os.environ.get(name) != given[name]:
                _before[name], _after[name] = given[name], os.environ.get(name)
        _set_allocator()
    _configured = True


def check(ctx: list[Context]) -> None:
    """Refuse to train on several CPU contexts that can hang each other: raises Error, and waits for nothing.

    ctx: a list of mxnet contexts. GPU contexts are always well.
    """
    _check_threads(sum(c.device_type.startswith("cpu") for c in ctx))


def line_of(error: BaseException) -> str:
    """The line for an error that nobody foresaw: what is missing and what to do, or the last line of its own."""
    if isinstance(error, ImportError):
        while error.__context__:  # NumPy's own is a page of advice; what went wrong is the first that led to it
            error = error.__context__
    lines = str(error).strip().splitlines() or [""]
    more = "`gluon-mgpu doctor` may say what to do, --debug" if isinstance(error, ImportError) else "--debug"
    return missing(str(error)) or f"{type(error).__name__}: {lines[-1]} ({more} shows where)"


def missing(message: str) -> str | None:
    """The line for a message that a module or a library was not found; None for any other message.

    The loader names the first library that it misses. This names all that are missing of those that MXNet takes from
    the system, with the packages that bring them. It loads the others: only for a process in which MXNet did not load.
    """
    module = re.search(r"No module named '(\w+)'", message)
    if module:
        return (
            f"{module[1]} is not installed for {sys.executable}: use .venv/bin/python, which `make install` sets up, "
            f"or `pip install {PACKAGES.get(module[1], module[1])}`"
        )
    found = re.search(r"([^\s/]+\.so[^\s:]*): cannot open shared object file", message)
    if not found:
        return None
    absent = {name: package for name, package in LIBRARIES.items() if not _found(name)}
    if found[1] not in absent:
        return f"{found[1]} is needed, which this machine does not have: install the package that brings it"
    return (
        f"MXNet needs {' and '.join(absent)}, which this machine does not have: "
        f"`apt install {' '.join(absent.values())}` (Debian's and Ubuntu's names)"
    )


def _found(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError as error:
        return not str(error).startswith(f"{library}: cannot open shared object file")  # but one that it needs
    return True


def users_environment() -> dict[str, str]:
    """The environment without what `configure` changed, for another process: that one settles its own."""
    own = {name: value for name, value in _before.items() if os.environ.get(name) == _after[name]}
    return {name: value for name, value in {**os.environ, **own}.items() if value is not None}


def openmp_threads() -> int:
    """How many OpenMP threads a thread that starts now would use, and so each of MXNet's workers."""
    found = []
    gomp = ctypes.CDLL("libgomp.so.1")
    thread = threading.Thread(target=lambda: found.append(gomp.omp_get_max_threads()))
    thread.start()
    thread.join()
    return found[0]


def _check_threads(contexts: int) -> None:
    if contexts > 1 and openmp_threads() > 1:
        raise Error(
            f"{contexts} CPU contexts can hang: OpenMP was loaded for {openmp_threads()} threads before "
            f"gluon_mgpu could set 1; call gluon_mgpu.configure(contexts={contexts}) before anything "
            "imports mxnet, or start with OMP_NUM_THREADS=1"
        )


def _set_threads(contexts: int | None) -> None:
    """One OpenMP thread where more than one worker can call OpenBLAS at a time; else every core that we may use."""
    alone = (
        contexts == 1
        and os.environ.get("MXNET_CPU_WORKER_NTHREADS", "1") == "1"
        and os.environ.get("MXNET_ENGINE_TYPE", "") in ONE_WORKER_ENGINES
    )
    fewer = [name for name in FEWER_THREADS if name in os.environ]
    if alone and not fewer:
        asked = _users("OMP_NUM_THREADS")
        if asked is None or not asked.strip().isdecimal() or int(asked) == 0:
            cores = len(os.sched_getaffinity(0)) // place.place().local_workers
            _put("OMP_NUM_THREADS", str(max(1, cores)), "since it is no number of threads")
        if "OMP_WAIT_POLICY" not in os.environ:
            os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
        return
    why = f"since {fewer[0]} is set" if alone else "since several CPU contexts can hang with more"
    for name in ("OMP_NUM_THREADS", "MXNET_OMP_MAX_THREADS"):
        _put(name, "1", why)
    if not alone:
        for name in BINDING:
            if name in os.environ:
                _say(f"{name}={os.environ.pop(name)} is overruled: it would put all contexts on one core")


def _users(name: str) -> str | None:
    """The user's value of an environment variable, or None."""
    value = os.environ.get(name)
    return None if value == _set.get(name) else value


def _put(name: str, value: str, why: str) -> None:
    asked = _users(name)
    if asked is not None and asked != value:
        _say(f"{name}={asked} is overruled: {value}, {why} (docs/engine.md)")
    os.environ[name] = _set[name] = value


def _set_allocator() -> None:
    """glibc's malloc: keep freed memory instead of faulting it in again at the next operator."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # a libc other than glibc
        return
    for variable, parameter, value in ALLOCATOR:
        if variable not in os.environ:
            mallopt(parameter, value)


def _say(line: str) -> None:
    place.say(line)
