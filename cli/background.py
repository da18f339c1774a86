"""Start a server that outlives the command, and wait until it answers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ragkv.errors import RagkvError, UsageError

__all__ = ["log_file", "start"]

_PROGRAM = "from ragkv.cli.main import main; main()"


def start(arguments: Sequence[str], log: Path) -> dict[str, Any]:
    """Run `ragkv ARGUMENTS` in a session of its own, its stderr added to `log`, until it prints its line of JSON.

    Returns that, with `pid` and `log`. A server that ends before has said why: that is the error.
    """
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise RagkvError(f"The server's log {log} cannot be written: {error.strerror or error}.") from error
    try:
        before = os.fstat(said).st_size
        server = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=said,
            start_new_session=True,  # neither Ctrl-C nor the end of the terminal reaches it
        )
    finally:
        os.close(said)
    assert server.stdout is not None
    try:
        line = server.stdout.readline()
    except BaseException:  # nobody would know of it
        server.terminate()
        server.wait()
        raise
    if not line.endswith(b"\n"):
        raise _failure(server.wait(), log, before)
    return {**json.loads(line), "pid": server.pid, "log": str(log)}


def log_file(index: Path) -> Path:
    """Where the log of an index's server goes: below `$XDG_STATE_HOME/ragkv`, else `~/.local/state/ragkv`."""
    from ragkv.boundary.ownmark import key_file

    name = re.sub(r"[^A-Za-z0-9._-]+", "-", str(index.resolve())).strip("-.")[-100:]
    try:
        return key_file().parent / "serve" / f"{name}.log"
    except RuntimeError as error:
        raise RagkvError("There is no home for the server's log; name a folder for it in XDG_STATE_HOME.") from error


def _failure(code: int, log: Path, before: int) -> RagkvError:
    """The error of a server that did not come up: its own sentence if it said one."""
    with log.open("rb") as file:
        file.seek(before)
        said = file.read().decode(errors="replace")
    sentences = [line.removeprefix("ragkv: ") for line in said.splitlines() if line.startswith("ragkv: ")]
    if sentences:
        return (UsageError if code == UsageError.exit_code else RagkvError)(sentences[-1])
    return RagkvError(f"The server ended with code {code} before it was ready; {log} says more.")
