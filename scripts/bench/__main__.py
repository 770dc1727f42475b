"""Measures one point, in processes of its own: `python -m bench POINT STEPS PIPE`; see `timing.take_turns`.

POINT is a `grids.Point`, as a JSON list. MXNet and PyTorch cannot share a process: each loads an OpenMP of its own.
"""

import json
import sys

from bench.grids import Point

point, steps, pipe = Point(*json.loads(sys.argv[1])), int(sys.argv[2]), sys.argv[3]
if point.is_torch:
    from bench.torch_points import measure
else:
    from bench.mxnet_points import measure
measure(point, steps, pipe)
