"""Asks with each of the clients that are named after the address and the key, in one process: what they cost is their
imports, most of which they share. Each tells what it saw on a line, or how it failed.
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
