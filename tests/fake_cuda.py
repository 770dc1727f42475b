"""Builds what stands in for NVIDIA's driver and libraries (fake_cuda.c)."""

import re
import subprocess
from pathlib import Path

from gluon_mgpu.compat import cuda

SOURCE = Path(__file__).parent / "fake_cuda.c"
# {library: pattern of the functions that libmxnet.so needs from it}
LIBRARIES = {
    "libcudart.so.11.0": "(__)?cuda",
    "libcublas.so.11": "cublas",
    "libcudnn.so.8": "cudnn",
    "libcufft.so.10": "cufft",
    "libcurand.so.10": "curand",
    "libcusolver.so.11": "cusolver",
    "libnvrtc.so.11.2": "nvrtc",
    "libnvToolsExt.so.1": "nvtx",
    "libnccl.so.2": "nccl",
    "libcuda.so.1": "cu[A-Z]",
}


def build(libmxnet: Path, folder: Path) -> None:
    """Write one library with all functions of CUDA that a library needs, and a link for each of NVIDIA's names."""
    needed = subprocess.run(["nm", "-D", "--undefined-only", libmxnet], capture_output=True, text=True, check=True)
    made = set(re.findall(r"\w+", SOURCE.read_text()))
    names = {line.split()[1].partition("@")[0] for line in needed.stdout.splitlines()}
    missing = sorted(name for name in names - made if re.match("|".join(LIBRARIES.values()), name))
    rest = "".join(f"int {name}() {{ return 0; }}\n" for name in missing)
    nodes = (
        f"{library} {{ global: {pattern.replace('(__)?cuda', '__cuda*; cuda')}*; }};\n"
        for library, pattern in LIBRARIES.items()
    )
    (folder / "exports").write_text("".join(nodes))
    library = folder / "libfake_cuda.so"
    flags = ["-shared", "-fPIC", "-O1", "-w", f"-Wl,--version-script={folder / 'exports'}", "-o", library]
    subprocess.run(["gcc", *flags, "-x", "c", "-"], input=SOURCE.read_text() + rest, text=True, check=True)
    for name in {*LIBRARIES, *(name for _, *names in cuda.LIBRARIES for name in names)}:
        (folder / name).symlink_to(library.name)
