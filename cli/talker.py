"""Who answers a conversation: the server that is up for the index, or else this process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from ragkv.cli.option import stated
from ragkv.cli.resident import Lodger, Reply, UnservedError
from ragkv.server import errand
from ragkv.server.errand import Talk, Tell, Turn

if TYPE_CHECKING:
    from ragkv.index.answer import AnswerStream
    from ragkv.pipeline import RagKV

__all__ = ["Talker"]

T = TypeVar("T")


class _Talks(Protocol):
    def begin(self, talk: Talk, engine: str | None, tell: Tell) -> str: ...

    def choose(self, talk: Talk, engine: str, tell: Tell) -> str: ...

    def engines(self) -> list[str]: ...

    def reply(self, talk: Talk, turn: Turn) -> Reply | AnswerStream: ...


class _Here:
    """The index, opened by this process."""

    def __init__(self, rag: RagKV) -> None:
        self._rag = rag

    def begin(self, talk: Talk, engine: str | None, tell: Tell) -> str:
        return errand.begin(self._rag, talk, engine, tell)

    def choose(self, talk: Talk, engine: str, tell: Tell) -> str:
        return errand.choose(self._rag, talk, engine, tell)

    def engines(self) -> list[str]:
        from ragkv.engines import engine_names

        return engine_names()

    def reply(self, talk: Talk, turn: Turn) -> AnswerStream:
        return errand.reply(self._rag, talk, turn)


class Talker:
    """A conversation's other side. A server that is gone at the next question is not missed: this process goes on."""

    def __init__(self, index: Path, device: str | None, talk: Talk, *, by_itself: bool) -> None:
        self._index = index
        self._device = device
        self._talk = talk
        self._opened = ExitStack()
        self._there: _Talks | None = None if by_itself else Lodger(index, stated(device=device))
        self._here: _Here | None = None

    def __enter__(self) -> Talker:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def begin(self, engine: str | None, tell: Tell) -> str:
        """Check the settings and have the model loaded; returns the engine that answers."""
        return self._by(lambda side: side.begin(self._talk, engine, tell))

    def choose(self, engine: str, tell: Tell) -> str:
        """The engine of this name, with its warning; UsageError if there is none."""
        return self._by(lambda side: side.choose(self._talk, engine, tell))

    def engines(self) -> list[str]:
        """The names of all engines."""
        return self._by(lambda side: side.engines())

    def reply(self, turn: Turn) -> Reply | AnswerStream:
        """The answer to the next question."""
        return self._by(lambda side: side.reply(self._talk, turn))

    def _by(self, work: Callable[[_Talks], T]) -> T:
        if self._there is not None:
            try:
                return work(self._there)
            except UnservedError:
                self._there = None
        return work(self._own())

    def _own(self) -> _Here:
        if self._here is None:
            from ragkv.pipeline import RagKV

            self._here = _Here(self._opened.enter_context(RagKV.open(self._index, device=self._device)))
        return self._here
