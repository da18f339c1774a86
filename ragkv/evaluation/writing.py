"""Text files that people read: written whole or not at all, tables in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ragkv.boundary.plainfile import replace_plain
from ragkv.boundary.visible import one_line
from ragkv.errors import RagkvError

__all__ = ["markdown_table", "percent", "points", "write_whole"]


def write_whole(path: Path, content: str | bytes, *, instead: str) -> None:
    """All of it or nothing: who reads the file meanwhile sees the old one.

    Raises RagkvError when it cannot be written; `instead` says what to do then, as in "give another --output".
    """
    try:
        replace_plain(path, content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise RagkvError(f"{path} cannot be written ({error}); {instead}.") from error


def markdown_table(head: Sequence[str], body: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """`left` columns of words, then numbers."""
    rows = [head, ["---"] * left + ["---:"] * (len(head) - left), *body]
    return "".join(f"| {' | '.join(one_line(cell).replace('|', '&#124;') for cell in row)} |\n" for row in rows)


def percent(value: float, ci95: tuple[float, float]) -> str:
    """A share as "93.8 ±4.2": per cent, and half the interval's width."""
    return f"{100 * value:.1f} {_half(ci95)}"


def points(value: float, ci95: tuple[float, float]) -> str:
    """A difference of shares as "-1.7 ±3.3"."""
    return f"{100 * value:+.1f} {_half(ci95)}"


def _half(ci95: tuple[float, float]) -> str:
    low, high = ci95
    return f"±{50 * (high - low):.1f}"
