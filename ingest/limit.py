"""What reading one document may cost, so that a hostile file can stop neither the ingest nor the machine.

Parsers call `check_text` and `check_sections` while they work; these raise `Unreadable` as soon as there is too much.
The operating system limits a parser's memory and time (`ragkv.ingest.isolated`), because a parser cannot be trusted to
check those itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Self

from ragkv.config import IngestConfig, byte_count

__all__ = ["Limits", "Unreadable", "check_sections", "check_text", "limited", "limits"]


class Unreadable(Exception):  # noqa: N818 - a state, as `Skipped` is
    """Why a document cannot be read, as a phrase for people. `read_source` adds the document's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """`[ingest]` of `ragkv.toml` as numbers: bytes of the file, characters of text, bytes of memory, CPU seconds."""

    file: int
    characters: int
    memory: int
    seconds: int

    @classmethod
    def of(cls, config: IngestConfig) -> Self:
        return cls(
            file=byte_count("ingest.max_file", config.max_file),
            characters=config.max_characters,
            memory=byte_count("ingest.max_memory", config.max_memory),
            seconds=config.max_seconds,
        )

    @property
    def sections(self) -> int:
        """How many pages, headings or rows a document may have; each costs as much memory as a few words."""
        return max(1000, self.characters // 32)

    def seconds_for(self, size: int) -> int:
        """CPU seconds for a file of `size` bytes: the base limit and 10 more for each MiB."""
        return self.seconds + 10 * (size >> 20)

    def check_file(self, size: int) -> None:
        if size > self.file:
            raise Unreadable(f"larger than {self.file:,} bytes, which is ingest.max_file")

    def too_much_memory(self) -> str:
        return f"takes more than {self.memory >> 20:,} MiB of memory to read, which is ingest.max_memory"

    def too_long(self, size: int) -> str:
        return f"takes more than {self.seconds_for(size)} s of computing to read: raise ingest.max_seconds"


_in_force: ContextVar[Limits] = ContextVar("limits")
_DEFAULT = Limits.of(IngestConfig())


def limits() -> Limits:
    """The limits in force: those of the enclosing `limited` block, else the defaults."""
    return _in_force.get(_DEFAULT)


@contextmanager
def limited(to: Limits) -> Iterator[None]:
    """Use these limits inside the `with` block."""
    token = _in_force.set(to)
    try:
        yield
    finally:
        _in_force.reset(token)


def check_text(characters: int) -> None:
    """Raise `Unreadable` if a document's text may not have this many characters."""
    most = limits().characters
    if characters > most:
        raise Unreadable(f"its text is longer than {most:,} characters, which is ingest.max_characters")


def check_sections(count: int) -> None:
    """Raise `Unreadable` if a document may not have this many pages, headings or rows."""
    most = limits().sections
    if count > most:
        raise Unreadable(f"it has more than {most:,} pages, headings or rows: raise ingest.max_characters")
