"""OpenAI's protocol: `/v1/chat/completions`, `/v1/completions`, `/v1/responses`, `/v1/models`, `/v1/embeddings`, and
Jina's and Cohere's rerank route.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from ragkv.index.answer import AnswerStream
from ragkv.index.batch import AsyncAnswerStream
from ragkv.server.chat import ChatFormatter, ChatReply, ChatRequest, Reply, prepare
from ragkv.server.completions import (
    Choices,
    CompletionFormatter,
    CompletionReply,
    CompletionRequest,
    prepare_completions,
)
from ragkv.server.embeddings import (
    Aside,
    EmbeddingReply,
    EmbeddingRequest,
    RerankReply,
    RerankRequest,
    embedded,
    reranked,
)
from ragkv.server.errors import ApiError, Json
from ragkv.server.metrics import ConcurrencyLimiter
from ragkv.server.responses import ResponseFormatter, ResponseReply, ResponseRequest, renamed
from ragkv.server.schemas import EVENTS, OWNER, PLAIN, ModelChoice, ServedIndexes, chunk_urls
from ragkv.server.streaming import AnswerResponse, Formatter, unless_gone


class ModelCard(BaseModel):
    """An index, or an index with an engine."""

    id: str
    object: str
    created: int
    owned_by: str


class ModelListing(BaseModel):
    object: str
    data: list[ModelCard]


def protocol_routes(served: ServedIndexes, limiter: ConcurrencyLimiter, *, footer: bool) -> APIRouter:
    """The protocol over these indexes. `footer`: answers end with their sources, whether a client asks or not."""
    routes = APIRouter(tags=["OpenAI's protocol"])
    created = {name: int(rag.folder.stat().st_mtime) for name, rag in served}

    @routes.get("/v1/models", response_model=ModelListing)
    async def models(engines: bool = False) -> Json:
        """The indexes and their models alone; with `engines`, each index with each engine, too, listed or not."""
        return Json({"object": "list", "data": [_model(name) for name in served.model_ids(engines=engines)]})

    @routes.get("/v1/models/{identifier:path}", response_model=ModelCard)
    async def model(identifier: str) -> Json:
        """One of them."""
        chosen = served.chosen(identifier)
        engine = f":{PLAIN}" if chosen.plain else "" if chosen.engine is None else f":{chosen.engine}"
        return Json(_model(f"{OWNER}/{chosen.name}{engine}"))

    @routes.post("/v1/chat/completions", response_model=ChatReply, responses=EVENTS)
    async def completions(body: ChatRequest, request: Request) -> Response:
        """Answer the last message from the index's documents."""
        body.require_supported()
        chosen = served.chosen(body.model)
        return await chatted(request, chosen, body, partial(ChatFormatter, body), stream=body.stream)

    @routes.post("/v1/responses", response_model=ResponseReply, responses=EVENTS)
    async def responses(body: ResponseRequest, request: Request) -> Response:
        """Answer the input from the index's documents, as the chat does."""
        chat, places = body.chat()
        try:
            chat.require_supported()
            form = partial(ResponseFormatter, body, chat, places)
            return await chatted(request, served.chosen(body.model), chat, form, stream=body.stream)
        except ApiError as error:
            raise renamed(error, places) from error

    def begun(chosen: ModelChoice, stream: AnswerStream) -> AsyncAnswerStream:
        return AsyncAnswerStream(chosen.rag.index, lambda: stream)

    async def chatted(
        request: Request,
        chosen: ModelChoice,
        body: ChatRequest,
        form: Callable[[Reply], Formatter],
        *,
        stream: bool,
    ) -> Response:
        prepared = await asyncio.get_running_loop().run_in_executor(limiter.asks, prepare, body, chosen)
        reply = Reply(prepared, chosen, chunk_urls(request, chosen.name), footer=footer or body.footer)
        tracker = await limiter.admit(chosen.name)
        answering = begun(chosen, prepared.stream)
        return await AnswerResponse(answering, tracker, form(reply)).begin(request, streamed=stream)

    @routes.post("/v1/completions", response_model=CompletionReply, responses=EVENTS)
    async def texts(body: CompletionRequest, request: Request) -> Response:
        """Answer each prompt from the index's documents, or let the model alone continue it."""
        chosen = served.chosen(body.model)
        loop = asyncio.get_running_loop()
        streams, names = await loop.run_in_executor(limiter.asks, prepare_completions, body, chosen)
        choices = Choices([begun(chosen, stream) for stream in streams], names)
        tracker = await limiter.admit(chosen.name)
        formatter = CompletionFormatter(body, choices, names, plain=chosen.plain)
        return await AnswerResponse(choices, tracker, formatter).begin(request, streamed=body.stream)

    @routes.post("/v1/embeddings", response_model=EmbeddingReply)
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        """Vectors of texts, by the index's embedder."""
        return await _aside(request, partial(embedded, body, served.chosen(body.model)))

    @routes.post("/v1/rerank", response_model=RerankReply)
    async def rerank(body: RerankRequest, request: Request) -> Response:
        """Documents by their relevance, by the index's reranker."""
        return await _aside(request, partial(reranked, body, served.chosen(body.model)))

    def _model(identifier: str) -> dict[str, Any]:
        name = identifier.removeprefix(f"{OWNER}/").partition(":")[0]
        return {
            "id": identifier,
            "object": "model",
            "created": created.setdefault(name, int(time.time())),
            "owned_by": OWNER,
        }

    async def _aside(request: Request, work: Callable[[Aside], Awaitable[bytes]]) -> Response:
        """The JSON that `work` makes in the thread for embeddings; cancelled if the client disconnects or the server
        stops.
        """
        tracker = await limiter.admit("vectors")
        loop = asyncio.get_running_loop()

        async def aside(part: Callable[[], Any]) -> Any:
            def running() -> Any:
                loop.call_soon_threadsafe(tracker.runs)
                return part()

            return await loop.run_in_executor(limiter.vectors, running)

        working = asyncio.ensure_future(work(aside))
        tracker.cancel = working.cancel
        try:
            return Response(await unless_gone(request, tracker, working), media_type="application/json")
        finally:
            tracker.leave()

    return routes
