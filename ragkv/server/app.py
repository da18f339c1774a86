"""The server's routes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import quote

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

import ragkv
from ragkv.errors import RagkvError
from ragkv.index.background import AsyncAnswerStream
from ragkv.server.asked import ChatRequest, options_of, words_of
from ragkv.server.completion import DONE, Completion, Trimmed, event
from ragkv.server.crowd import Crowd, Visit
from ragkv.server.failure import Refusal, refusal_of
from ragkv.server.served import OWNER, Chosen, Served
from ragkv.server.vector import EmbeddingRequest, RerankRequest, embedded, reranked
from ragkv.server.wire import Json

__all__ = ["make_app"]

T = TypeVar("T")

logger = logging.getLogger(__name__)


def make_app(served: Served, crowd: Crowd, *, footer: bool = False) -> FastAPI:
    """The routes over these indexes. `footer`: answers end with their sources, whether a client asks for it or not."""
    app = FastAPI(title="ragkv", version=ragkv.__version__, docs_url=None, redoc_url=None)
    app.add_exception_handler(Refusal, _told)
    app.add_exception_handler(RequestValidationError, _malformed)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(RagkvError, _told)
    app.state.ready = False
    created = {name: int(rag.folder.stat().st_mtime) for name, rag in served}

    @app.get("/healthz")
    async def healthz() -> Json:
        """Whether the process lives."""
        return Json({"status": "ok"})

    @app.get("/readyz")
    async def readyz() -> Json:
        """Whether it answers questions: its models are loaded, and it is not stopping."""
        return Json({"status": "ready" if app.state.ready else "starting"}, 200 if app.state.ready else 503)

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        """Prometheus' text format."""
        return PlainTextResponse(crowd.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/models")
    async def models() -> Json:
        """The indexes, alone and with each engine."""
        return Json({"object": "list", "data": [_model(identifier) for identifier in served.model_ids()]})

    @app.get("/v1/models/{identifier:path}")
    async def model(identifier: str) -> Json:
        """One of them."""
        chosen = _chosen(identifier)
        engine = "" if chosen.engine is None else f":{chosen.engine}"
        return Json(_model(f"{OWNER}/{chosen.name}{engine}"))

    @app.post("/v1/chat/completions")
    async def completions(body: ChatRequest, request: Request) -> Response:
        """Answer the last message from the index's documents."""
        body.require_supported()
        chosen = _chosen(body.model)
        rag = chosen.rag
        words = words_of(body.messages, rag.config.prompt, lambda text: len(rag.model.tokens.encode(text)))
        options = options_of(body, chosen.engine, words)
        rag.stream(words.prompt, **options)  # checks the options, and does nothing yet
        visit = crowd.enter(chosen.name)
        stream = rag.astream(words.prompt, **options)
        base = f"{str(request.base_url).rstrip('/')}/api/indexes/{quote(chosen.name)}/chunks"
        telling = _Telling(body, stream, visit, Completion(body.model, base), footer=footer or body.footer)
        try:
            await _unless_gone(request, telling.begin())
            if not body.stream:
                return Json(await _unless_gone(request, telling.whole()))
        except BaseException:
            await telling.close()
            raise
        return _Streamed(telling)

    @app.post("/v1/embeddings")
    async def embeddings(body: EmbeddingRequest) -> Json:
        """Vectors of texts, by the index's embedder."""
        return Json(await _aside(lambda: embedded(body, _chosen(body.model))))

    @app.post("/v1/rerank")
    async def rerank(body: RerankRequest) -> Json:
        """Documents by their relevance, by the index's reranker."""
        return Json(await _aside(lambda: reranked(body, _chosen(body.model))))

    @app.get("/api/indexes/{name}/chunks/{chunk_id:path}")
    async def chunk(name: str, chunk_id: str) -> Json:
        """One chunk, as sources link to it."""
        rag = _chosen(name).rag
        found = await asyncio.to_thread(rag.store.chunk, chunk_id)
        if found is None:
            raise Refusal(404, "There is no such chunk; its document may have changed.", code="not_found")
        facts = ("chunk_id", "document_id", "ordinal", "text", "start", "end", "page", "heading")
        return Json({fact: getattr(found, fact) for fact in facts})

    def _chosen(identifier: str) -> Chosen:
        chosen = served.find(identifier)
        if chosen is None:
            known = ", ".join(f"{OWNER}/{name}" for name, _ in served)
            message = f"There is no model {identifier!r}; there are {known}, each also with an engine, as in NAME:ape."
            raise Refusal(404, message, param="model", code="model_not_found")
        return chosen

    def _model(identifier: str) -> dict[str, Any]:
        name = identifier.removeprefix(f"{OWNER}/").partition(":")[0]
        return {"id": identifier, "object": "model", "created": created[name], "owned_by": OWNER}

    async def _aside(work: Callable[[], T]) -> T:
        visit = crowd.enter("vectors")
        try:
            return await asyncio.to_thread(work)
        finally:
            visit.leave()

    return app


class _Telling:
    """An answer on its way to a client."""

    def __init__(
        self, asked: ChatRequest, stream: AsyncAnswerStream, visit: Visit, completion: Completion, *, footer: bool
    ) -> None:
        self._usage = asked.stream_options is not None and asked.stream_options.include_usage
        self._stream = stream
        self._visit = visit
        self._completion = completion
        self._footer = footer
        self._trimmed = Trimmed()
        self._first: str | None = None
        self._pieces = aiter(stream)

    async def begin(self) -> None:
        """Wait for the first piece: what goes wrong before it is told by the status of the response."""
        self._first = await anext(self._pieces, None)
        self._visit.began()

    async def whole(self) -> dict[str, Any]:
        """Everything at once."""
        async for _ in self._pieces:
            continue
        told = self._completion.whole(
            self._stream.answer, self._stream.prompt_tokens, self._stream.tokens, footer=self._footer
        )
        await self.close(finished=True)
        return told

    async def events(self) -> AsyncIterator[bytes]:
        """The answer piece by piece; an error under way is told in the protocol's shape."""
        yield event(self._completion.role())
        content = ""
        try:
            async for piece in self._all():
                if shown := self._trimmed.take(piece):
                    content += shown
                    yield event(self._completion.delta(shown))
            answer = self._stream.answer
            if self._footer and (below := self._completion.footer(answer)):
                content += below
                yield event(self._completion.delta(below))
            yield event(self._completion.last(answer, content))
            if self._usage:
                yield event(self._completion.usage(self._stream.prompt_tokens, self._stream.tokens, answer))
            await self.close(finished=True)
        except Exception as error:
            refusal = refusal_of(error)
            if refusal.status >= 500 and not isinstance(error, Refusal):
                logger.exception("an answer failed under way")
            yield event(refusal.body)
        yield DONE

    async def close(self, *, finished: bool = False) -> None:
        """End the answer if it still runs, and give up its place; once."""
        if finished:
            self._visit.finished(self._stream.answer, self._stream.prompt_tokens, self._stream.tokens)
        self._visit.leave()
        await self._stream.aclose()

    async def _all(self) -> AsyncIterator[str]:
        if self._first is not None:
            yield self._first
        async for piece in self._pieces:
            yield piece


class _Streamed(StreamingResponse):
    """An answer as server-sent events; however its sending ends, the answer ends too."""

    def __init__(self, telling: _Telling) -> None:
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


async def _told(_: Request, error: Exception) -> Json:
    refusal = refusal_of(error)
    return Json(refusal.body, refusal.status, headers=refusal.headers)


async def _malformed(_: Request, error: Exception) -> Json:
    """A body that is no JSON, or not that of the protocol: the first thing that is wrong with it."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = [str(part) for part in first["loc"][1:]]
    param = ".".join(where) or None
    message = first["msg"] if param is None else f"{param}: {first['msg']}"
    return Json(Refusal(400, message, param=param).body, 400)


async def _http(_: Request, error: Exception) -> Json:
    assert isinstance(error, HTTPException)
    if isinstance(error.__cause__, Refusal):  # the body came too slowly, or was too large
        return await _told(_, error.__cause__)
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    refusal = Refusal(error.status_code, str(error.detail), kind=kind)
    return Json(refusal.body, error.status_code, headers=error.headers)
