"""Send an answer to a client, streamed or whole, in any protocol, and cancel it when the client disconnects."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, cast

from fastapi import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ragkv.errors import AnswerInterruptedError, NothingFoundError, RetrievalError, UsageError
from ragkv.index.batch import AsyncAnswerStream
from ragkv.index.conversation import Conversation
from ragkv.server.errors import ApiError, Json, log_failure, stopping_error, to_api_error
from ragkv.server.metrics import RequestTracker
from ragkv.types import Answer

if TYPE_CHECKING:
    from ragkv.config import History
    from ragkv.pipeline import RagKV

T = TypeVar("T")

COMMENT_SECONDS = 5.0

logger = logging.getLogger(__name__)


class Formatter(Protocol):
    """How a protocol formats an answer: as one object, or as server-sent events."""

    names: Mapping[str, str]
    """The protocol's names of options, where they differ, for errors."""

    def whole(self, answer: Answer, stream: AsyncAnswerStream) -> dict[str, Any]:
        """The object of an answer that is not streamed."""

    def on_start(self) -> Iterable[bytes]:
        """The events before the first text."""

    def on_text(self, delta: str, stream: AsyncAnswerStream) -> Iterable[bytes]:
        """The events for a delta of text."""

    def on_end(self, answer: Answer, stream: AsyncAnswerStream) -> Iterable[bytes]:
        """The last events of a complete answer."""

    def on_error(self, refusal: ApiError) -> Iterable[bytes]:
        """The last events of a failed answer."""

    def on_nothing(self, error: NothingFoundError, stream: AsyncAnswerStream) -> AsyncAnswerStream | Answer:
        """What is sent if no chunk was found; or it raises the error."""


class TrimmedText:
    """Strips white space at both ends of a streamed text, so that the deltas together equal `Answer.text`."""

    def __init__(self) -> None:
        self._begun = False
        self._blank = ""

    def take(self, delta: str) -> str:
        """The text to show now. Trailing white space is held back until more text follows."""
        text = self._blank + delta
        if not self._begun:
            text = text.lstrip()
        shown = text.rstrip()
        self._begun = self._begun or bool(shown)
        self._blank = text[len(shown) :] if self._begun else ""
        return shown


class ThoughtDeltas:
    """The new part of an answer's thinking, which grows in another thread, without white space at both ends."""

    def __init__(self) -> None:
        self._trimmed = TrimmedText()
        self._seen = 0

    def take(self, stream: AsyncAnswerStream) -> str:
        thought = stream.reasoning
        new, self._seen = thought[self._seen :], len(thought)
        return self._trimmed.take(new)


class AnswerResponse(StreamingResponse):
    """Sends one answer in the format of a protocol, and gives up its place in the limiter when it ends."""

    def __init__(self, stream: AsyncAnswerStream, tracker: RequestTracker, formatter: Formatter) -> None:
        super().__init__(self._events(), media_type="text/event-stream", headers={"x-accel-buffering": "no"})
        self._stream = stream
        self._deltas = aiter(stream)
        self._tracker = tracker
        self._formatter = formatter
        self._first: str | None = None
        self._instead: Answer | None = None
        self._ended_early = self._streams = False
        tracker.cancel = self._cancel

    async def begin(self, request: Request, *, streamed: bool, at_once: bool = False) -> Response:
        """The response. If the client disconnects before it starts, the answer is cancelled.

        A stream starts with the answer's first text, so that an error before it sets the status; or `at_once`: any
        error is then an event, and comments show that the server lives.
        """
        try:
            if not streamed:
                return Json(await unless_gone(request, self._tracker, self._whole()))
            if at_once:
                self.body_iterator = with_comments(self._events())
            else:
                self._first = await unless_gone(request, self._tracker, self._next())
        except BaseException:
            await self._close()
            raise
        self._streams = True
        return self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await asyncio.shield(self._end())

    async def _end(self) -> None:
        await cast("AsyncGenerator[bytes]", self.body_iterator).aclose()
        await self._close()

    def end_early(self) -> None:
        """End the answer at its next token; it is then complete, with the finish reason "cancelled"."""
        self._ended_early = True
        self._cancel()

    def _cancel(self) -> None:
        self._stream.cancel()

    async def _whole(self) -> dict[str, Any]:
        while await self._next() is not None:
            continue
        payload = self._formatter.whole(self._complete(), self._stream)
        self._finish()
        return payload

    async def _events(self) -> AsyncGenerator[bytes]:
        """The answer as events. An error after the first text becomes an event of the protocol."""
        for event in self._formatter.on_start():
            yield event
        try:
            delta = await self._next() if self._first is None else self._first
            while delta is not None:
                for event in self._formatter.on_text(delta, self._stream):
                    yield event
                delta = await self._next()
            ending = list(self._formatter.on_end(self._complete(), self._stream))
            self._finish()
        except Exception as error:
            failure = to_api_error(error)
            if failure is not error:
                failure.__cause__ = error
            log_failure(logger, "an answer failed while it was streamed", error, failure)
            ending = list(self._formatter.on_error(failure))
        self._streams = False
        for event in ending:
            yield event

    async def _next(self) -> str | None:
        """The next text; None at the end."""
        if self._instead is not None:
            return None
        try:
            delta = await anext(self._deltas, None)
        except NothingFoundError as error:
            return await self._nothing(error)
        except (UsageError, RetrievalError) as error:
            raise to_api_error(error, self._formatter.names) from error
        if delta != "":  # an empty text only signals that retrieval is done
            self._tracker.began()
        return delta

    async def _nothing(self, error: NothingFoundError) -> str | None:
        instead = self._formatter.on_nothing(error, self._stream)
        if isinstance(instead, Answer):
            self._instead = instead
            self._tracker.began()
            return instead.text
        self._stream, self._deltas = instead, aiter(instead)
        return await self._next()

    def _finish(self) -> None:
        self._tracker.finished(self._complete(), self._stream.prompt_tokens, self._stream.tokens)
        self._tracker.leave()

    async def _close(self) -> None:
        """End the answer if it is still running, and give up its place."""
        if self._streams:
            self._tracker.abandoned()
        self._tracker.leave()
        await self._stream.aclose()

    def _complete(self) -> Answer:
        answer = self._instead or self._stream.answer
        if answer.finish_reason == "cancelled" and not self._ended_early:
            message = "The answer was cut short: the server is stopping."
            cause = AnswerInterruptedError("The answer was cut short, because the server is stopping; ask again.")
            raise ApiError(503, message, kind="server_error", code="unavailable") from cause
        return answer


async def with_comments(events: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """The events, with a comment after `COMMENT_SECONDS` without one, so that the connection is not closed as idle."""
    coming = asyncio.ensure_future(anext(events, None))
    try:
        while True:
            await asyncio.wait([coming], timeout=COMMENT_SECONDS)
            if not coming.done():
                yield b": still there\n\n"
            elif (event := coming.result()) is not None:
                yield event
                coming = asyncio.ensure_future(anext(events, None))
            else:
                return
    finally:
        coming.cancel()
        with suppress(asyncio.CancelledError):
            await coming
        await events.aclose()


async def unless_gone(request: Request, tracker: RequestTracker, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled with an ApiError if the client disconnects first. If the work was
    cancelled for another reason, the server is stopping: ApiError 503.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            tracker.abandoned()
            raise ApiError(499, "The client went away.", code="client_closed_request")
        if working.cancelled():
            raise stopping_error()
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


class ConversationText(NamedTuple):
    """A question's texts for the search and for the prompt, and as the user wrote it (`message`). `conversation` is set
    if the question is about the conversation itself and not about the documents. `rewrite` is the prompt that makes the
    model rewrite it.
    """

    search: Sequence[str]
    prompt: str
    conversation: str | None = None
    rewrite: str | None = None
    message: str | None = None


def in_conversation(
    rag: RagKV,
    question: str,
    turns: Iterable[tuple[str, str]],
    instructions: Iterable[str] = (),
    *,
    history: History | None = None,
    history_tokens: int = 512,
    rewrite: bool | None = None,
) -> ConversationText:
    """A question's texts after earlier `turns` (question, answer), formed as in `ragkv chat`.

    `instructions` come before the question, because the beginning of the prompt is part of the stored KV and cannot
    change. ApiError for text that is not valid Unicode.
    """
    turns, parts = list(turns), list(instructions)
    require_unicode([question, *parts, *(text for turn in turns for text in turn)])
    if not turns:
        return ConversationText((question,), "\n\n".join([*parts, question]), message=question)
    conversation = Conversation.of(rag.index, history=history, history_tokens=history_tokens, rewrite=rewrite)
    for asked, answered in turns:
        conversation.add(asked, answered)
    return ConversationText(
        conversation.search_texts(question),
        "\n\n".join([*parts, conversation.prompt_text(question)]),
        rewrite=conversation.rewrite_text(question),
        message=question,
    )


def require_unicode(texts: Iterable[str]) -> None:
    """ApiError for an unpaired surrogate, which JSON can express but no tokenizer accepts."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            message = "A text of the request is not valid Unicode: it holds half of a surrogate pair."
            raise ApiError(400, message) from UsageError("The question is not valid Unicode text; write it in UTF-8.")
