"""The only place where commands print: results on stdout, everything else on stderr (docs/design.md).

What is printed may quote somebody else's document, file name, model or index. So the functions here escape control
characters (`ragkv.boundary.visible`), and `guarded` does the same for everything else that writes to the streams:
warnings, logs, tracebacks, a stray `print`. Only rich's own colours and bars reach the terminal unchanged, after the
text in them was escaped.
"""

from __future__ import annotations

import io
import logging
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any, cast

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from ragkv.boundary.visible import json_text, one_line, visible

__all__ = [
    "LogLine",
    "beginning",
    "between",
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
    "share",
    "size",
    "stderr",
]

_MOVES = re.compile(r"\r?(?:\x1b\[A)*")
"""What a library's progress bar begins with: back to the start of the line, or up to an earlier bar's line."""


class _Guard:
    """A stream that escapes control characters in what is written to it.

    With `moves` (stderr on a terminal), a library's progress bar, of a download say, may return to its line's start.
    """

    def __init__(self, stream: IO[str], *, moves: bool) -> None:
        self.rich_proxied_file = stream
        """rich looks for the original stream under this name, and writes its colours to it."""
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
    """Put stdout and stderr behind guards. After an error they stay, so that the traceback goes through them too."""
    before = sys.stdout, sys.stderr
    for stream in before:
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")  # for characters that the terminal's encoding lacks
    sys.stdout = cast("Any", _Guard(sys.stdout, moves=False))
    sys.stderr = cast("Any", _Guard(sys.stderr, moves=sys.stderr.isatty()))
    try:
        yield
    except SystemExit:
        sys.stdout, sys.stderr = before
        raise
    sys.stdout, sys.stderr = before


class _Screen(Console):
    """rich without markup, emoji codes and highlighting, so that a cell shows exactly the text that was put in it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Escape a cell before rich measures its width; a cell is one line."""
        return super().render_str(one_line(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Escape everything else that is drawn, such as the description of a progress bar."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


stderr = _Screen(stderr=True, soft_wrap=True)


class LogLine(logging.Formatter):
    """Formats a record as one line, whatever is in it; a traceback after it keeps its lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        return one_line(super().formatMessage(record))


def say(message: object = "") -> None:
    """Print one line of a result."""
    _out(one_line(str(message)) + "\n")


def say_text(body: str) -> None:
    """Print a result of several lines, such as a chunk or an answer."""
    _out(visible(body) + "\n")


def say_piece(part: str) -> None:
    """Print the next part of an answer that is streamed."""
    _out(visible(part))


def draw(drawn: RenderableType, *, width: int | None = None) -> None:
    """Print a table on stdout."""
    _Screen(width=width).print(drawn)


def note(message: object) -> None:
    """Print one line on stderr: not part of the result."""
    stderr.print(Text(one_line(str(message))), style="dim")


def note_text(body: str) -> None:
    """Print several lines on stderr: not part of the result."""
    stderr.print(Text(visible(body)), style="dim")


def note_wait(holder: object) -> None:
    """Say on stderr which process a command waits for (`on_wait` of `Store.writing`)."""
    note(f"waiting for {holder} …")


def fail(message: str) -> None:
    """Print an error on stderr: one sentence that says what is wrong and what to do."""
    stderr.print(Text(one_line(f"ragkv: {message.strip().rstrip('.')}.")), style="red")


def confirm(question: str) -> None:
    """Ask on the terminal, and end the command unless the answer is yes."""
    typer.confirm(one_line(question), abort=True, err=True)


def print_json(value: Any) -> None:
    """Print one JSON document on stdout, indented on a terminal."""
    _json(value, indent=2 if sys.stdout.isatty() else None)


def print_json_line(value: Any) -> None:
    """Print one JSON document on one line of stdout, for programs that read line by line."""
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


def share(value: float | None, interval: Sequence[float] | None = None) -> str:
    """0.969 -> "96.9%", with its interval "96.9% (90.1 to 99.2)"; None -> ""."""
    return "" if value is None else between(f"{value:.1%}", interval)


def between(shown: str, interval: Sequence[float] | None) -> str:
    """A figure with its interval, which is given in shares and shown in per cent or points."""
    return shown if interval is None else f"{shown} ({100 * interval[0]:.1f} to {100 * interval[1]:.1f})"


def beginning(text: str, width: int) -> str:
    """The first words of a text on one line, cut off at `width` characters."""
    words = " ".join(text.split())
    return words if len(words) <= width else words[: width - 1] + "…"


def _json(value: Any, *, indent: int | None) -> None:
    encoding = (sys.stdout.encoding or "utf-8").lower().replace("-", "")
    _out(json_text(value, indent=indent, ascii_only=encoding not in ("utf8", "utf16", "utf32")) + "\n")


def _out(words: str) -> None:
    sys.stdout.write(words)
    sys.stdout.flush()  # so that the order with stderr is kept also when stdout is a pipe
