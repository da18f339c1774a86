"""The routes of an index's doorway: what `ragkv query`, `chat`, `ls` and `stop` ask of the server that is up for it.

A request is `{"identity", "opened", "given"}`: who asks, the settings that the index must be open with, and what the
errand needs. A server that would answer otherwise than the command itself declines (409) before it does anything. The
response has a JSON object on each line: `note` for stderr, `begun` and `piece` of an answer, last `done` or `error`; an
empty line says every few seconds that the server lives.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ragkv.config import load_config
from ragkv.engines import engine_names
from ragkv.errors import AnswerInterruptedError, RagkvError
from ragkv.index.answer import AnswerStream
from ragkv.index.background import AsyncAnswerStream
from ragkv.model.device import pick_device
from ragkv.pipeline import RagKV
from ragkv.server import errand
from ragkv.server.crowd import Crowd
from ragkv.server.failure import Refusal
from ragkv.server.wire import packed
from ragkv.types import Answer

__all__ = ["House", "resident_app"]

LIFE_SECONDS = 5.0
logger = logging.getLogger(__name__)

Events = AsyncGenerator[dict[str, Any]]
Start = Callable[[errand.Tell], AnswerStream]


class House:
    """What all doorways of a server share: its crowd, what it says of itself, and how it is told to stop."""

    def __init__(self, crowd: Crowd, about: Mapping[str, Any], stop: Callable[[], None]) -> None:
        self.crowd = crowd
        self.about = {"pid": os.getpid(), **about}
        self.stop = stop


def resident_app(name: str, rag: RagKV, house: House) -> Starlette:
    """The app behind the doorway of the index `name`."""
    desk = _Desk(name, rag, house)
    errands = {
        "query": desk.query,
        "begin": desk.begin,
        "choose": desk.choose,
        "engines": desk.engines,
        "reply": desk.reply,
        "cancel": desk.cancel,
        "list": desk.page,
        "about": desk.about,
        "stop": desk.stop,
    }
    routes = [Route(f"/{path}", _route(desk, path, run), methods=["POST"]) for path, run in errands.items()]
    return Starlette(routes=routes)


def _route(desk: _Desk, path: str, run: Callable[[dict[str, Any]], Events]) -> Callable[[Request], Any]:
    async def told(request: Request) -> _Told:
        body = await request.json()
        if path not in ("about", "stop"):
            await asyncio.to_thread(desk.require_same, body)
        return _Told(_lines(desk.explained(run(body["given"]))))

    return told


class _Desk:
    """The errands of one index, each as the events of its response."""

    def __init__(self, name: str, rag: RagKV, house: House) -> None:
        self._name = name
        self._rag = rag
        self._house = house
        self._answers: dict[str, AsyncAnswerStream] = {}
        self._cancelled: set[str] = set()

    def require_same(self, body: Mapping[str, Any]) -> None:
        """Refusal 409 unless the command would answer from the same index in the same way."""
        rag = self._rag
        with suppress(RagkvError):  # the index is gone, damaged or replaced: the command will say so
            if (
                body["identity"] == errand.identity()
                and (body["opened"] is None or self._opened_with(**body["opened"]))
                and load_config(rag.folder) == rag.config
                and rag.store.generation >= 0
            ):
                return
        raise Refusal(409, "This server would not answer as the command does.", code="another_way")

    def _opened_with(self, device: str | None = None, **limits: int) -> bool:
        index = self._rag.index
        several = any(named is not None and ("," in named or named == "auto") for named in (device, index.device))
        alike = device == index.device or (not several and pick_device(device) == pick_device(index.device))
        return alike and limits == index.limits.given

    async def explained(self, events: Events) -> Events:
        """The events, and at the end what went wrong, in the words that the command would have found itself."""
        try:
            async for event in events:
                yield event
        except Refusal as refusal:  # too many are inside
            yield {"declined": str(refusal)}
        except RagkvError as error:
            yield {"error": {"kind": type(error).__name__, "message": str(error), "folder": str(self._rag.folder)}}
        except Exception:
            logger.exception("an errand failed")
            yield {"error": {"kind": "RagkvError", "message": "The server failed; its log says more.", "folder": ""}}

    def query(self, given: dict[str, Any]) -> Events:
        asked = errand.Question(**given["asked"])
        return self._answered(given["id"], lambda tell: errand.answer(self._rag, asked, tell))

    def reply(self, given: dict[str, Any]) -> Events:
        talk, turn = errand.Talk(**given["talk"]), errand.Turn(**given["turn"])
        return self._answered(given["id"], lambda tell: errand.reply(self._rag, talk, turn))

    def begin(self, given: dict[str, Any]) -> Events:
        talk = errand.Talk(**given["talk"])
        return self._done(lambda tell: errand.begin(self._rag, talk, given["engine"], tell))

    def choose(self, given: dict[str, Any]) -> Events:
        talk = errand.Talk(**given["talk"])
        return self._done(lambda tell: errand.choose(self._rag, talk, given["engine"], tell))

    def engines(self, given: dict[str, Any]) -> Events:
        return self._done(lambda tell: engine_names())

    def page(self, given: dict[str, Any]) -> Events:
        return self._done(lambda tell: errand.list_page(self._rag, **given))

    def about(self, given: dict[str, Any]) -> Events:
        return self._done(lambda tell: self._house.about)

    async def cancel(self, given: dict[str, Any]) -> Events:
        """End an answer at its next token; its own response then tells what there is of it."""
        if (stream := self._answers.get(given["id"])) is not None:
            self._cancelled.add(given["id"])
            stream.cancel()
        yield {"done": stream is not None}

    async def stop(self, given: dict[str, Any]) -> Events:
        yield {"done": self._house.about}
        self._house.stop()

    async def _done(self, work: Callable[[errand.Tell], Any]) -> Events:
        notes: list[str] = []
        failed: RagkvError | None = None
        try:
            found = await asyncio.to_thread(work, notes.append)
        except RagkvError as error:
            failed = error
        for note in notes:
            yield {"note": note}
        if failed is not None:
            raise failed
        yield {"done": found}

    async def _answered(self, identifier: str, start: Start) -> Events:
        notes: list[str] = []
        visit = self._house.crowd.enter(self._name)
        stream = self._answers[identifier] = AsyncAnswerStream(self._rag.index, lambda: start(notes.append))
        visit.cancel = stream.cancel
        failed: RagkvError | None = None
        try:
            yield {"begun": True}
            try:
                async for piece in stream:
                    visit.began()
                    while notes:
                        yield {"note": notes.pop(0)}
                    yield {"piece": piece}
            except RagkvError as error:
                failed = error
            for note in notes:
                yield {"note": note}
            yield {"done": self._complete(identifier, stream, failed).to_json()}
            visit.finished(stream.answer, stream.prompt_tokens, stream.tokens)
        finally:
            del self._answers[identifier]
            self._cancelled.discard(identifier)
            visit.leave()
            await stream.aclose()

    def _complete(self, identifier: str, stream: AsyncAnswerStream, failed: RagkvError | None) -> Answer:
        if failed is not None:
            raise failed
        if stream.answer.finish_reason == "cancelled" and identifier not in self._cancelled:
            raise AnswerInterruptedError("The answer was cut short, because the server is stopping; ask again.")
        return stream.answer


class _Told(StreamingResponse):
    """A response line by line; however its sending ends, the errand ends too."""

    def __init__(self, lines: AsyncGenerator[bytes]) -> None:
        super().__init__(lines, media_type="application/x-ndjson")
        self._lines = lines

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await asyncio.shield(self._lines.aclose())


async def _lines(events: Events) -> AsyncGenerator[bytes]:
    """Each event on a line, and an empty line whenever none has come for a while."""
    coming = asyncio.ensure_future(anext(events))
    try:
        while True:
            await asyncio.wait([coming], timeout=LIFE_SECONDS)
            if not coming.done():
                yield b"\n"
                continue
            try:
                event = coming.result()
            except StopAsyncIteration:
                return
            yield packed(event) + b"\n"
            coming = asyncio.ensure_future(anext(events))
    finally:
        coming.cancel()
        with suppress(asyncio.CancelledError, StopAsyncIteration):
            await coming
        await events.aclose()
