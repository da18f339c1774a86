"""`ragkv stop`: end the server that is up for an index."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from ragkv.boundary.doorway import knock, peer, vacant
from ragkv.cli.console import print_json, say
from ragkv.cli.option import DEFAULT_INDEX, Index, Json, Quiet
from ragkv.cli.resident import Lodger, UnservedError
from ragkv.errors import RagkvError

__all__ = ["stop"]

SLACK_SECONDS = 30.0
"""How long the end of a server may take beyond what it says itself."""


def stop(index: Index = DEFAULT_INDEX, as_json: Json = False, quiet: Quiet = False) -> None:
    """End the server that is up for an index (ragkv serve); answers on their way are finished within its time.

    Example: `ragkv stop --index handbook`
    """
    try:
        about = Lodger(index).done("stop")
    except UnservedError:
        raise _no_server(index) from None
    until = time.monotonic() + about["stop_seconds"] + SLACK_SECONDS
    while not vacant(index):
        if time.monotonic() > until:
            raise RagkvError(f"The server (process {about['pid']}) has been told to stop and goes on; end it by kill.")
        time.sleep(0.05)
    _tell(about, as_json=as_json, quiet=quiet)


def _no_server(index: Path) -> RagkvError:
    """There is none, or one that does not listen to what it is told."""
    connection = knock(index, seconds=SLACK_SECONDS)
    if connection is None:
        return RagkvError(f"No server of yours is up for the index at {index}; ragkv serve --background starts one")
    with connection:
        pid, _ = peer(connection)
    return RagkvError(f"The server for the index at {index} (process {pid}) does not answer; end it by kill.")


def _tell(about: dict[str, Any], *, as_json: bool, quiet: bool) -> None:
    if as_json:
        print_json({"stopped": True, "pid": about["pid"], "indexes": about["indexes"]})
    elif not quiet:
        say(f"stopped the server of {', '.join(about['indexes'])} (process {about['pid']})")
