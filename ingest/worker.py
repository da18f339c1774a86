"""The process that reads files for `ragkv.ingest.isolated`, so that a hostile file harms nothing else.

Requests come on stdin and answers go to stdout: 8 bytes of length, then JSON. The document's bytes follow a request
that says so (`sent`). The answers are JSON and not pickles because a file may have taken over the parser that made one.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import struct
import threading
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from ragkv.ingest.limit import Limits
from ragkv.ingest.reader import SourceText, UnreadableSource, read_source
from ragkv.ingest.source import SourceFile

__all__ = ["LENGTH", "main"]

LENGTH = struct.Struct("=Q")


def main() -> None:
    """Answer until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which ends this process
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a library that prints must not write into the answers
    _limit(resource.RLIMIT_CORE, 0)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with os.fdopen(0, "rb") as requests, answers:
        while head := requests.read(LENGTH.size):
            request = json.loads(requests.read(*LENGTH.unpack(head)))
            try:
                answer = json.dumps(_answer(request, requests)).encode()
            except MemoryError:
                reason = Limits(**request["limits"]).too_much_memory()
                answer = json.dumps({"reason": reason, "held": _memory()[1]}).encode()
            answers.write(LENGTH.pack(len(answer)))
            answers.write(answer)
            answers.flush()


def _end_with_parent() -> None:
    """End when the parent is killed; else this process would go on computing for nobody until its time is up."""
    requests = select.poll()
    requests.register(0, 0)  # no event asked for: poll reports a hang-up anyway
    requests.poll()
    os._exit(0)


def _answer(request: dict[str, Any], requests: BinaryIO) -> dict[str, Any]:
    to = Limits(**request["limits"])
    used = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + to.seconds_for(request["size"]))
    _limit(resource.RLIMIT_AS, _memory()[0] + to.memory)
    try:
        source = SourceFile(
            path=Path(request["path"]),
            document_id="",
            name=request["name"],
            media_type=request["media_type"],
            size=request["size"],
            data=requests.read(request["size"]) if request["sent"] else None,
        )
        return _packed(read_source(source, to))
    except UnreadableSource as error:
        return {"reason": error.reason, "held": _memory()[1]}


def _packed(text: SourceText) -> dict[str, Any]:
    sections = [list(asdict(section).values()) for section in text.sections]
    return {
        "text": text.text,
        "content_hash": text.content_hash,
        "title": text.title,
        "sections": sections,
        "left_out": text.left_out,
        "held": _memory()[1],
    }


def _limit(kind: int, soft: int) -> None:
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        soft = min(soft, hard)
    with suppress(ValueError, OSError):  # macOS cannot limit the address space
        resource.setrlimit(kind, (soft, hard))


def _memory() -> tuple[int, int]:
    """How many bytes this process has mapped, and how many of them are in memory."""
    try:
        mapped, held, *_ = Path("/proc/self/statm").read_text().split()
    except (OSError, ValueError):
        return 1 << 30, 0
    return int(mapped) * resource.getpagesize(), int(held) * resource.getpagesize()
