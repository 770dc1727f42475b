"""Python imports this file at startup in programs that `gluon-mgpu run` starts, and in their Python child processes."""

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

# Run the sitecustomize that this file shadows, if there is one.
sys.path[:] = [folder for folder in sys.path if Path(folder).absolute() != Path(__file__).absolute().parent]
spec = PathFinder.find_spec("sitecustomize", sys.path)
try:
    if spec and spec.loader:
        spec.loader.exec_module(module_from_spec(spec))
finally:
    try:
        from gluon_mgpu.old import prepare
    except ModuleNotFoundError:  # the program started a different Python, without gluon_mgpu
        pass
    else:
        prepare.prepare()
