"""Reading files whose makers are not known: by a process of its own, with bounded memory and time.

A parser of PDF or HTML is a hundred thousand lines of others, and every few months somebody finds a file of some
kilobytes on which one of them takes gigabytes or hours. No look at a file beforehand can tell; the system's limits on
a process can. The process is started when the first file wants it, and serves all that follow; one that a file has
ended costs that file alone.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict
from types import TracebackType
from typing import IO, Any, Self

from ragkv.ingest.limit import Limits, Unreadable, limits
from ragkv.ingest.loader import TEXT, is_foreign
from ragkv.ingest.reader import Section, SourceText, UnreadableSource, read_source
from ragkv.ingest.source import SourceFile
from ragkv.ingest.worker import LENGTH

__all__ = ["SourceReader"]

_PLAIN = frozenset({TEXT, "text/x-rst", "text/markdown", "text/csv", "text/tab-separated-values"}) | {
    *("application/json", "application/jsonl")
}
_SMALL = 1 << 20  # bytes of a plain file that takes no more than some hundred of them in memory for each
_LARGE = 256 << 20  # bytes of memory with which a process need not go on
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from ragkv.ingest.worker import main; main()"  # as here
)


class SourceReader:
    """Reads files one after another; a context manager, for one thread.

    A file whose loader comes from another package is read in this process: that package is trusted, and may want to
    take its time.
    """

    def __init__(self, to: Limits | None = None) -> None:
        self._limits = to or limits()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def check(self, source: SourceFile) -> None:
        """`UnreadableSource` for what is too large to be looked at, before any of it is read."""
        try:
            self._limits.check_file(source.size)
        except Unreadable as error:
            raise UnreadableSource(source.name, str(error)) from None

    def read(self, source: SourceFile) -> SourceText:
        """As `read_source`: raises `UnreadableSource`, and nothing else, for whatever is wrong with the file."""
        self.check(source)
        plain = source.media_type in _PLAIN and source.size <= _SMALL
        if plain or is_foreign(source.media_type) or not sys.executable:
            return read_source(source, self._limits)
        request = {
            "path": str(source.path),
            "name": source.name,
            "media_type": source.media_type,
            "size": source.size,
            "sent": source.data is not None,
            "limits": asdict(self._limits),
        }
        answer = self._ask(json.dumps(request).encode(), source)
        if answer["held"] > _LARGE:
            self.close()
        if "reason" in answer:
            raise UnreadableSource(source.name, answer["reason"])
        return SourceText(
            text=answer["text"],
            content_hash=answer["content_hash"],
            title=answer["title"],
            sections=tuple(
                Section(start=start, end=end, page=page, heading=heading, alone=alone)
                for start, end, page, heading, alone in answer["sections"]
            ),
            left_out=tuple(answer["left_out"]),
        )

    def close(self) -> None:
        """End the process, whatever it does; the next file starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _ask(self, request: bytes, source: SourceFile) -> dict[str, Any]:
        process = self._process = self._process or self._start(source)
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with suppress(BrokenPipeError):  # it has died; its end is told below
                process.stdin.write(LENGTH.pack(len(request)) + request)
                process.stdin.write(source.data or b"")
                process.stdin.flush()
            body = _whole(process.stdout)
            if body is None:
                raise UnreadableSource(source.name, self._end(process, source))
            answer: dict[str, Any] = json.loads(body)
        except BaseException:  # an interrupt too: what comes after half an answer is none
            self.close()
            raise
        return answer

    def _start(self, source: SourceFile) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                [sys.executable, "-I", "-c", _START, json.dumps(sys.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        except OSError as error:
            raise UnreadableSource(source.name, f"no process to read it can be started ({error.strerror})") from error

    def _end(self, process: subprocess.Popen[bytes], source: SourceFile) -> str:
        """Why a process ended without an answer."""
        code = process.wait()
        if code == -signal.SIGXCPU:
            return self._limits.too_long(source.size)
        if code == -signal.SIGKILL:  # by the system, for memory
            return self._limits.too_much_memory()
        how = f"by signal {-code}" if code < 0 else f"with status {code}"
        return f"cannot be read: the process that read it ended {how}"


def _whole(answers: IO[bytes]) -> bytes | None:
    """The next answer; None when the process ended before it, or in the middle of it."""
    head = answers.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(head)
    body = answers.read(size)
    return body if len(body) == size else None
