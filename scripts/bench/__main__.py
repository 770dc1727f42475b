"""A worker, `python -m bench MODULE ARGUMENTS`: prints the result of bench.MODULE.work(**ARGUMENTS).

ARGUMENTS is JSON. The result is printed as JSON on the last line; if it is None, nothing is printed.
"""

import json
import sys
from importlib import import_module

module, arguments = sys.argv[1:]
result = import_module(f"bench.{module}").work(**json.loads(arguments))
if result is not None:
    print(json.dumps(result), flush=True)
