"""Compiles the kernels, and the library with which libmxnet.so launches them."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gluon_mgpu.compat import cuda, startup
from gluon_mgpu.compat.kernels import sources
from gluon_mgpu.support import files, log
from gluon_mgpu.support.errors import Error, UsageError

HERE = Path(__file__).parent
NAMES = HERE / "names.txt"  # the kernels that this project's commands, exercises and tests launch, as MXNet names them
MISSING = "missing.txt"  # launch.c writes the names of others here
DOWNLOAD = (
    "`git clone --branch 1.9.1 https://github.com/apache/mxnet && cd mxnet && "
    "git submodule update --init 3rdparty/dmlc-core 3rdparty/dlpack 3rdparty/tvm && "
    "git clone --recurse-submodules --branch 1.10.0 https://github.com/NVIDIA/thrust 3rdparty/thrust`"
)
INCLUDE = ("include", "src", *(f"3rdparty/{name}" for name in ("mshadow", "dmlc-core/include", "dlpack/include")))
INCLUDE += ("3rdparty/tvm/nnvm/include", "3rdparty/tvm/include", "3rdparty/thrust", "3rdparty/thrust/dependencies/cub")
DEFINE = {
    **dict.fromkeys("NDEBUG MXNET_USE_CUDA MSHADOW_USE_CUDA MSHADOW_USE_CBLAS MXNET_USE_BLAS_OPEN".split(), 1),
    **dict.fromkeys("MSHADOW_IN_CXX11 MSHADOW_FORCE_STREAM DMLC_USE_CXX11 DMLC_STRICT_CXX11".split(), 1),
    **dict.fromkeys([f"MXNET_USE_{name}" for name in "CUDNN OPENCV LAPACK NCCL MKLDNN TVM_OP DIST_KVSTORE".split()], 0),
    **dict.fromkeys([f"MSHADOW_{name}" for name in "USE_CUDNN USE_MKL USE_SSE USE_F16C INT64_TENSOR_SIZE".split()], 0),
    **dict.fromkeys("MXNET_ENABLE_CUDA_RTC DMLC_LOG_CUSTOMIZE".split(), 0),
}
EXPORTS = "libcudart.so.11.0 { global: cuda*; __cuda*; local: *; };\n"  # only for users of this version of CUDA
# a kernel in PTX
ENTRY = re.compile(
    r"^[ \t]*(?:\.(?:weak|visible)\s+)?\.entry\s+([\w$]+)\(.*?^\}\n"
    r"(?=\s*(?:// \.globl|\.(?:visible|weak|extern|entry|func|global|const|shared)\b|\Z))",
    re.M | re.S,
)


def build(source: Path, arch: str = "compute_80", nvcc: str = "nvcc", compiler: str = "g++") -> Path:
    """Compile the kernels. Returns the library, which is in the folder that `cuda.kernels_folder` gives.

    source: folder of MXNet 1.9.1's sources. arch: compute_80 is PTX, which NVIDIA's driver compiles for any GPU of
    compute capability 8.0 or higher; sm_90 is machine code for 9.0. compiler: the C++ compiler that nvcc uses. Files
    that did not change since the last call are not compiled again.
    Raises UsageError if `source` or `arch` is wrong, and Error if a compiler is missing or fails.
    """
    if not re.fullmatch(r"(compute|sm)_[1-9]\d+", arch):
        raise UsageError("arch", arch, "must look like compute_80 (PTX) or sm_90 (machine code)")
    check_source(source)
    folder = cuda.kernels_folder()
    folder.mkdir(parents=True, exist_ok=True)
    missing = folder / MISSING
    names = NAMES.read_text().split() + (missing.read_text().split() if missing.exists() else [])
    ptx_arch = f"compute_{min(int(arch.split('_')[1]), 80)}"
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        groups, unknown = sources.write(names, source, work)
        if unknown:
            raise Error(f"{unknown[0]}: gluon_mgpu does not know this kernel's header; remove it from {missing}")
        options = ["-std=c++14", "-O3", "-w", "-Xcompiler=-w", "--expt-relaxed-constexpr", f"-arch={ptx_arch}", "-ptx"]
        options += [f"-D{name}={value}" for name, value in DEFINE.items()]
        options += [f"-I{path}" for path in (*(source / path for path in INCLUDE), HERE)]

        def compile_group(group: str) -> None:
            written, made = work / f"{group}.cu", folder / f"{group}.cu"  # `made` is what group.ptx was made from
            ptx, command = folder / f"{group}.ptx", [nvcc, "-ccbin", compiler, *options]
            made_from = f"// {shlex.join(command)}\n{written.read_text()}"
            if not (ptx.exists() and made.exists() and made.read_text() == made_from):
                _run(*command, "-o", work / ptx.name, written)
                if not (work / ptx.name).exists():
                    raise Error(f"{nvcc} wrote nothing for {group}.cu: pass CUDA's compiler")
                ptx.write_text(only(groups[group], (work / ptx.name).read_text()))
                made.write_text(made_from)
            _run(nvcc, "-fatbin", f"-gencode=arch={ptx_arch},code={arch}", "-o", ptx.with_suffix(".fatbin"), ptx)

        log.say(f"compiling {len(names)} kernels: about four minutes on one core, less if some were compiled before")
        with ThreadPoolExecutor(startup.cores()) as pool:
            list(pool.map(compile_group, groups))
    library = folder / f"{arch}.so"
    linked = library.with_suffix(files.PART)  # the library that works stays until another one is complete
    link(groups, linked, f"run `gluon-mgpu compile {source.resolve()} --arch {arch}`")
    os.replace(linked, library)
    for other in {*folder.glob("*.so")} - {library}:
        other.unlink()
    missing.unlink(missing_ok=True)
    return library


def link(groups: dict[str, list[str]], library: Path, advice: str) -> None:
    """Make a library of launch.c and the modules GROUP.fatbin beside it. groups: the kernels' names in each module.
    advice: what to do if another kernel is needed."""
    with tempfile.TemporaryDirectory() as temporary:
        (Path(temporary) / "kernels.h").write_text(header(groups, library.parent, advice))
        exports = Path(temporary) / "exports"
        exports.write_text(EXPORTS)
        flags = ["-shared", "-fPIC", "-O2", f"-I{temporary}", f"-Wl,--version-script={exports}"]
        _run("gcc", *flags, "-o", library, HERE / "launch.c", "-ldl", "-lpthread")


def check_source(source: Path) -> None:
    """Raise UsageError if this is not the folder of MXNet 1.9.1's sources."""
    try:
        text = (source / "include/mxnet/base.h").read_text(errors="replace")
    except OSError:
        text = ""
    missing = [folder for folder in INCLUDE if not os.path.isdir(source / folder)]
    if re.findall(r"#define MXNET_(?:MAJOR|MINOR|PATCH) (\d+)", text) != ["1", "9", "1"]:
        raise UsageError("source", str(source), f"not the folder of MXNet 1.9.1's sources; {DOWNLOAD} downloads them")
    if missing:
        raise UsageError("source", str(source), f"has no {missing[0]}; {DOWNLOAD} downloads all that is needed")


def only(names: list[str], ptx: str) -> str:
    """Remove all other kernels from PTX. Raises Error if one of `names` is not there.

    The mark of an anonymous namespace in a mangled name depends on the file; it is changed to the one in `names`.
    """
    ours = {_without_mark(match[1]): match[1] for match in ENTRY.finditer(ptx)}
    for name in names:
        made = ours.get(_without_mark(name))
        if made is None:
            raise Error(f"nvcc did not make {sources.demangled([name])[0]}")
        ptx = re.sub(rf"\b{re.escape(made)}\b", name, ptx) if made != name else ptx
    return ENTRY.sub(lambda match: match[0] if match[1] in names else "", ptx)


def _without_mark(name: str) -> str:
    """Remove the mark of an anonymous namespace, such as 10_GLOBAL__N_: its length and its text."""
    mark = re.search(r"(\d+)(?=_GLOBAL__N_)", name)
    return name[: mark.start()] + name[mark.end() + int(mark[1]) :] if mark else name


def header(groups: dict[str, list[str]], folder: Path, advice: str) -> str:
    """What launch.c includes: the modules folder/GROUP.fatbin, and the names of their kernels."""
    lines = [f"#define COMMAND {_quoted(advice)}"]
    for i, group in enumerate(groups):
        file = _quoted(f"{folder / group}.fatbin")
        section = f".section .rodata\n.balign 16\nmodule{i}: .incbin {file}\n.text"
        lines += [f"__asm__({_quoted(section)});", f"extern const char module{i}[];"]
    kernels = sorted((name, i) for i, group in enumerate(groups) for name in groups[group])
    modules = ", ".join(f"module{i}" for i in range(len(groups)))
    return "\n".join(
        [
            *lines,
            f"enum {{ MODULES = {len(groups)}, KERNELS = {len(kernels)} }};",
            f"static const void *const modules[] = {{{modules}}};",
            "static const Kernel kernels[] = {",
            *(f'  {{"{name}", {i}}},' for name, i in kernels),
            "};\n",
        ]
    )


def _quoted(text: str) -> str:
    """A text in C or assembler."""
    return json.dumps(text, ensure_ascii=False)


def _run(*words: str | Path) -> None:
    try:
        done = subprocess.run(words, capture_output=True, text=True)
    except OSError as error:
        raise Error(f"{words[0]} ({error.strerror}): install it, or give its path (docs/install.md)") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or [""]
        raise Error(f"{words[0]} failed for {words[-1]}: {lines[0]}")
