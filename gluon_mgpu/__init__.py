"""Data-parallel training of MXNet networks: with NDArray alone (`scratch`) and with Gluon (`highlevel`).

Import this package before mxnet, so that the first `import mxnet` sets up the engine for several CPU contexts.
"""

from typing import TYPE_CHECKING, Any

from gluon_mgpu.compat.startup import configure
from gluon_mgpu.support.errors import Error, UsageError

if TYPE_CHECKING:
    from gluon_mgpu.training.train import train

__all__ = ["Error", "UsageError", "configure", "train"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "train":  # imported when it is used, because it needs NumPy, and `doctor` must start without
        from gluon_mgpu.training.train import train

        return train
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
