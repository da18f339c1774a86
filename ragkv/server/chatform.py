"""An answer as OpenAI's chat protocol tells it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ragkv.index.background import AsyncAnswerStream
from ragkv.server.asked import ChatRequest
from ragkv.server.completion import Completion
from ragkv.server.failure import Refusal
from ragkv.server.telling import Trimmed
from ragkv.server.wire import event
from ragkv.types import Answer

__all__ = ["ChatForm"]

DONE = b"data: [DONE]\n\n"


class ChatForm:
    """Role, deltas, the finish reason with the sources, usage, `[DONE]`; or one object."""

    def __init__(self, asked: ChatRequest, completion: Completion, *, footer: bool) -> None:
        self._usage = asked.stream_options is not None and asked.stream_options.include_usage
        self._completion = completion
        self._footer = footer
        self._trimmed = Trimmed()
        self._content = ""

    def whole(self, answer: Answer, stream: AsyncAnswerStream) -> dict[str, Any]:
        return self._completion.whole(answer, stream.prompt_tokens, stream.tokens, footer=self._footer)

    def begins(self) -> Iterator[bytes]:
        yield event(self._completion.role())

    def says(self, piece: str, stream: AsyncAnswerStream) -> Iterator[bytes]:
        if shown := self._trimmed.take(piece):
            yield self._delta(shown)

    def ends(self, answer: Answer, stream: AsyncAnswerStream) -> Iterator[bytes]:
        if self._footer and (below := self._completion.footer(answer)):
            yield self._delta(below)
        yield event(self._completion.last(answer, self._content))
        if self._usage:
            yield event(self._completion.usage(stream.prompt_tokens, stream.tokens, answer))
        yield DONE

    def fails(self, refusal: Refusal) -> Iterator[bytes]:
        yield event(refusal.body)
        yield DONE

    def _delta(self, text: str) -> bytes:
        self._content += text
        return event(self._completion.delta(text))
