"""Data-parallel training of MXNet networks: with NDArray alone (`scratch`) and with Gluon (`highlevel`).

Import this package before mxnet, so that the first `import mxnet` sets up the engine for several CPU contexts.
"""

import sys
from typing import TYPE_CHECKING, Any

from gluon_mgpu.compat.startup import Finder, configure
from gluon_mgpu.support.errors import Error, UsageError

if TYPE_CHECKING:
    from gluon_mgpu.training.train import train

__all__ = ["Error", "UsageError", "configure", "train"]
__version__ = "0.1.0"

sys.meta_path.insert(0, Finder())


def __getattr__(name: str) -> Any:
    if name == "train":  # imported when it is used, because it needs NumPy, and `doctor` must start without
        from gluon_mgpu.training.train import train

        return train
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
