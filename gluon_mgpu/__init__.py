"""Data-parallel training of MXNet networks, written twice: with NDArray alone (`scratch`) and with Gluon (`highlevel`).

Import this package before mxnet, so that the first `import mxnet` sets up the engine for several CPU contexts.
"""

import sys

from gluon_mgpu.runtime.engine import Finder, configure
from gluon_mgpu.runtime.errors import Error, UsageError

__all__ = ["Error", "UsageError", "configure"]
__version__ = "0.1.0"

sys.meta_path.insert(0, Finder())
