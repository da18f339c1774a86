"""Write files for people atomically, and format tables in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ragkv.boundary.plainfile import replace_plain
from ragkv.boundary.visible import one_line
from ragkv.errors import RagkvError

__all__ = ["markdown_table", "percent", "points", "write_whole"]


def write_whole(path: Path, content: str | bytes, *, instead: str) -> None:
    """Replace a file atomically; until then, readers see the old content.

    Raises RagkvError if it cannot be written. `instead` is the advice for that case, such as "give another --output".
    """
    try:
        replace_plain(path, content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise RagkvError(f"{path} cannot be written ({error}); {instead}.") from error


def markdown_table(head: Sequence[str], body: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """A table in Markdown with `left` columns of words, then columns of numbers."""
    rows = [head, ["---"] * left + ["---:"] * (len(head) - left), *body]
    return "".join(f"| {' | '.join(one_line(cell).replace('|', '&#124;') for cell in row)} |\n" for row in rows)


def percent(value: float, ci95: tuple[float, float]) -> str:
    """A share as "93.8 ±4.2": per cent and half the width of the interval."""
    return f"{100 * value:.1f} {_half(ci95)}"


def points(value: float, ci95: tuple[float, float]) -> str:
    """A difference of shares as "-1.7 ±3.3"."""
    return f"{100 * value:+.1f} {_half(ci95)}"


def _half(ci95: tuple[float, float]) -> str:
    low, high = ci95
    return f"±{50 * (high - low):.1f}"
