"""Python imports this at startup in a program that `gluon-mgpu run` starts and in its Python child processes."""

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

# Run the machine's own sitecustomize, which this file hides.
sys.path[:] = [folder for folder in sys.path if Path(folder).absolute() != Path(__file__).absolute().parent]
spec = PathFinder.find_spec("sitecustomize", sys.path)
try:
    if spec and spec.loader:
        spec.loader.exec_module(module_from_spec(spec))
finally:
    try:
        from gluon_mgpu.legacy import prepare
    except ModuleNotFoundError:  # a different Python, started by the program
        pass
    else:
        prepare.prepare()
