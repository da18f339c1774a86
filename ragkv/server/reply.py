"""What the server answers, for its OpenAPI description."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from ragkv.server.shown import ShownChunk

__all__ = [
    "EVENTS",
    "FAILURES",
    "AnswerReply",
    "AnswerSource",
    "ChunkPage",
    "Condition",
    "DocumentFacts",
    "DocumentListing",
    "DocumentText",
    "Failure",
    "IndexFacts",
    "IndexListing",
]


class Fault(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Failure(BaseModel):
    """An error, in the shape of OpenAI's protocol."""

    error: Fault


FAILURES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": Failure, "description": "The request cannot be answered, and why."},
    "5XX": {"model": Failure, "description": "The server or the index failed."},
}


class Condition(BaseModel):
    """Whether the server lives, or is ready."""

    status: str


EVENTS: dict[int | str, dict[str, Any]] = {
    200: {"description": "The answer; with `stream`, as server-sent events.", "content": {"text/event-stream": {}}}
}


class IndexFacts(BaseModel):
    """An index: what it holds, and what may be asked of it."""

    name: str
    documents: int
    chunks: int
    model: str
    engines: list[str] = Field(description="Those that the model runs exactly.")
    default_engine: str
    top_k: int
    retrieval: list[str] = Field(description="The modes that the index can serve.")
    default_retrieval: str
    rerank: bool = Field(description="Whether candidates are reranked unless a question says otherwise.")
    reranker: bool = Field(description="Whether there is a reranker.")
    embedder: bool = Field(description="Whether there is an embedder.")
    writable: bool = Field(description="Whether documents can be added and deleted.")


class IndexListing(BaseModel):
    indexes: list[IndexFacts]


class AnswerSource(BaseModel):
    """A chunk behind an answer, with the scores of every stage that saw it."""

    document: str
    chunk_id: str
    text: str
    page: int | None
    heading: str | None
    score: float = Field(description="The fused relevance, from 0 to below 1 (PCED Eqs. 4-7).")
    retrieval_score: float
    rerank_score: float | None
    stages: dict[str, float] = Field(description="Raw scores: dense, sparse, colbert, bm25, relative, rrf.")
    tokens_won: int | None = Field(description="For PCED, how many tokens the chunk's expert chose.")
    url: str = Field(description="Where the chunk itself is found.")


class Milliseconds(BaseModel):
    retrieve: float
    rerank: float
    load: float
    first_token: float = Field(description="Counted from the end of `load`.")
    total: float


class StoredKV(BaseModel):
    """How much of the context came from stored KV."""

    hits: int
    misses: int
    bytes: int
    tokens: int
    memory_hits: int


class Traced(BaseModel):
    """One generated token; `source` is the place among `sources` of the chunk whose expert won it."""

    id: int
    text: str
    source: int | None


class Trace(BaseModel):
    tokens: list[Traced]


class AnswerReply(BaseModel):
    """What `ragkv query --json` prints, with an address for each source and, if asked for, the trace."""

    question: str
    answer: str
    engine: str
    finish_reason: str
    sources: list[AnswerSource]
    timing_ms: Milliseconds
    kv: StoredKV
    decoding: dict[str, Any] = Field(description="The settings that were in effect, with a seed that was drawn.")
    trace: Trace = Field(default=Trace(tokens=[]), description="Only with `trace`.")


class DocumentFacts(BaseModel):
    """A document and the sizes of what is stored for it."""

    document_id: str
    name: str = Field(description="The last part of `source`.")
    source: str = Field(description="The name that sources of answers show.")
    title: str | None
    media_type: str
    metadata: dict[str, str]
    chunks: int
    tokens: int
    text_bytes: int
    kv_bytes: int
    ingested_at: float = Field(description="Seconds since 1970.")


class DocumentListing(BaseModel):
    """Documents in the order of their ids. `next`: list again with it as `after`; null on the last page."""

    documents: list[DocumentFacts]
    next: str | None


class DocumentText(DocumentFacts):
    characters: int = Field(description="The length of its text.")


class ChunkPage(BaseModel):
    """Chunks in the order of the document. `next`: ask again with it as `after`; null on the last page."""

    chunks: list[ShownChunk]
    next: int | None
