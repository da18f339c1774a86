"""Read files in a child process with limits on memory and time, and return text with sections or a reason.

Every few months a file of a few kilobytes is published on which a PDF or HTML library takes gigabytes or hours.
No check of the file can find that, but the operating system can limit a process. The process starts with the first file
that needs it and reads the files after it. If a file kills it, only that file is lost.

Requests arrive on stdin and answers leave on stdout: 8 bytes of length, then JSON, then the document's bytes if the
request announces them (`sent`). Answers are JSON, not pickles, because a file may have taken over its parser.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import IO, Any, BinaryIO, Self

from ragkv.errors import IngestError
from ragkv.ingest.charset import BINARY
from ragkv.ingest.parser import (
    TEXT,
    Parsed,
    ParseLimits,
    Section,
    Unreadable,
    is_foreign,
    limited,
    limits,
    media_type_of,
    parse,
    require_tiling,
)
from ragkv.ingest.source import SourceFile, os_reason, unsupported

_LONGEST_TITLE = 1000  # characters


class UnreadableSource(IngestError):  # noqa: N818 - a state, as `Skipped` is
    """A source without readable text; `reason` is a phrase for the user, as in `Skipped`."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"Cannot read {name}: {reason}.")
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceText(Parsed):
    """The text of a file, with at least one section; `content_hash` is the blake2b of the file's bytes."""

    content_hash: str

    def __post_init__(self) -> None:
        require_tiling(self.text, self.sections)


def read_source(source: SourceFile, to: ParseLimits | None = None) -> SourceText:
    """Read one source in this process; every fault of the file is an `UnreadableSource`.

    A hostile file may take much memory and time; `SourceReader` reads files in a child process with limits.
    """
    with limited(to or limits()):
        return _read(source)


def _read(source: SourceFile) -> SourceText:
    try:
        limits().check_file(source.size)
        data = source.read(limits().file + 1)
        limits().check_file(len(data))
    except Unreadable as error:
        raise UnreadableSource(source.name, str(error)) from None
    except MemoryError:
        raise UnreadableSource(source.name, limits().too_much_memory()) from None
    except OSError as error:
        raise UnreadableSource(source.name, os_reason(error)) from error
    if not data:
        raise UnreadableSource(source.name, "empty file" if source.data is None else "nothing came in")
    try:
        parsed = parse(source.media_type, data)
    except Unreadable as error:
        raise UnreadableSource(source.name, _reason(source, str(error))) from error.__cause__
    if not parsed.text.strip():
        raise UnreadableSource(source.name, next(iter(parsed.left_out), "no text found"))
    return SourceText(
        text=parsed.text,
        content_hash=hashlib.blake2b(data).hexdigest(),
        title=parsed.title and parsed.title[:_LONGEST_TITLE],
        sections=tuple(parsed.sections) or (Section(start=0, end=len(parsed.text)),),
        left_out=tuple(parsed.left_out),
    )


def _reason(source: SourceFile, reason: str) -> str:
    """The reason for a source. An explicitly named file of unknown type is tried as text; if binary, name its type."""
    if reason != BINARY or media_type_of(source.path.suffix or "."):
        return reason
    return unsupported(source.path) if source.data is None else f"{BINARY}; say of what kind with --type"


LENGTH = struct.Struct("=Q")
_SENT = ("text", "content_hash", "title")
_SECTION = [each.name for each in fields(Section)]


def main() -> None:
    """Serve requests from stdin until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C also reaches the parent, which ends this process
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of libraries must not mix with the answers
    _limit(resource.RLIMIT_CORE, 0)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with os.fdopen(0, "rb") as requests, answers:
        while head := requests.read(LENGTH.size):
            request = json.loads(requests.read(*LENGTH.unpack(head)))
            try:
                answer = json.dumps(_answer(request, requests)).encode()
            except MemoryError:
                reason = ParseLimits(**request["limits"]).too_much_memory()
                answer = json.dumps({"reason": reason, "held": _memory()[1]}).encode()
            answers.write(LENGTH.pack(len(answer)))
            answers.write(answer)
            answers.flush()


def _end_with_parent() -> None:
    """End this process when the parent is killed, instead of computing on until the time limit."""
    requests = select.poll()
    requests.register(0, 0)  # without events: poll always reports a hang-up
    requests.poll()
    os._exit(0)


def _answer(request: dict[str, Any], requests: BinaryIO) -> dict[str, Any]:
    to = ParseLimits(**request["limits"])
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
        text = read_source(source, to)
    except UnreadableSource as error:
        return {"reason": error.reason, "held": _memory()[1]}
    sections = [list(asdict(section).values()) for section in text.sections]
    sent = {name: getattr(text, name) for name in _SENT}
    return {**sent, "sections": sections, "left_out": text.left_out, "held": _memory()[1]}


def _limit(kind: int, soft: int) -> None:
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        soft = min(soft, hard)
    with suppress(ValueError, OSError):  # macOS cannot limit the address space
        resource.setrlimit(kind, (soft, hard))


def _memory() -> tuple[int, int]:
    """The mapped and the resident bytes of this process."""
    try:
        mapped, held, *_ = Path("/proc/self/statm").read_text().split()
    except (OSError, ValueError):
        return 1 << 30, 0
    return int(mapped) * resource.getpagesize(), int(held) * resource.getpagesize()


_PLAIN = frozenset({TEXT, "text/x-rst", "text/markdown", "text/csv", "text/tab-separated-values"}) | {
    *("application/json", "application/jsonl")
}
_SMALL = 1 << 20  # bytes; a plain file up to this size is read in this process, with at most about 100 MiB of memory
_LARGE = 256 << 20  # bytes; a process with more memory than this after a file is replaced
WAIT_MILLISECONDS = 500
# The child has the same import path as this process.
_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from ragkv.ingest.sandbox import main; main()"


class SourceReader:
    """Reads files one after another; a context manager, for one thread.

    A file whose loader comes from another package is read in this process without limits: the user chose the package,
    and its work (such as OCR) may take long.
    """

    def __init__(self, to: ParseLimits | None = None, waiting: Callable[[], object] = lambda: None) -> None:
        """`waiting` is called regularly while the process works; if it raises, the process ends."""
        self._limits = to or limits()
        self._waiting = waiting
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check(self, source: SourceFile) -> None:
        """Raise `UnreadableSource` for a file that is too large, before reading it."""
        try:
            self._limits.check_file(source.size)
        except Unreadable as error:
            raise UnreadableSource(source.name, str(error)) from None

    def read(self, source: SourceFile) -> SourceText:
        """Read one file; every fault of it is an `UnreadableSource`."""
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
        sections = [Section(**dict(zip(_SECTION, values, strict=True))) for values in answer["sections"]]
        found = {name: answer[name] for name in _SENT}
        return SourceText(**found, sections=tuple(sections), left_out=tuple(answer["left_out"]))

    def close(self) -> None:
        """End the process at once; the next file starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _ask(self, request: bytes, source: SourceFile) -> dict[str, Any]:
        process = self._process = self._process or self._start(source)
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with suppress(BrokenPipeError):  # the process has ended; `_end` finds the reason
                process.stdin.write(LENGTH.pack(len(request)) + request)
                process.stdin.write(source.data or b"")
                process.stdin.flush()
            answering = select.poll()
            answering.register(process.stdout, select.POLLIN)  # reports the end of the process too
            while not answering.poll(WAIT_MILLISECONDS):
                self._waiting()
            body = _whole(process.stdout)
            if body is None:
                raise UnreadableSource(source.name, self._end(process, source))
            answer: dict[str, Any] = json.loads(body)
        except BaseException:  # also for an interrupt: the rest of a half-read answer would be taken for the next one
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
        if code == -signal.SIGKILL:  # the kernel kills processes when memory runs out
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
