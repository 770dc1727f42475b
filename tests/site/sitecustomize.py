"""Python runs this when it starts. It hides SciPy's statistics, which take a third of the time of `import mxnet` if an
extra has installed SciPy, and which only MXNet's quantization uses."""

import sys

sys.modules["scipy.stats"] = None
