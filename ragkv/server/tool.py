"""An index as tools for assistants and editors, by the Model Context Protocol (`ragkv mcp`). They only read."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Annotated, ParamSpec, TypeVar

import mcp_types
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import BaseModel, Field

import ragkv
from ragkv.errors import RagkvError
from ragkv.index.inspection import chunk_named
from ragkv.pipeline import RagKV
from ragkv.server.shown import ShownChunk
from ragkv.types import Source

__all__ = ["make_tools"]

MOST_DOCUMENTS = 1000
P = ParamSpec("P")
R = TypeVar("R")

Conditions = Annotated[
    list[str] | None,
    Field(description="Only documents that meet FIELD=PATTERN, as in source=notes/*.md, or a metadata key."),
]
Amount = Annotated[int | None, Field(ge=1, le=256, description="How many passages; unset: as the index is set.")]


class Passage(BaseModel):
    """A chunk of a document, and how relevant it is (from 0 to 1)."""

    chunk_id: str
    document: str
    text: str
    page: int | None
    heading: str | None
    score: float


class Passages(BaseModel):
    """The passages that were found, best first."""

    passages: list[Passage]


class Told(BaseModel):
    """An answer, and the passages it was made from, best first."""

    answer: str
    engine: str
    finish_reason: str
    sources: list[Passage]


class Listed(BaseModel):
    """One document of the index."""

    document: str
    source: str
    title: str | None
    media_type: str
    chunks: int


class Documents(BaseModel):
    """Documents in the order of their ids. `after`: list again with it for those behind; null when there are none."""

    documents: list[Listed]
    after: str | None


def make_tools(rag: RagKV, name: str) -> MCPServer:
    """The tools `search`, `ask`, `show` and `list_documents` over an open index, with typed results."""
    server = MCPServer(
        name=f"ragkv {name}",
        version=ragkv.__version__,
        instructions=(
            f"Documents of the index {name!r}. `search` finds passages, `ask` answers a question from them and names "
            "its sources, `show` gives one passage, `list_documents` says what there is."
        ),
        log_level="WARNING",
    )
    reads = mcp_types.ToolAnnotations(read_only_hint=True, idempotent_hint=True, open_world_hint=False)

    def tool(name: str) -> Callable[[Callable[P, Awaitable[R]]], Callable[P, Awaitable[R]]]:
        return lambda work: server.tool(name, annotations=reads)(_told(work))

    @tool("search")
    async def search(question: str, top_k: Amount = None, where: Conditions = None) -> Passages:
        """Find the passages of the documents that say most about a question or some words, best first."""
        found = await rag.aretrieve(question, top_k=top_k, where=where or ())
        return Passages(
            passages=[
                Passage(
                    chunk_id=each.chunk.chunk_id,
                    document=each.source,
                    text=each.chunk.text,
                    page=each.chunk.page,
                    heading=each.chunk.heading,
                    score=each.score,
                )
                for each in found
            ]
        )

    @tool("ask")
    async def ask(
        question: str,
        top_k: Amount = None,
        where: Conditions = None,
        engine: Annotated[str | None, Field(description="How passages are read: ape, block, pced, full, …")] = None,
        max_new_tokens: Annotated[int, Field(ge=1, le=4096, description="The longest answer, in tokens.")] = 256,
    ) -> Told:
        """Answer a question from the documents, with the passages that the answer was made from."""
        answer = await rag.aquery(
            question, top_k=top_k, where=where or (), engine=engine, max_new_tokens=max_new_tokens
        )
        return Told(
            answer=answer.text,
            engine=answer.engine,
            finish_reason=answer.finish_reason,
            sources=[_passage(source) for source in answer.sources],
        )

    @tool("show")
    async def show(
        chunk: Annotated[str, Field(description="A chunk's id or its start, or DOCUMENT:NUMBER (from 0).")],
    ) -> ShownChunk:
        """Show one passage; with DOCUMENT:NUMBER, its neighbours can be read one after another."""
        found = await asyncio.to_thread(chunk_named, rag.store, chunk)
        return ShownChunk.of(found)

    @tool("list_documents")
    async def documents(
        pattern: Annotated[str | None, Field(description="Id, source name, or a pattern such as notes/*.")] = None,
        where: Conditions = None,
        after: Annotated[str, Field(description="List those behind this id, as the page before says.")] = "",
        limit: Annotated[int, Field(ge=1, le=MOST_DOCUMENTS)] = 100,
    ) -> Documents:
        """List the documents of the index."""
        names = [] if pattern is None else [pattern]
        page = await asyncio.to_thread(rag.list_documents, names, where or (), after=after, limit=limit)
        return Documents(
            documents=[
                Listed(
                    document=one.document.document_id,
                    source=one.document.source,
                    title=one.document.title,
                    media_type=one.document.media_type,
                    chunks=one.stats.chunks,
                )
                for one in page.documents
            ],
            after=page.after,
        )

    return server


def _told(work: Callable[P, Awaitable[R]]) -> Callable[P, Awaitable[R]]:
    """Deliberate errors as the protocol's, in their own sentence."""

    @wraps(work)
    async def telling(*arguments: P.args, **named: P.kwargs) -> R:
        try:
            return await work(*arguments, **named)
        except RagkvError as error:
            raise ToolError(str(error)) from error

    return telling


def _passage(source: Source) -> Passage:
    return Passage(
        chunk_id=source.chunk_id,
        document=source.document,
        text=source.text,
        page=source.page,
        heading=source.heading,
        score=source.score,
    )
