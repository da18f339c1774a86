"""What `ragkv` writes to a terminal and to a pipe, for commands in forks of this process.

As a program: reads a JSON list of `{"arguments": […], "stdin": "…", "terminal": …}` from stdin; prints a list of
`{"code", "out", "err"}`, with bytes as Latin-1 text. Its arguments are indexes whose models the commands share.
"""

import json
import os
import pty
import select
import sys
import tempfile
from typing import Any

from command import run_command  # imports everything before the forks
from loaded import preload


def run(arguments: list[str], stdin: str, *, terminal: bool) -> dict[str, Any]:
    pairs = [pty.openpty() if terminal else os.pipe() for _ in range(2)]
    with tempfile.TemporaryFile() as given:
        given.write(stdin.encode("utf-8", "surrogateescape"))
        given.seek(0)
        pid = os.fork()
        if not pid:
            run_command(arguments, lambda: _take(given.fileno(), *(write for _, write in pairs)))
    found: dict[int, bytes] = {}
    for read, write in pairs:
        os.close(write)
        found[read] = b""
    waiting = list(found)
    while waiting:
        for read in select.select(waiting, [], [])[0]:
            try:
                data = os.read(read, 65536)
            except OSError:  # a terminal that nobody has open any more
                data = b""
            found[read] += data
            if not data:
                waiting.remove(read)
                os.close(read)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    out, err = (data.decode("latin-1") for data in found.values())
    return {"code": code, "out": out, "err": err}


def _take(*streams: int) -> None:
    """Make these the standard streams."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    sys.stdin = open(0, encoding="utf-8")  # noqa: SIM115
    for name, number in (("stdout", 1), ("stderr", 2)):  # they are terminals now, or are none any more
        setattr(sys, name, open(number, "w", encoding="utf-8", buffering=1))  # noqa: SIM115, PTH123


if __name__ == "__main__":
    os.environ |= {"TERM": "xterm-256color", "COLUMNS": "120"}
    preload(*sys.argv[1:])
    payload = json.loads(sys.stdin.read())
    results = [run(one["arguments"], one.get("stdin", ""), terminal=one["terminal"]) for one in payload]
    print(json.dumps(results))
