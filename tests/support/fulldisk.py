"""Ingests into a place that is too small, asks, makes room, and ingests again; prints what each command said, as JSON.

    python tests/support/fulldisk.py tmpfs|limit MEBIBYTES INDEX DOCUMENTS COPY

`tmpfs` mounts a small file system over INDEX's parent, so it has to run in a mount namespace of its own, and what it
leaves there is copied to COPY; `limit` sets a quota on the size of files, and runs anywhere.
"""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# The store's first map is 64 MiB, which the limit would refuse at once.
RAGKV = """
import sys
from ragkv.store import Store
Store.create.__func__.__kwdefaults__["map_size"] = 1 << 20
from ragkv.cli.main import main
sys.argv[0] = "ragkv"
main()
"""


def ragkv(*arguments: object, before: Callable[[], None] | None = None) -> dict[str, Any]:
    command = [sys.executable, "-c", RAGKV, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=before)
    return {"code": done.returncode, "out": done.stdout, "err": done.stderr}


def main() -> None:
    way, size, index, documents = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    limit = None
    if way == "tmpfs":
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}m", "none", index.parent], check=True)
    else:

        def limit() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size << 20, size << 20))

    ingest = ("ingest", documents, "--index", index, "--engines", "block", "--json")
    told = {
        "full": ragkv(*ingest, before=limit),
        "answer": ragkv("query", "Who founded Halden00 Works?", "--index", index, "--json", before=limit),
    }
    if way == "tmpfs":
        subprocess.run(["mount", "-o", "remount,size=256m", index.parent], check=True)
    told["room"] = ragkv(*ingest)
    # On the full disk, what a question makes anew (the prefix's KV) may not be kept.
    told["again"] = ragkv("query", "Who founded Halden00 Works?", "--index", index, "--json")
    if way == "tmpfs":
        shutil.copytree(index, sys.argv[5])
    json.dump(told, sys.stdout)


if __name__ == "__main__":
    main()
