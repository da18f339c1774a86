"""Where the commands print, and the only place: results on stdout, everything else on stderr (docs/design.md).

Whatever is printed may quote a document, a file name, a model or an index of somebody else. The functions here write
control characters out (`ragkv.boundary.visible`), and `guarded` puts the same between the streams and whoever else
writes to them: warnings, logs, tracebacks, a `print` that somebody adds. Only what rich draws itself, colours and bars,
goes to the terminal as it is, after the text in it was made visible.
"""

from __future__ import annotations

import io
import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, cast

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from ragkv.boundary.visible import json_text, one_line, visible

__all__ = [
    "LogLine",
    "confirm",
    "count",
    "draw",
    "fail",
    "guarded",
    "note",
    "note_text",
    "note_wait",
    "print_json",
    "print_json_line",
    "say",
    "say_piece",
    "say_text",
    "size",
    "stderr",
]

_MOVES = re.compile(r"\r?(?:\x1b\[A)*")
"""What a progress bar of a library begins with: back to the line's begin, or up to an earlier bar's line."""


class _Guard:
    """A stream that writes control characters out; all else is the stream's own.

    A library's progress bar (a download from the hub) may go back to the begin of its line, on a terminal's stderr.
    """

    def __init__(self, stream: IO[str], *, moves: bool) -> None:
        self.rich_proxied_file = stream
        """Under this name rich finds the stream itself, for its colours."""
        self._stream = stream
        self._moves = moves

    def write(self, text: str) -> int:
        moves = found[0] if self._moves and (found := _MOVES.match(text)) else ""
        self._stream.write(moves + visible(text[len(moves) :]))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def guarded() -> Iterator[None]:
    """stdout and stderr behind guards. An error leaves them there, so that its traceback goes through them too."""
    before = sys.stdout, sys.stderr
    for stream in before:
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")  # where the terminal's encoding lacks a character
    sys.stdout = cast("Any", _Guard(sys.stdout, moves=False))
    sys.stderr = cast("Any", _Guard(sys.stderr, moves=sys.stderr.isatty()))
    try:
        yield
    except SystemExit:
        sys.stdout, sys.stderr = before
        raise
    sys.stdout, sys.stderr = before


class _Screen(Console):
    """rich without markup, emoji codes and highlighting: what stands in a cell is what was written there."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """A cell is one line, of the width that it is shown with."""
        return super().render_str(one_line(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Whatever else is drawn, a progress bar's description for one."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


stderr = _Screen(stderr=True, soft_wrap=True)


class LogLine(logging.Formatter):
    """A record is one line, whatever stands in it; a traceback after it keeps its own."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        return one_line(super().formatMessage(record))


def say(message: object = "") -> None:
    """One line of a result."""
    _out(one_line(str(message)) + "\n")


def say_text(body: str) -> None:
    """A result of several lines: a chunk, an answer."""
    _out(visible(body) + "\n")


def say_piece(part: str) -> None:
    """The next part of an answer that is shown while it is made."""
    _out(visible(part))


def draw(drawn: RenderableType, *, width: int | None = None) -> None:
    """A table on stdout."""
    _Screen(width=width).print(drawn)


def note(message: object) -> None:
    """One line for the person, on stderr."""
    stderr.print(Text(one_line(str(message))), style="dim")


def note_text(body: str) -> None:
    """Several lines for the person, on stderr."""
    stderr.print(Text(visible(body)), style="dim")


def note_wait(holder: object) -> None:
    """For whom a command waits (`Store.writing`'s `on_wait`), on stderr."""
    note(f"waiting for {holder} …")


def fail(message: str) -> None:
    """One sentence that says what is wrong and what to do, on stderr."""
    stderr.print(Text(one_line(f"ragkv: {message.strip().rstrip('.')}.")), style="red")


def confirm(question: str) -> None:
    """Ask on the terminal; whoever does not say yes ends the command."""
    typer.confirm(one_line(question), abort=True, err=True)


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    _json(value, indent=2 if sys.stdout.isatty() else None)


def print_json_line(value: Any) -> None:
    """One JSON document on one line of stdout, for whoever reads line by line."""
    _json(value, indent=None)


def size(nbytes: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def count(number: int, noun: str) -> str:
    """1 -> "1 chunk", 1200 -> "1,200 chunks"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _json(value: Any, *, indent: int | None) -> None:
    encoding = (sys.stdout.encoding or "utf-8").lower().replace("-", "")
    _out(json_text(value, indent=indent, ascii_only=encoding not in ("utf8", "utf16", "utf32")) + "\n")


def _out(words: str) -> None:
    sys.stdout.write(words)
    sys.stdout.flush()  # before what follows on stderr, also where stdout is a pipe
