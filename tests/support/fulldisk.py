"""Ingest into a place that is too small, ask, make room, and ingest again; prints each command's output as JSON.

python tests/support/fulldisk.py tmpfs|limit MEBIBYTES INDEX DOCUMENTS COPY

`tmpfs` mounts a small file system over INDEX's parent in a separate mount namespace, and copies the result to COPY;
`limit` sets a quota on file sizes, and works everywhere.
"""

import json
import resource
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from command import fork_command
from loaded import preload
from namespace import enter

from ragkv.store import Store

# The store's initial map of 64 MiB would exceed the limit at once.
Store.create.__func__.__kwdefaults__["map_size"] = 1 << 20  # type: ignore[attr-defined]


def ragkv(*arguments: object, most: int = resource.RLIM_INFINITY) -> dict[str, Any]:
    """Run a command in a fork of this process, with files of at most this many bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
    try:
        return asdict(fork_command(*arguments))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def main() -> None:
    preload("mini")
    way, size, index, documents = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    most = size << 20 if way == "limit" else resource.RLIM_INFINITY
    if way == "tmpfs":
        enter()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}m", "none", index.parent], check=True)
    ingest = ("ingest", documents, "--index", index, "--engines", "block", "--json")
    result = {
        "full": ragkv(*ingest, most=most),
        "answer": ragkv("query", "Who founded Halden00 Works?", "--index", index, "--json", most=most),
    }
    if way == "tmpfs":
        subprocess.run(["mount", "-o", "remount,size=256m", index.parent], check=True)
    result["room"] = ragkv(*ingest)
    # On the full disk, new KV of a question (the prefix's) may not be stored.
    result["again"] = ragkv("query", "Who founded Halden00 Works?", "--index", index, "--json")
    if way == "tmpfs":
        shutil.copytree(index, sys.argv[5])
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main()
