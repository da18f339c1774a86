"""`/v1/embeddings` and `/v1/rerank`: the index's embedder and reranker for whoever asks."""

from __future__ import annotations

import base64
import math
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from ragkv.server.failure import Refusal
from ragkv.server.served import Chosen
from ragkv.server.words import require_unicode

__all__ = ["EmbeddingReply", "EmbeddingRequest", "RerankReply", "RerankRequest", "embedded", "reranked"]

MOST_TEXTS = 2048


class EmbeddingRequest(BaseModel):
    """OpenAI's request; `input_type` "query" embeds as a question is (bge and E5 tell the two apart)."""

    model_config = ConfigDict(extra="forbid")
    model: str
    input: str | list[str]
    encoding_format: Literal["float", "base64"] = "float"
    input_type: Literal["query", "document"] = "document"
    user: str | None = None


class Passage(BaseModel):
    model_config = ConfigDict(extra="ignore")
    text: str


class RerankRequest(BaseModel):
    """The request of Jina's and Cohere's rerankers."""

    model_config = ConfigDict(extra="forbid")
    model: str
    query: str
    documents: list[str | Passage] = Field(min_length=1, max_length=MOST_TEXTS)
    top_n: int | None = Field(default=None, ge=1)
    return_documents: bool = True


class Used(BaseModel):
    """Tokens as the index's language model counts them."""

    prompt_tokens: int
    total_tokens: int


class Vector(BaseModel):
    object: str
    index: int
    embedding: list[float] | str = Field(description="Numbers, or base64 of float32 in little-endian order.")


class EmbeddingReply(BaseModel):
    """Vectors of unit length, in the order of the texts."""

    object: str
    model: str
    data: list[Vector]
    usage: Used


class Ranked(BaseModel):
    index: int
    relevance_score: float
    document: Passage | None = Field(default=None, description="Only with `return_documents`.")


class RerankReply(BaseModel):
    """The best documents first; `index` is a document's place in the request."""

    model: str
    results: list[Ranked]
    usage: Used


def embedded(asked: EmbeddingRequest, chosen: Chosen) -> dict[str, Any]:
    """The dense vectors of the texts, unit length, in order."""
    texts = [asked.input] if isinstance(asked.input, str) else asked.input
    if not 0 < len(texts) <= MOST_TEXTS:
        raise Refusal(400, f"`input` holds {len(texts)} texts; send 1 to {MOST_TEXTS}.", param="input")
    require_unicode(texts)
    embedder = chosen.rag.embedder
    if embedder is None or "dense" not in embedder.modes:
        raise Refusal(400, f"Index {chosen.name!r} has no embedder of dense vectors.", param="model")
    if asked.input_type == "query":
        rows = [embedder.embed_query(text).dense for text in texts]
    else:
        rows = [embedder.embed_documents(texts).dense]
    vectors = np.concatenate([row for row in rows if row is not None]).astype("<f4")
    return {
        "object": "list",
        "model": asked.model,
        "data": [
            {"object": "embedding", "index": index, "embedding": _encoded(vector, asked.encoding_format)}
            for index, vector in enumerate(vectors)
        ],
        "usage": _usage(chosen, texts),
    }


def reranked(asked: RerankRequest, chosen: Chosen) -> dict[str, Any]:
    """The documents by their relevance to the query, best first: the sigmoid of the reranker's logit."""
    reranker = chosen.rag.reranker
    if reranker is None:
        raise Refusal(400, f"Index {chosen.name!r} has no reranker.", param="model")
    texts = [each if isinstance(each, str) else each.text for each in asked.documents]
    require_unicode([asked.query, *texts])
    scores = [1 / (1 + math.exp(-max(min(logit, 60.0), -60.0))) for logit in reranker.score(asked.query, texts)]
    order = sorted(range(len(texts)), key=lambda index: (-scores[index], index))[: asked.top_n]
    results = [
        {"index": i, "relevance_score": scores[i]}
        | ({"document": {"text": texts[i]}} if asked.return_documents else {})
        for i in order
    ]
    return {"model": asked.model, "results": results, "usage": _usage(chosen, [asked.query, *texts])}


def _encoded(vector: np.ndarray[Any, np.dtype[np.float32]], encoding: str) -> Any:
    return base64.b64encode(vector.tobytes()).decode() if encoding == "base64" else vector.tolist()


def _usage(chosen: Chosen, texts: list[str]) -> dict[str, int]:
    """Tokens as the index's language model counts them."""
    tokens = sum(len(chosen.rag.model.tokens.encode(text)) for text in texts)
    return {"prompt_tokens": tokens, "total_tokens": tokens}
