"""Ask with each client named after the address and the key, in one process, because the clients share most of their
slow imports. Each prints its result, or its error, on a line.
"""

import json
import runpy
import sys
import traceback

for name in sys.argv[3:]:
    try:
        runpy.run_module(f"ask_{name}")
    except Exception:
        print(json.dumps({"failed": f"{name}: {traceback.format_exc()}"}))
