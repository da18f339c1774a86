"""Output of all commands: results on stdout; messages, errors and progress on stderr.

Output may contain text of other people's documents, file names or models. So the functions here escape control
characters (`ragkv.util.display`), and `guarded` does the same for everything else that writes to the streams:
warnings, logs, tracebacks, a stray `print`. Only rich's own colours and bars reach the terminal unchanged.
"""

from __future__ import annotations

import io
import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import typer
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from ragkv.util.display import json_text, one_line, visible

if TYPE_CHECKING:
    from ragkv.store import Notify
    from ragkv.store import Progress as Step

_MOVES = re.compile(r"\r?(?:\x1b\[A)*")
"""The beginning of a library's progress bar: back to the start of the line, or up to an earlier bar's line."""


class _Guard:
    """A stream that escapes control characters in everything written to it.

    With `moves` (stderr on a terminal), a library's progress bar (of a download, say) may return to its line's start.
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
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            # for characters that the terminal's encoding lacks; in the C locale Python uses "surrogateescape"
            stream.reconfigure(errors="backslashreplace")
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

    @property
    def file(self) -> IO[str]:
        """The stream below every wrapper: below a bar's, which is around `_Guard`."""
        stream = super().file
        while (below := getattr(stream, "rich_proxied_file", None)) not in (None, stream):  # JSON lines name themselves
            stream = below
        return stream

    @file.setter
    def file(self, stream: IO[str]) -> None:
        self._file = stream

    def render_str(self, text: str, **options: Any) -> Text:
        """Escape a cell before rich measures its width; a cell is one line."""
        return super().render_str(one_line(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Escape everything else that is drawn, such as the description of a progress bar."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


stderr = _Screen(stderr=True, soft_wrap=True)


class LogLine(logging.Formatter):
    """Formats a record as one line, whatever it contains; a traceback after it keeps its lines.

    `%(head)s` is what a user can make use of: how grave a message of ragkv is, or which other library sends it.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        record.head = record.levelname.lower() if record.name.startswith("ragkv.") else record.name
        return one_line(super().formatMessage(record))


def echo(message: object = "") -> None:
    """Print one line of a result."""
    _out(one_line(str(message)) + "\n")


def echo_text(body: str) -> None:
    """Print a result of several lines, such as a chunk or an answer."""
    _out(visible(body) + "\n")


def echo_delta(part: str) -> None:
    """Print the next part of an answer that is streamed."""
    _out(visible(part))


def draw(drawn: RenderableType, *, width: int | None = None) -> None:
    """Print a table on stdout. If the terminal is too narrow, its lines wrap: nothing is cut off.

    A pipe has no width, so there no line is wrapped or padded with spaces.
    """
    terminal = sys.stdout.isatty()
    screen = _Screen(width=width if terminal else _WIDEST)
    if isinstance(drawn, Table):
        screen.width = max(screen.width, _least_width(drawn))
    if terminal:
        screen.print(drawn)
        return
    with screen.capture() as captured:
        screen.print(drawn)
    _out("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


_NARROW = 16


def _least_width(table: Table) -> int:
    """The width at which a table's figures are complete and its texts fold; rich would cut figures and drop names."""
    for column in table.columns:
        widest = max((cell_len(one_line(str(cell))) for cell in (column.header, *column.cells)), default=0)
        column.min_width = widest if column.no_wrap else min(widest, _NARROW)
    return sum((column.width or column.min_width or 0) + 2 for column in table.columns) - 2


def note(message: object) -> None:
    """Print one line on stderr: not part of the result."""
    stderr.print(Text(one_line(str(message))), style="dim")


def note_quote(text: str) -> None:
    """Print a passage on stderr, indented; a terminal's width wraps it."""
    quote = Text(one_line(text))
    if stderr.is_terminal:
        stderr.print(Padding(quote, (0, 0, 0, 4), expand=False), style="dim", soft_wrap=False)
    else:
        note(f"    {quote}")


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


def three_digits(value: float) -> str:
    """0.1234 -> "0.123", 2580.3 -> "2,580"."""
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"


def share(value: float | None, interval: Sequence[float] | None = None) -> str:
    """0.969 -> "96.9%", with its interval "96.9% (90.1 to 99.2)"; None -> ""."""
    return "" if value is None else between(f"{value:.1%}", interval)


def between(shown: str, interval: Sequence[float] | None) -> str:
    """A figure with its interval, which is given as shares and shown in per cent or points."""
    return shown if interval is None else f"{shown} ({100 * interval[0]:.1f} to {100 * interval[1]:.1f})"


def _json(value: Any, *, indent: int | None) -> None:
    encoding = (sys.stdout.encoding or "utf-8").lower().replace("-", "")
    _out(json_text(value, indent=indent, ascii_only=encoding not in ("utf8", "utf16", "utf32")) + "\n")


def _out(words: str) -> None:
    sys.stdout.write(words)
    sys.stdout.flush()  # so that the order with stderr is kept also when stdout is a pipe


_WIDEST = 1 << 20


def plain(*head: str) -> Table:
    """An empty table without lines around it; columns may be added."""
    return Table(*head, box=None, pad_edge=False)


def facts(*, width: int | None = None) -> Table:
    """An empty table without a head: names on the left, of at least this width, and values that fold."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim", no_wrap=True, width=width)
    table.add_column(overflow="fold")
    return table


def print_facts(rows: Iterable[tuple[str, str]]) -> None:
    """(name, value) rows."""
    table = facts()
    for row in rows:
        table.add_row(*row)
    draw(table)


def print_grid(head: Sequence[str], body: Sequence[Sequence[str]], *, words: Sequence[str] = ()) -> None:
    """Print a table: the first column and `words` are left-aligned text, the others figures."""
    table = plain()
    for at, column in enumerate(head):
        table.add_column(column, justify="left" if at == 0 or column in words else "right", no_wrap=True)
    for cells in body:
        table.add_row(*cells)
    draw(table, width=_WIDEST)


@contextmanager
def loading(model: str | None, *, silent: bool) -> Iterator[None]:
    """A line on a terminal while a model is loaded, which vanishes; it appears before anything slow is imported."""
    if silent or not stderr.is_terminal:
        yield
        return
    from rich.live import Live

    line = Text(one_line(f"loading {model or 'the model'} …"), style="dim")
    with Live(line, console=stderr, transient=True, auto_refresh=False, redirect_stdout=False):
        yield


Show = Callable[[str, float, float | None, str], None]


@contextmanager
def percent_bar(silent: bool) -> Iterator[Show | None]:
    """Yields `show(what, done, total, amount)`, or None without a terminal. A new `what` at 0 restarts the clock."""
    if silent or not stderr.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    texts = [TextColumn(f"{{task.{name}}}", markup=False) for name in ("description", "fields[amount]")]
    columns = (texts[0], BarColumn(), TaskProgressColumn(), texts[1], TimeRemainingColumn())
    with Progress(*columns, console=stderr, transient=True) as bar:
        task = bar.add_task("", total=None, amount="")

        def show(what: str, done: float, total: float | None, amount: str) -> None:
            what = one_line(what)
            if not done and bar.tasks[0].description != what:
                bar.reset(task)
            bar.update(task, description=what, completed=done, total=total, amount=amount)

        yield show


@contextmanager
def progress_bar(silent: bool) -> Iterator[Notify | None]:
    """A bar for jobs on a store, which report their steps."""
    with percent_bar(silent) as show:
        if show is None:
            yield None
            return

        def notify(step: Step) -> None:
            amount = size(step.done) if step.unit == "bytes" else f"{step.done:,} {step.unit}"
            show(step.step, step.done, step.total, amount)

        yield notify


Steps = Callable[[int, int, str], None]
"""`show(done, total, what)`."""


@contextmanager
def steps(title: str, *, silent: bool, stages: bool = False) -> Iterator[Steps]:
    """Yields `show(done, total, what)`; a total of 0 is not known yet. Without a terminal, `stages` prints a line
    whenever `what` changes.
    """
    last = ""
    with percent_bar(silent) as bar:

        def show(done: int, total: int, what: str) -> None:
            nonlocal last
            if bar is not None:
                bar(f"{title}: {what:<18}"[:40], done, total or None, f"{done:,} of {total:,}" if total else "")
            elif stages and not silent and what not in ("", "done", last):
                note(f"{title}: {what} …")
            last = what

        yield show


@contextmanager
def kept_steps(title: str, work: Path, *, silent: bool) -> Iterator[Steps]:
    """`steps` of a run that keeps every answer in `work`. An interrupt says so and ends the command."""
    done, total = 0, 0
    try:
        with steps(title, silent=silent) as show:

            def notify(now: int, of: int, what: str) -> None:
                nonlocal done, total
                done, total = now, of
                show(now, of, what)

            yield notify
    except KeyboardInterrupt:
        note(
            f"ragkv: {title} interrupted after {done:,} of {count(total, 'answer')}; they are kept in {work}, and the "
            "same command continues from there."
        )
        raise typer.Exit(130) from None
