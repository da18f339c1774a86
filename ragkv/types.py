"""The nouns that all parts share: documents, chunks, scores, answers. Standard library only.

Arrays and tensors never occur here; key/value tensors are in `ragkv.attention.kv`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

__all__ = [
    "Answer",
    "Chunk",
    "Document",
    "Encoding",
    "KVUse",
    "ScoredChunk",
    "Source",
    "Timing",
]


class Encoding(StrEnum):
    """What a chunk saw while it was prefilled (docs/glossary.md)."""

    STANDALONE = "standalone"
    """Nothing: its first token stands at position 0."""

    PREFIXED = "prefixed"
    """The prompt's prefix of P tokens: its first token stands at position P."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One source, already read to text.

    `document_id` is stable across ingests (a path or the caller's id); `content_hash` is the hex digest of the
    source's bytes and decides whether a re-ingest has work to do.
    """

    document_id: str
    source: str
    content_hash: str
    media_type: str = "text/plain"
    title: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A piece of a document.

    `token_ids` are the generation model's ids of the chunk as it stands in the prompt (its text, then the
    separator that the prompt puts after every chunk). `start`/`end` are character offsets into the document's text.
    """

    chunk_id: str
    document_id: str
    ordinal: int
    text: str
    token_ids: tuple[int, ...]
    start: int
    end: int
    page: int | None = None
    heading: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredChunk:
    """A retrieved chunk with every stage's score kept: PCED decodes with them (PCED §3, Eq. 2).

    `retrieval_score` and `rerank_score` are raw; `score` is the fused relevance r in [0, 1) (PCED Eqs. 4-7).
    `stages` are the raw scores of every stage that saw the chunk: dense, sparse, colbert, bm25, rrf.
    """

    chunk: Chunk
    source: str
    retrieval_score: float
    rerank_score: float | None
    score: float
    stages: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One chunk that an answer was given from; `tokens_won` is PCED's count of tokens that this expert chose.

    `heading` is the path of headings above it, or the row of a table that it is.
    """

    document: str
    chunk_id: str
    text: str
    page: int | None
    score: float
    retrieval_score: float
    rerank_score: float | None
    stages: Mapping[str, float] = field(default_factory=dict)
    tokens_won: int | None = None
    heading: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Milliseconds of each stage; `first_token` runs from the end of `load` to the first token, `total` is all."""

    retrieve: float
    rerank: float
    load: float
    first_token: float
    total: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KVUse:
    """How much of the answer's context came from stored KV; `bytes` and `tokens` count the hits'.

    `memory_hits` are those of the hits that an earlier query had loaded already, so that nothing was read.
    """

    hits: int
    misses: int
    bytes: int
    tokens: int
    memory_hits: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A finished answer (docs/design.md)."""

    question: str
    text: str
    engine: str
    finish_reason: str
    sources: tuple[Source, ...]
    timing: Timing
    kv: KVUse
    decoding: Mapping[str, Any] = field(default_factory=dict)
    """`max_new_tokens` and every setting of `Decoding` as it was in force, a drawn seed included."""

    def to_json(self) -> dict[str, Any]:
        """The object that `ragkv query --json` prints."""
        return {
            "question": self.question,
            "answer": self.text,
            "engine": self.engine,
            "finish_reason": self.finish_reason,
            "sources": [
                {
                    "document": s.document,
                    "chunk_id": s.chunk_id,
                    "text": s.text,
                    "page": s.page,
                    "heading": s.heading,
                    "score": s.score,
                    "retrieval_score": s.retrieval_score,
                    "rerank_score": s.rerank_score,
                    "stages": dict(s.stages),
                    "tokens_won": s.tokens_won,
                }
                for s in self.sources
            ],
            "timing_ms": {
                "retrieve": self.timing.retrieve,
                "rerank": self.timing.rerank,
                "load": self.timing.load,
                "first_token": self.timing.first_token,
                "total": self.timing.total,
            },
            "kv": {
                "hits": self.kv.hits,
                "misses": self.kv.misses,
                "bytes": self.kv.bytes,
                "tokens": self.kv.tokens,
                "memory_hits": self.kv.memory_hits,
            },
            "decoding": dict(self.decoding),
        }
