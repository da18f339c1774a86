"""The routes below `/v1`: OpenAI's protocol, and the rerank route of Jina's and Cohere's servers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from starlette.responses import Response

from ragkv.index.background import AsyncAnswerStream
from ragkv.server.address import chunk_urls
from ragkv.server.asked import ChatRequest, words_of
from ragkv.server.chatform import ChatForm
from ragkv.server.chatreply import ChatReply, ModelFacts, ModelListing
from ragkv.server.completion import Completion
from ragkv.server.crowd import Crowd
from ragkv.server.reply import EVENTS
from ragkv.server.served import OWNER, Served
from ragkv.server.telling import Telling, tell
from ragkv.server.vector import (
    EmbeddingReply,
    EmbeddingRequest,
    RerankReply,
    RerankRequest,
    embedded,
    reranked,
)
from ragkv.server.wire import Json

__all__ = ["protocol_routes"]

T = TypeVar("T")


def protocol_routes(served: Served, crowd: Crowd, *, footer: bool) -> APIRouter:
    """The protocol over these indexes. `footer`: answers end with their sources, whether a client asks or not."""
    routes = APIRouter(prefix="/v1", tags=["OpenAI's protocol"])
    created = {name: int(rag.folder.stat().st_mtime) for name, rag in served}

    @routes.get("/models", response_model=ModelListing)
    async def models() -> Json:
        """The indexes, alone and with each engine."""
        return Json({"object": "list", "data": [_model(identifier) for identifier in served.model_ids()]})

    @routes.get("/models/{identifier:path}", response_model=ModelFacts)
    async def model(identifier: str) -> Json:
        """One of them."""
        chosen = served.chosen(identifier)
        engine = "" if chosen.engine is None else f":{chosen.engine}"
        return Json(_model(f"{OWNER}/{chosen.name}{engine}"))

    @routes.post("/chat/completions", response_model=ChatReply, responses=EVENTS)
    async def completions(body: ChatRequest, request: Request) -> Response:
        """Answer the last message from the index's documents."""
        body.require_supported()
        chosen = served.chosen(body.model)
        words = await asyncio.to_thread(words_of, body.messages, chosen.rag)
        stream = chosen.rag.stream(words.prompt, **body.options(chosen, words))
        completion = Completion(body.model, chunk_urls(request, chosen.name))
        form = ChatForm(body, completion, footer=footer or body.footer)
        visit = crowd.enter(chosen.name)
        return await tell(
            request,
            Telling(AsyncAnswerStream(chosen.rag.index, lambda: stream), visit, form),
            streamed=body.stream,
        )

    @routes.post("/embeddings", response_model=EmbeddingReply)
    async def embeddings(body: EmbeddingRequest) -> Json:
        """Vectors of texts, by the index's embedder."""
        return Json(await _aside(lambda: embedded(body, served.chosen(body.model))))

    @routes.post("/rerank", response_model=RerankReply)
    async def rerank(body: RerankRequest) -> Json:
        """Documents by their relevance, by the index's reranker."""
        return Json(await _aside(lambda: reranked(body, served.chosen(body.model))))

    def _model(identifier: str) -> dict[str, Any]:
        name = identifier.removeprefix(f"{OWNER}/").partition(":")[0]
        return {"id": identifier, "object": "model", "created": created[name], "owned_by": OWNER}

    async def _aside(work: Callable[[], T]) -> T:
        visit = crowd.enter("vectors")
        try:
            return await asyncio.to_thread(work)
        finally:
            visit.leave()

    return routes
