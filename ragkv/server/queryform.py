"""An answer as the server's own API tells it: every stage's scores, and the expert that won each token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ragkv.index.background import AsyncAnswerStream
from ragkv.server.failure import Refusal
from ragkv.server.telling import Trimmed
from ragkv.server.wire import event
from ragkv.types import Answer, Source

__all__ = ["QueryForm"]


class QueryForm:
    """The events `sources`, `token`, and `done` or `error`; or the object of `done` alone.

    `question` is the one that was asked, without its history. `trace`: the object has the tokens with their sources.
    """

    def __init__(self, question: str, url_of: Callable[[Source], str], *, trace: bool) -> None:
        self._question = question
        self._url = url_of
        self._trace = trace
        self._trimmed = Trimmed()
        self._found = False
        self._told = 0

    def whole(self, answer: Answer, stream: AsyncAnswerStream) -> dict[str, Any]:
        told = {**answer.to_json(), "question": self._question, "sources": self._sources(answer.sources)}
        return told | ({"trace": {"tokens": [token.to_json() for token in stream.trace]}} if self._trace else {})

    def begins(self) -> Iterator[bytes]:
        return iter(())

    def says(self, piece: str, stream: AsyncAnswerStream) -> Iterator[bytes]:
        if not self._found:
            self._found = True
            # the same whenever it is sent: what each has won is told at the end
            yield event(
                {"sources": [{**each, "tokens_won": None} for each in self._sources(stream.sources)]}, "sources"
            )
        yield from self._tokens(stream)

    def ends(self, answer: Answer, stream: AsyncAnswerStream) -> Iterator[bytes]:
        yield from self._tokens(stream)
        yield event(self.whole(answer, stream), "done")

    def fails(self, refusal: Refusal) -> Iterator[bytes]:
        yield event(refusal.body, "error")

    def _tokens(self, stream: AsyncAnswerStream) -> Iterator[bytes]:
        """The tokens that were not told yet; their texts together are the answer's."""
        trace = stream.trace
        while self._told < len(trace):
            token = trace[self._told]
            self._told += 1
            if shown := self._trimmed.take(token.text):
                yield event({"text": shown, "source": token.source}, "token")

    def _sources(self, sources: tuple[Source, ...]) -> list[dict[str, Any]]:
        return [{**source.to_json(), "url": self._url(source)} for source in sources]
