"""Prepares a process for MXNet 1.9.1 before libmxnet is loaded. docs/performance.md gives the reasons and measurements.

The first `import mxnet` after `import gluon_mgpu` sets the numbers of OpenMP threads and temporary spaces, and the
allocator's parameters. This module imports neither mxnet nor NumPy, because `doctor` must start even if NumPy is
broken.
"""

from __future__ import annotations

import _thread
import ctypes
import os
import platform
import re
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from gluon_mgpu.compat import aarch64, cuda, hooks
from gluon_mgpu.support import log, subprocesses
from gluon_mgpu.support.errors import Error, UsageError

if TYPE_CHECKING:
    from mxnet import Context

TEMP_COPIES = 64  # temporary spaces; with fewer, contexts wait for a free space. Each grows to the largest size needed.
SPINS = "20000"  # how often idle OpenMP threads check for work before they sleep; the default slows down busy machines
MOST_THREADS = 999

# Variables with which MXNet hangs or crashes without a message that names them: (names, valid values, description)
VARIABLES = (
    # With 64 KiB, MXNet's OpenMP threads overflow their stacks. OpenMP ignores what is not a size.
    ("G?OMP_STACKSIZE", r"(?i)(?! *(\d{1,3} *k?|\d{1,6} *b|0+ *[mg]) *$).*", "at least 1M"),
    (
        r"MXNET_(CPU|GPU)_(WORKER_NTHREADS|PRIORITY_NTHREADS|COPY_NTHREADS|TEMP_COPY|PARALLEL_RAND_COPY)",
        "([1-9][0-9]{0,2})?",
        f"from 1 to {MOST_THREADS}",
    ),
)

# Make glibc's malloc keep freed memory, so that the next operator causes no page faults:
# (environment variable for the user's own value, mallopt's parameter from malloc.h, value)
ALLOCATOR = (
    # Allocate arrays of up to 32 MiB, glibc's largest threshold, on the heap. Larger arrays are mapped, and unmapped
    # when freed; otherwise, they would fragment the heap, which never shrinks.
    ("MALLOC_MMAP_THRESHOLD_", -3, 32 << 20),
    ("MALLOC_TRIM_THRESHOLD_", -1, 2**31 - 1),  # keep freed memory for the next operator
    ("MALLOC_TOP_PAD_", -2, 64 << 20),  # bytes added each time the heap grows
    ("MALLOC_ARENA_MAX", -8, 1),  # one heap, so that a worker can reuse memory that another worker freed
)

# If one of these is set, libgomp may start fewer threads than oneDNN expects, which makes results wrong.
FEWER_THREADS = ("OMP_DYNAMIC", "OMP_THREAD_LIMIT", "OMP_MAX_ACTIVE_LEVELS")
# These bind the worker threads of all contexts to the core of the thread that started them.
BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY")


class Plan(NamedTuple):
    """What to prepare MXNet for. contexts: number of contexts that compute at the same time; None: several.

    processes: number of processes that share this machine's cores. may_serve: whether this process may be one of
    MXNet's parameter servers, which `import mxnet` runs until they are killed. own_threads: whether a single context
    uses MXNet's own number of threads, so that results are those without this package; otherwise, it uses all cores.
    """

    contexts: int | None = None
    processes: int = 1
    may_serve: bool = False
    own_threads: bool = False


_functions: list[object] = []  # that MXNet's engine calls
_plan = Plan()
_prepared: Plan | None = None
_stock = False


@contextmanager
def _prepared_for_mxnet(module: ModuleType) -> Iterator[None]:
    """Import mxnet inside this `with` block."""
    from gluon_mgpu.compat import numpy_names

    if not _stock and _prepared != _plan:
        _prepare()
    # MXNet uses names that NumPy and SciPy are going to remove; with PYTHONWARNINGS=error, it could not be imported.
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"mxnet(\.|$)")
    with numpy_names.lent():
        yield
    if module.__version__.startswith("2."):
        from gluon_mgpu.compat import mxnet2

        mxnet2.restore(module)
    elif not _stock:
        from gluon_mgpu.compat import pooling

        pooling.install(module)
    if not _stock:  # another library may have loaded OpenMP before
        check_contexts([module.cpu(i) for i in range(_plan.contexts or 1)])
    _repeat_lost_interrupts()


hooks.around_import("mxnet", _prepared_for_mxnet)


def _repeat_lost_interrupts() -> None:
    """Repeat a Ctrl-C that arrived while an NDArray was freed, because Python ignores exceptions in `__del__`."""
    report = sys.unraisablehook

    def repeat_or_report(ignored: sys.UnraisableHookArgs) -> None:
        if issubclass(ignored.exc_type, KeyboardInterrupt):
            threading.Timer(0.01, _thread.interrupt_main).start()  # at once, it would be ignored here, too
        else:
            report(ignored)

    sys.unraisablehook = repeat_or_report


def plan(**changes: Any) -> None:
    """Change fields of the Plan for which the first `import mxnet` prepares this process."""
    global _plan
    _plan = _plan._replace(**changes)


def use_stock_settings() -> None:
    """Make the first `import mxnet` use MXNet's own settings, for comparison. Raises Error after that import."""
    global _stock
    if "mxnet" in sys.modules:
        raise Error("mxnet is imported already, with other settings")
    _stock = True
    if platform.machine() == "aarch64":
        aarch64.use_openblas()  # the import needs this with any settings


def configure(contexts: int | None = None) -> None:
    """Prepare this process for training on CPU contexts. Call this before the first `import mxnet`; otherwise, that
    import prepares for several contexts.

    contexts: number of contexts that compute at the same time; later calls can only increase it. None: as in an earlier
    call; several if there was none.
    Settings from the user's environment are kept if they are safe; a notice names each setting that is ignored.
    Raises UsageError for fewer than 1 context, and Error if mxnet was imported earlier with settings that can make this
    number of CPU contexts hang, or if `cuda.open_libraries` fails.
    """
    global _prepared
    if contexts is not None:
        if contexts < 1:
            raise UsageError("contexts", contexts, "must be at least 1")
        plan(contexts=max(contexts, _plan.contexts or 1))
    if "mxnet" not in sys.modules:
        if _prepared != _plan:
            _prepare()
    elif _prepared is None or contexts is not None:
        import mxnet as mx

        if contexts != 1 and (_prepared is None or _prepared.contexts == 1):
            advice = "for full speed, call gluon_mgpu.configure(contexts=...) before MXNet is imported"
            log.say(f"CPU contexts will take turns, because MXNet was not prepared for several; {advice}")
        check_contexts([mx.cpu(i) for i in range(contexts or 1)])
        _prepared = _plan


def _prepare() -> None:
    """Prepare this process as `_plan` says. This undoes what an earlier call changed."""
    global _prepared
    if sys.flags.optimize > 1:
        raise UsageError(None, None, "MXNet needs docstrings: do not use -OO or PYTHONOPTIMIZE=2")
    check_environment()
    role = os.environ.get("DMLC_ROLE", "worker")
    if role != "worker" and not _plan.may_serve:
        raise UsageError("DMLC_ROLE", role, "MXNet would run a parameter server, which never ends; unset it")
    if subprocesses.set_by_startup:  # by an earlier call
        users = subprocesses.users_environment()
        for name in subprocesses.set_by_startup:
            os.environ.pop(name, None)
        os.environ.update(users)
    users = dict(os.environ)
    _set_threads(_plan.contexts, _plan.processes)
    cuda.open_libraries()  # after `_set_threads`, because this may load libgomp, which reads OMP_NUM_THREADS
    if platform.machine() == "aarch64":
        aarch64.use_openblas()
    if _plan.contexts != 1:
        os.environ.setdefault("MXNET_CPU_TEMP_COPY", str(TEMP_COPIES))
    if log.rank() is not None and log.size() != 1:
        # By default, up to 15 operators run as one, so a gradient would wait for the operators after it.
        os.environ.setdefault("MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN", "1")
    both = {name: (users.get(name), os.environ.get(name)) for name in {*users, *os.environ}}
    subprocesses.set_by_startup = {name: (before, after) for name, (before, after) in both.items() if before != after}
    for variable, parameter, value in ALLOCATOR:
        if variable not in os.environ and sys.platform == "linux":
            ctypes.CDLL(None).mallopt(parameter, value)
    _prepared = _plan


def check_environment() -> None:
    """Raise UsageError for one of VARIABLES. MXNet itself names other variables that it cannot use."""
    for name, value in os.environ.items():
        for names, valid, description in VARIABLES:
            if re.fullmatch(names, name) and not re.fullmatch(valid, value):
                raise UsageError(name, value, f"must be {description}; unset it to use MXNet's default")


def check_contexts(ctx: Sequence[Context]) -> None:
    """Make sure that these contexts cannot hang: if MXNet was loaded with several OpenMP threads, several CPU contexts
    use one thread each from now on. Raises Error if their number of threads cannot be changed."""
    cpus = [c.device_id for c in ctx if c.device_type.startswith("cpu")]
    if len(cpus) < 2 or openmp_threads() == 1:
        return
    if not _one_thread_computes():
        advice = "import gluon_mgpu before other libraries, or set OMP_NUM_THREADS=1"
        raise Error(f"{len(cpus)} CPU contexts can hang, because OpenMP has {openmp_threads()} threads: {advice}")
    for index in cpus:
        use_one_thread(index)


def use_one_thread(index: int) -> None:
    """Make the engine's thread for a CPU context use one OpenMP thread.

    A thread can change this number only for itself, so the change is queued like an operator.
    """
    import mxnet as mx

    gomp, done, none = ctypes.CDLL("libgomp.so.1"), threading.Event(), ctypes.c_void_p()

    def change(*_: object) -> None:
        gomp.omp_set_num_threads(1)
        done.set()

    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(change)
    _functions.append(function)  # the engine's thread is still in it after `done` is set
    context = ctypes.byref((ctypes.c_int * 2)(1, index))  # (kind, index); 1: CPU
    push = mx.base._LIB.MXEnginePushSync
    mx.base.check_call(push(function, none, none, context, none, 0, none, 0, none, 0, b"one OpenMP thread"))
    done.wait()  # waitall would also raise the errors of the program's own operators


def affinity() -> set[int]:
    """The cores that this process may use, by number."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else {*range(os.cpu_count() or 1)}


def cores() -> int:
    """The number of cores that this process may use."""
    return len(affinity())


def openmp_threads() -> int:
    """The number of OpenMP threads that each of MXNet's worker threads uses; 1 on macOS, which has no libgomp."""
    if sys.platform == "darwin":
        return 1
    counts = []
    gomp = ctypes.CDLL("libgomp.so.1")
    thread = threading.Thread(target=lambda: counts.append(gomp.omp_get_max_threads()))
    thread.start()
    thread.join()
    if "OMP_NUM_THREADS" in os.environ:
        return counts[0]
    return min(counts[0], own_threads())


def own_threads() -> int:
    """The number of OpenMP threads that MXNet 1.9.1 uses if OMP_NUM_THREADS is not set (src/engine/openmp.cc)."""
    most = os.environ.get("MXNET_OMP_MAX_THREADS", "")
    half = cores() // 2 if platform.machine() in ("x86_64", "AMD64") else 0
    return (int(most) if most.isdecimal() else half) or cores()


def _one_thread_computes() -> bool:
    """Whether MXNet's engine uses one thread for each CPU context."""
    threads, engine = os.environ.get("MXNET_CPU_WORKER_NTHREADS", "1"), os.environ.get("MXNET_ENGINE_TYPE")
    return threads == "1" and engine != "ThreadedEngine"


def _set_threads(contexts: int | None, processes: int) -> None:
    """Use one OpenMP thread if several of MXNet's threads can call OpenBLAS at the same time, else one per core."""
    alone = contexts == 1 and _one_thread_computes()
    fewer = [name for name in FEWER_THREADS if name in os.environ]
    if alone and not fewer:
        asked = os.environ.get("OMP_NUM_THREADS", "").split(",")  # with one number for each level of nesting
        valid = all(number.strip().isdecimal() and 1 <= int(number) <= MOST_THREADS for number in asked)
        if not valid and not _plan.own_threads:
            _put("OMP_NUM_THREADS", str(max(1, cores() // processes)), "it is not a valid thread count")
        if "OMP_WAIT_POLICY" not in os.environ:
            os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
        return
    why = f"{fewer[0]} is set" if alone else "several CPU contexts can hang with more than one thread"
    for name in ("OMP_NUM_THREADS", "MXNET_OMP_MAX_THREADS"):
        _put(name, "1", why)
    if not alone:
        for name in BINDING:
            if name in os.environ:
                log.say(f"ignoring {name}={os.environ.pop(name)}: it would bind all contexts to one core")


def _put(name: str, value: str, why: str) -> None:
    asked = os.environ.get(name, value)
    if asked != value:
        log.say(f"{name}={asked} is ignored: {why}; using {value} (docs/performance.md)")
    os.environ[name] = value
