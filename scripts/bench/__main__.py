"""Measures one point, in a process of its own: `python -m bench POINT STEPS`. The last line printed is the result.

POINT is a `grids.Point`, as a JSON list. MXNet and PyTorch cannot share a process: each loads an OpenMP of its own.
"""

import json
import sys

from bench.grids import Point

point, steps = Point(*json.loads(sys.argv[1])), int(sys.argv[2])
if point.is_torch:
    from bench.torch_points import measure
else:
    from bench.mxnet_points import measure
result = measure(point, steps)
if result is not None:  # of the first worker
    print(json.dumps(result), flush=True)
