"""An answer on its way to a client, streamed or whole, in whatever protocol; it ends when the client goes away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Iterable
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from fastapi import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ragkv.index.background import AsyncAnswerStream
from ragkv.server.crowd import Visit
from ragkv.server.failure import Refusal, refusal_of
from ragkv.server.wire import Json
from ragkv.types import Answer

__all__ = ["Form", "Telling", "Trimmed", "tell"]

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Form(Protocol):
    """How a protocol tells an answer: as one object, or as events."""

    def whole(self, answer: Answer, stream: AsyncAnswerStream) -> dict[str, Any]:
        """The object of an answer that is not streamed."""

    def begins(self) -> Iterable[bytes]:
        """The events before the first piece."""

    def says(self, piece: str, stream: AsyncAnswerStream) -> Iterable[bytes]:
        """The events of a piece of text."""

    def ends(self, answer: Answer, stream: AsyncAnswerStream) -> Iterable[bytes]:
        """The events that a complete answer ends with."""

    def fails(self, refusal: Refusal) -> Iterable[bytes]:
        """The events of an answer that ends in an error."""


class Trimmed:
    """Takes pieces of text and gives them on without blank at the beginning and the end: together, `Answer.text`."""

    def __init__(self) -> None:
        self._begun = False
        self._blank = ""

    def take(self, piece: str) -> str:
        """What may be shown of it now; blank that others may follow is held back."""
        text = self._blank + piece
        if not self._begun:
            text = text.lstrip()
        shown = text.rstrip()
        self._begun = self._begun or bool(shown)
        self._blank = text[len(shown) :] if self._begun else ""
        return shown


class Telling:
    """One answer, told in a form. `visit` is its place among the requests."""

    def __init__(self, stream: AsyncAnswerStream, visit: Visit, form: Form) -> None:
        self._stream = stream
        self._visit = visit
        self._form = form
        self._first: str | None = None
        self._pieces = aiter(stream)
        visit.cancel = stream.cancel

    async def begin(self) -> None:
        """Wait for the first piece: what goes wrong before it is told by the status of the response."""
        self._first = await anext(self._pieces, None)

    async def whole(self) -> dict[str, Any]:
        """Everything at once."""
        async for _ in self._all():
            continue
        told = self._form.whole(self._complete(), self._stream)
        await self.close(finished=True)
        return told

    async def events(self) -> AsyncIterator[bytes]:
        """The answer piece by piece; an error under way is told in the protocol's shape."""
        for event in self._form.begins():
            yield event
        try:
            async for piece in self._all():
                for event in self._form.says(piece, self._stream):
                    yield event
            ending = list(self._form.ends(self._complete(), self._stream))
            await self.close(finished=True)
        except Exception as error:
            refusal = refusal_of(error)
            if refusal.status >= 500 and not isinstance(error, Refusal):
                logger.exception("an answer failed under way")
            ending = list(self._form.fails(refusal))
        for event in ending:
            yield event

    async def close(self, *, finished: bool = False) -> None:
        """End the answer if it still runs, and give up its place; once."""
        if finished:
            self._visit.finished(self._stream.answer, self._stream.prompt_tokens, self._stream.tokens)
        self._visit.leave()
        await self._stream.aclose()

    async def _all(self) -> AsyncIterator[str]:
        if self._first is not None:
            yield self._begun(self._first)
        async for piece in self._pieces:
            yield self._begun(piece)
        self._visit.began()

    def _begun(self, piece: str) -> str:
        if piece:  # an empty one only says that the chunks are found
            self._visit.began()
        return piece

    def _complete(self) -> Answer:
        answer = self._stream.answer
        if answer.finish_reason == "cancelled":
            said = "The answer was cut short: the server is stopping."
            raise Refusal(503, said, kind="server_error", code="unavailable")
        return answer


async def tell(request: Request, telling: Telling, *, streamed: bool) -> Response:
    """The response with the answer. If the client goes away before there is one, the answer ends."""
    try:
        if not streamed:
            return Json(await _unless_gone(request, telling.whole()))
        await _unless_gone(request, telling.begin())
    except BaseException:
        await telling.close()
        raise
    return _Streamed(telling)


class _Streamed(StreamingResponse):
    """An answer as server-sent events; however its sending ends, the answer ends too."""

    def __init__(self, telling: Telling) -> None:
        super().__init__(telling.events(), media_type="text/event-stream", headers={"x-accel-buffering": "no"})
        self._telling = telling

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await asyncio.shield(self._telling.close())


async def _unless_gone(request: Request, work: Awaitable[T]) -> T:
    """What `work` gives; if the client goes away before, it is cancelled, and Refusal is raised, which nobody reads."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Refusal(499, "The client went away.", code="client_closed_request")
        return working.result()
    finally:
        for task in (working, leaving):
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue
