"""The routes below `/api` that ask and read: indexes, questions, documents, chunks."""

from __future__ import annotations

import asyncio
from itertools import islice
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from ragkv.index.background import AsyncAnswerStream
from ragkv.pipeline import RagKV
from ragkv.server.address import chunk_urls
from ragkv.server.crowd import Crowd
from ragkv.server.failure import Refusal
from ragkv.server.listing import all_facts, document_facts, document_page
from ragkv.server.option import Options
from ragkv.server.queryform import QueryForm
from ragkv.server.reply import EVENTS, AnswerReply, ChunkPage, DocumentListing, DocumentText, IndexListing
from ragkv.server.served import Served
from ragkv.server.shown import ShownChunk
from ragkv.server.telling import Telling, tell
from ragkv.server.wire import Json
from ragkv.server.words import worded

__all__ = ["own_routes"]

MOST_LISTED = 1000
Limit = Annotated[int, Query(ge=1, le=MOST_LISTED)]


class Turn(BaseModel):
    model_config = ConfigDict(extra="forbid")
    question: str
    answer: str


class QueryRequest(Options):
    """A question. `history`: the turns before it; `trace`: tell the expert that won each token."""

    model_config = ConfigDict(extra="forbid")
    question: str
    max_new_tokens: int | None = Field(default=None, ge=1)
    history: list[Turn] = Field(default=[], max_length=256)
    trace: bool = False
    stream: bool = False

    def most_tokens(self) -> int | None:
        return self.max_new_tokens


def own_routes(served: Served, crowd: Crowd) -> APIRouter:
    """What can be asked and read of these indexes."""
    routes = APIRouter(prefix="/api", tags=["ragkv's own"])

    @routes.get("/indexes", response_model=IndexListing)
    async def indexes() -> Json:
        """The indexes, and what may be asked of each."""
        return Json({"indexes": await asyncio.to_thread(all_facts, served)})

    @routes.post("/indexes/{name}/query", response_model=AnswerReply, responses=EVENTS)
    async def query(name: str, body: QueryRequest, request: Request) -> Response:
        """Answer a question as `ragkv query` does. Streamed: events `sources`, `token`, then `done` or `error`."""
        rag = served.index(name)
        question = body.question.strip()
        turns = [(turn.question, turn.answer) for turn in body.history]
        words = await asyncio.to_thread(worded, rag, question, turns)  # a long history takes its time to be counted
        stream = rag.stream(words.prompt, **body.query_options(words))
        form = QueryForm(question, chunk_urls(request, name), trace=body.trace)
        visit = crowd.enter(name)
        answering = AsyncAnswerStream(rag.index, lambda: stream, announce=body.stream)
        return await tell(request, Telling(answering, visit, form), streamed=body.stream)

    @routes.get("/indexes/{name}/documents", response_model=DocumentListing)
    async def documents(
        index: Annotated[str, Path(alias="name")],
        limit: Limit = 100,
        after: str = "",
        pattern: Annotated[str, Query(alias="name", max_length=500)] = "",
    ) -> Json:
        """The documents in the order of their ids; `name` is a part of their source's name, or a pattern (`*.md`)."""
        return Json(await asyncio.to_thread(document_page, served.index(index), pattern, after=after, limit=limit))

    # an id is a path as a rule: percent-encoded, its slashes are not those of the route
    @routes.get("/indexes/{name}/documents/{document_id:path}/chunks", response_model=ChunkPage)
    async def chunks(
        name: str, document_id: str, request: Request, limit: Limit = 100, after: Annotated[int, Query(ge=-1)] = -1
    ) -> Json:
        """A document's chunks in order, those behind the ordinal `after`."""
        rag = served.index(name)
        if not request.scope.get("raw_path", b"/chunks").endswith(
            b"/chunks"
        ):  # the id itself ends in an encoded "/chunks"
            return await _document(rag, f"{document_id}/chunks")
        return Json(await asyncio.to_thread(_chunk_page, rag, document_id, after, limit))

    @routes.get("/indexes/{name}/documents/{document_id:path}", response_model=DocumentText)
    async def document(name: str, document_id: str) -> Json:
        """One document."""
        return await _document(served.index(name), document_id)

    @routes.get("/indexes/{name}/chunks/{chunk_id:path}", response_model=ShownChunk)
    async def chunk(name: str, chunk_id: str) -> Json:
        """One chunk, as sources link to it."""
        found = await asyncio.to_thread(served.index(name).store.chunk, chunk_id)
        if found is None:
            raise Refusal(404, "There is no such chunk; its document may have changed.", code="not_found")
        return Json(ShownChunk.of(found).model_dump())

    return routes


async def _document(rag: RagKV, document_id: str) -> Json:
    found = await asyncio.to_thread(document_facts, rag, document_id)
    if found is None:
        raise _no_document()
    return Json(found)


def _chunk_page(rag: RagKV, document_id: str, after: int, limit: int) -> dict[str, object]:
    if rag.store.document(document_id) is None:
        raise _no_document()
    found = list(islice(rag.store.chunks(document_id), after + 1, after + 2 + limit))
    shown = [ShownChunk.of(chunk).model_dump() for chunk in found[:limit]]
    return {"chunks": shown, "next": after + limit if len(found) > limit else None}


def _no_document() -> Refusal:
    return Refusal(404, "There is no such document.", code="not_found")
