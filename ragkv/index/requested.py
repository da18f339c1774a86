"""What an engine starts from when it answers from an index: its prompt, and the KV of chunks or of whole documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ragkv.index.index import Index
from ragkv.index.recall import After, Ahead, Recall
from ragkv.index.wholedocument import whole_documents
from ragkv.types import KVUse, ScoredChunk

if TYPE_CHECKING:
    from ragkv.engines import Engine, Request

__all__ = ["index_request"]


def index_request(
    index: Index,
    recall: Recall,
    engine: Engine,
    question: str,
    scored: Sequence[ScoredChunk],
    ahead: Ahead | None = None,
    *,
    keep: bool = False,
    after: After | None = None,
) -> tuple[Request, KVUse]:
    """The request, and how much of it came from the store; the arguments are those of `Recall.chunks`."""
    from ragkv.engines import ContextChunk, Request

    index.require_known_tokens(scored)
    if engine.whole_documents:
        given, use = whole_documents(index, recall, engine, scored, after)
    else:
        kvs, use = recall.chunks(engine.encoding, scored, ahead, keep=keep, after=after)
        given = [
            ContextChunk(token_ids=s.chunk.token_ids, score=s.score, kv=kv) for s, kv in zip(scored, kvs, strict=True)
        ]
    request = Request(
        prefix_ids=index.prefix_ids,
        prefix=None if engine.encoding is None else recall.prefix(after),
        chunks=tuple(given),
        suffix_ids=index.prompt.suffix_ids(index.model.tokens, question),
        question=question,
        prompt=index.prompt,
    )
    return request, use
