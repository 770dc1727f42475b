"""Data-parallel training of MXNet networks, twice: from NDArray alone (`scratch`) and with Gluon (`highlevel`).

Call `configure` before the first `import mxnet` of the process; importing `scratch` or `highlevel` does it too.
"""

from gluon_mgpu.runtime.engine import configure
from gluon_mgpu.runtime.errors import Error, UsageError

__all__ = ["Error", "UsageError", "configure"]
IMPLS = ("scratch", "highlevel")
__version__ = "0.2.0"
