"""Read files from unknown sources in a process of its own, with limits on memory and time.

The parsers of PDF and HTML are large libraries. Every few months somebody finds a file of a few kilobytes on which one
of them takes gigabytes of memory or hours. No check of the file beforehand can find that, but the operating system can
limit a process. The process starts with the first file that needs it and serves the files after it. If a file makes it
end, only that file is lost: the next one starts another process.
"""

from __future__ import annotations

import json
import select
import signal
import subprocess
import sys
from collections.abc import Callable
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
_SMALL = 1 << 20  # bytes; a plain file up to this size is read here, as it takes at most about 100 MiB of memory
_LARGE = 256 << 20  # bytes; a process that holds more memory than this after a file is replaced
WAIT_MILLISECONDS = 500
# The process imports from the same places as this one.
_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from ragkv.ingest.worker import main; main()"


class SourceReader:
    """Reads files one after another; a context manager, for one thread.

    A file whose loader comes from another package is read in this process, without limits: the user chose that
    package, and its work (OCR, say) may take long.
    """

    def __init__(self, to: Limits | None = None, waiting: Callable[[], object] = lambda: None) -> None:
        """`waiting` is called now and then while the process works; if it raises, the process ends."""
        self._limits = to or limits()
        self._waiting = waiting
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def check(self, source: SourceFile) -> None:
        """Raise `UnreadableSource` for a file that is too large, before any of it is read."""
        try:
            self._limits.check_file(source.size)
        except Unreadable as error:
            raise UnreadableSource(source.name, str(error)) from None

    def read(self, source: SourceFile) -> SourceText:
        """Read one file. Whatever is wrong with it, the error is an `UnreadableSource`."""
        self.check(source)
        plain = source.media_type in _PLAIN and source.size <= _SMALL
        if plain or is_foreign(source.media_type) or not sys.executable:
            return read_source(source, self._limits)
        request = {
            "path": str(source.place),
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
        """End the process, whatever it is doing; the next file starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _ask(self, request: bytes, source: SourceFile) -> dict[str, Any]:
        process = self._process = self._process or self._start(source)
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with suppress(BrokenPipeError):  # the process has ended; `_end` finds out why
                process.stdin.write(LENGTH.pack(len(request)) + request)
                process.stdin.write(source.data or b"")
                process.stdin.flush()
            answering = select.poll()
            answering.register(process.stdout, select.POLLIN)  # the end of the process is told too
            while not answering.poll(WAIT_MILLISECONDS):
                self._waiting()
            body = _whole(process.stdout)
            if body is None:
                raise UnreadableSource(source.name, self._end(process, source))
            answer: dict[str, Any] = json.loads(body)
        except BaseException:  # an interrupt too: the rest of a half-read answer would be taken for the next one
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
        if code == -signal.SIGKILL:  # the system ends processes when memory runs out
            return self._limits.too_much_memory()
        how = f"by signal {-code}" if code < 0 else f"with status {code}"
        return f"cannot be read: the process that read it ended {how}"


def _whole(answers: IO[bytes]) -> bytes | None:
    """The next answer, or None when the process ended before it was complete."""
    head = answers.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(head)
    body = answers.read(size)
    return body if len(body) == size else None
