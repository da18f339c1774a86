"""Vectors of texts by an index's embedder (OpenAI's `/v1/embeddings`), and documents by their relevance by its
reranker (Jina's and Cohere's `/v1/rerank`)."""

from __future__ import annotations

import base64
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from ragkv.server.errors import ApiError, pack_json
from ragkv.server.schemas import FailFastList, ModelChoice
from ragkv.server.streaming import require_unicode
from ragkv.util import batches

T = TypeVar("T")

MAX_TEXTS = 2048
BATCH_TEXTS, BATCH_CHARS = 32, 1 << 13
"""The size of a batch; between batches, cancelled requests end and other requests take their turn."""
Aside: TypeAlias = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs a function in the thread for embeddings."""


class EmbeddingRequest(BaseModel):
    """OpenAI's request, with texts, not token ids; `dimensions` may only be the vectors' own length.

    `input_type` "query" embeds the texts as questions, which bge and E5 embed differently.
    """

    model_config = ConfigDict(extra="forbid")
    model: str
    input: (
        str
        | FailFastList[str]
        | FailFastList[int]
        | Annotated[FailFastList[FailFastList[int]], Field(max_length=MAX_TEXTS)]
    )
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    input_type: Literal["query", "document"] = "document"
    user: str | None = None


class RerankDocument(BaseModel):
    model_config = ConfigDict(extra="ignore")
    text: str


class RerankRequest(BaseModel):
    """The request of Jina's and Cohere's rerankers."""

    model_config = ConfigDict(extra="forbid")
    model: str
    query: str
    documents: FailFastList[str | RerankDocument] = Field(min_length=1, max_length=MAX_TEXTS)
    top_n: int | None = Field(default=None, ge=1)
    max_tokens_per_doc: int | None = Field(default=None, ge=1)
    """Cohere's parameter: score only this many tokens of each document, counted by the index's language model."""
    return_documents: bool | None = None


class EmbeddingUsage(BaseModel):
    """Tokens as the index's language model counts them."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingObject(BaseModel):
    object: str
    index: int
    embedding: list[float] | str = Field(description="Numbers, or base64 of float32 in little-endian order.")


class EmbeddingReply(BaseModel):
    """Vectors of unit length, in the order of the texts."""

    object: str
    model: str
    data: list[EmbeddingObject]
    usage: EmbeddingUsage


class RankedDocument(BaseModel):
    index: int
    relevance_score: float
    document: RerankDocument | None = Field(default=None, description="Not if `return_documents` is false.")


class RerankReply(BaseModel):
    """The best documents first; `index` is a document's place in the request."""

    model: str
    results: list[RankedDocument]
    usage: EmbeddingUsage


async def embedded(asked: EmbeddingRequest, chosen: ModelChoice, aside: Aside) -> bytes:
    """The dense vectors of the texts, unit length, in order: an `EmbeddingReply` as JSON."""
    texts = _texts(asked.input)
    if not 0 < len(texts) <= MAX_TEXTS:
        raise ApiError(400, f"`input` holds {len(texts)} texts; send 1 to {MAX_TEXTS}.", param="input")
    require_unicode(texts)

    def work(batch: list[str]) -> tuple[list[bytes], int]:
        embedder = chosen.rag.index.encoders.embedder
        if embedder is None or "dense" not in embedder.modes:
            raise ApiError(400, f"Index {chosen.name!r} has no embedder of dense vectors.", param="model")
        if asked.input_type == "query":
            rows = [embedder.embed_query(text).dense for text in batch]
        else:
            rows = [embedder.embed_documents(batch).dense]
        vectors = np.concatenate([row for row in rows if row is not None]).astype("<f4")
        if asked.dimensions not in (None, vectors.shape[1]):
            message = f"The vectors have {vectors.shape[1]} dimensions and cannot be shortened; leave `dimensions` out."
            raise ApiError(400, message, param="dimensions", code="unsupported_parameter")
        # encoding many vectors as JSON takes seconds and blocks other threads, so each is encoded with its batch
        if asked.encoding_format == "base64":
            packed = [b'"%s"' % base64.b64encode(vector.tobytes()) for vector in vectors]
        else:
            packed = [pack_json(vector.tolist()) for vector in vectors]
        return packed, _tokens(chosen, batch)

    vectors, tokens = await _in_batches(texts, work, aside)
    rows = (b'{"object":"embedding","index":%d,"embedding":%s}' % row for row in enumerate(vectors))
    usage = pack_json({"model": asked.model, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}})
    return b'{"object":"list","data":[%s],%s' % (b",".join(rows), usage[1:])


async def reranked(asked: RerankRequest, chosen: ModelChoice, aside: Aside) -> bytes:
    """The documents, best first, with the sigmoid of the reranker's logit as relevance: a `RerankReply` as JSON."""
    texts = [each if isinstance(each, str) else each.text for each in asked.documents]
    require_unicode([asked.query, *texts])

    def work(batch: list[str]) -> tuple[list[float], int]:
        reranker = chosen.rag.index.encoders.reranker
        if reranker is None:
            raise ApiError(400, f"Index {chosen.name!r} has no reranker.", param="model")
        tokens, most = chosen.rag.model.tokens, asked.max_tokens_per_doc
        if most is not None:
            batch = [text if len(ids := tokens.encode(text)) <= most else tokens.decode(ids[:most]) for text in batch]
        return list(reranker.score(asked.query, batch)), _tokens(chosen, batch)

    logits, tokens = await _in_batches(texts, work, aside)
    tokens += await aside(lambda: _tokens(chosen, [asked.query]))
    scores = [1 / (1 + math.exp(-max(min(logit, 60.0), -60.0))) for logit in logits]
    order = sorted(range(len(texts)), key=lambda index: (-scores[index], index))[: asked.top_n]
    shown = asked.return_documents is not False
    results = [
        {"index": i, "relevance_score": scores[i]} | ({"document": {"text": texts[i]}} if shown else {}) for i in order
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return pack_json({"model": asked.model, "results": results, "usage": usage})


async def _in_batches(
    texts: Sequence[str], work: Callable[[list[str]], tuple[list[T], int]], aside: Aside
) -> tuple[list[T], int]:
    """The results of `work` for each text, in order, and the sum of its counts."""
    results, total = dict[int, T](), 0
    # texts of similar length together, because a model pads them
    order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
    for batch in batches(order, lambda i: len(texts[i]), BATCH_CHARS, count=BATCH_TEXTS):
        values, count = await aside(lambda batch=batch: work([texts[i] for i in batch]))  # type: ignore[misc]
        total += count
        results.update(zip(batch, values, strict=True))
    return [results[i] for i in range(len(texts))], total


def _texts(given: str | list[str] | list[int] | list[list[int]]) -> list[str]:
    """The texts; ApiError for an empty text, and for token ids, because they belong to another tokenizer."""
    texts = [given] if isinstance(given, str) else [each for each in given if isinstance(each, str)]
    if len(texts) != len(given) and not isinstance(given, str):
        message = (
            "Token ids are those of another tokenizer: send texts (in LangChain, check_embedding_ctx_length=False)."
        )
        raise ApiError(400, message, param="input", code="unsupported_parameter")
    if "" in texts:
        raise ApiError(400, "`input` holds an empty text, which means nothing; leave it out.", param="input")
    return texts


def _tokens(chosen: ModelChoice, texts: list[str]) -> int:
    """Tokens as the index's language model counts them."""
    return sum(len(chosen.rag.model.tokens.encode(text)) for text in texts)
