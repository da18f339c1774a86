"""What the parsers of the formats share: sections, a plain reason for failing, quiet libraries."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["HEADING_SEPARATOR", "Parsed", "Section", "Unreadable", "silenced"]

HEADING_SEPARATOR = " > "


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Characters `[start, end)` of a text: a page (from 1) or what is under a heading ("Guide > Install")."""

    start: int
    end: int
    page: int | None = None
    heading: str | None = None


class Unreadable(Exception):  # noqa: N818 - carries a reason up to `read_source`, which knows the name
    pass


Parsed = tuple[str | None, str, list[Section]]  # title, text, sections

_LIBRARY_LOCK = threading.Lock()


@contextmanager
def silenced(name: str) -> Iterator[None]:
    """Keep a parser's remarks on bad input out of the log; our reasons say it. One thread at a time."""
    noisy = logging.getLogger(name)
    with _LIBRARY_LOCK:
        level = noisy.level
        noisy.setLevel(logging.CRITICAL + 1)
        try:
            yield
        finally:
            noisy.setLevel(level)
