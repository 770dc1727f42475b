"""A worker, `python -m bench MODULE ARGUMENTS`: prints the result of bench.MODULE.work(**ARGUMENTS).

ARGUMENTS and the result, on the last line, are JSON. With None as the result, nothing is printed.
"""

import json
import sys
from importlib import import_module

module, arguments = sys.argv[1:]
result = import_module(f"bench.{module}").work(**json.loads(arguments))
if result is not None:
    print(json.dumps(result), flush=True)
