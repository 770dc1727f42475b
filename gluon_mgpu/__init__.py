"""Data-parallel training of MXNet networks, written twice: with NDArray alone (`scratch`) and with Gluon (`highlevel`).

Call `configure` before the process first imports mxnet; importing `scratch` or `highlevel` calls it too.
"""

from gluon_mgpu.runtime.engine import configure
from gluon_mgpu.runtime.errors import Error, UsageError

__all__ = ["Error", "UsageError", "configure"]
IMPLS = ("scratch", "highlevel")
__version__ = "0.2.0"
