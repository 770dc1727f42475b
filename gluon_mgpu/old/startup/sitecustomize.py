"""Python imports this file at startup in programs that `gluon-mgpu run` starts, and in their Python child processes."""

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

HERE = Path(__file__).absolute()

# Run the sitecustomize that this file shadows, if there is one.
sys.path[:] = [folder for folder in sys.path if Path(folder).absolute() != HERE.parent]
spec = PathFinder.find_spec("sitecustomize", sys.path)
try:
    if spec and spec.loader:
        spec.loader.exec_module(module_from_spec(spec))
finally:
    # Only this package comes from its folder: others there are for the Python that `gluon-mgpu` uses.
    spec = spec_from_file_location("gluon_mgpu", str(HERE.parents[2] / "__init__.py"))
    assert spec and spec.loader
    sys.modules["gluon_mgpu"] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules["gluon_mgpu"])
    from gluon_mgpu.old import prepare

    prepare.prepare()
