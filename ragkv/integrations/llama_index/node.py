"""Convert chunks to LlamaIndex's nodes and back, with the scores of every stage.

A node's metadata holds the raw `retrieval_score` and `rerank_score`, the raw score of each search in `stages`, and
`fused_score`, the relevance r in [0, 1) that engines decode with (PCED Eqs. 4-7), which is also `NodeWithScore.score`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llama_index.core.schema import BaseNode, MetadataMode, NodeRelationship, NodeWithScore, RelatedNodeInfo, TextNode

from ragkv.errors import UsageError
from ragkv.integrations.llama_index.bundle import own_part
from ragkv.retrievers import ScoreKind, fuse, normalise_rerank, normalise_retrieval
from ragkv.types import Chunk, Document, ScoredChunk

if TYPE_CHECKING:
    from ragkv.pipeline import RagKV

__all__ = ["FUSED", "RERANK", "RETRIEVAL", "SCORES", "fused", "node_text", "to_nodes", "to_scored", "with_scores"]

RETRIEVAL, RERANK, FUSED, STAGES = "retrieval_score", "rerank_score", "fused_score", "stages"
SCORES = (RETRIEVAL, RERANK, FUSED, STAGES, "tokens_won")
"""The metadata keys that belong to one search or answer, and not to the chunk."""
_UNSCORED = 0.5
"""The relevance of a node without a score."""


def to_nodes(rag: RagKV, scored: Sequence[ScoredChunk]) -> list[NodeWithScore]:
    """A node for each chunk, with the chunk's id and the metadata that `RagKVIngest` has stored for it."""
    ids = {s.chunk.document_id for s in scored}
    documents = {i: stored.document for i in ids if (stored := rag.store.document(i)) is not None}
    return [_to_node(s, documents.get(s.chunk.document_id)) for s in scored]


def _to_node(scored: ScoredChunk, document: Document | None) -> NodeWithScore:
    chunk = scored.chunk
    metadata, relationships = own_part(document, chunk.chunk_id)
    ours: dict[str, Any] = {"document": scored.source, "page": chunk.page, "heading": chunk.heading}
    ours = {key: value for key, value in ours.items() if value is not None and key not in metadata}
    scores = {
        RETRIEVAL: scored.retrieval_score,
        RERANK: scored.rerank_score,
        FUSED: scored.score,
        STAGES: dict(scored.stages),
    }
    relationships.setdefault(NodeRelationship.SOURCE, RelatedNodeInfo(node_id=chunk.document_id))
    node = TextNode(
        id_=chunk.chunk_id,
        text=chunk.text,
        start_char_idx=chunk.start,
        end_char_idx=chunk.end,
        metadata=metadata | ours | scores,
        relationships=relationships,
        excluded_llm_metadata_keys=[*scores],  # another language model that gets this node should not read scores
        excluded_embed_metadata_keys=[*ours, *scores],
    )
    return NodeWithScore(node=node, score=scored.score)


def to_scored(
    rag: RagKV, nodes: Iterable[NodeWithScore], kind: ScoreKind, *, limit: int | None = None
) -> list[tuple[NodeWithScore, ScoredChunk]]:
    """The chunks of nodes from any retriever, in their order, each once and at most `limit`; blank ones are left out.

    A node with the id and text of a chunk is that chunk. Any other node is tokenised now, which loads the model. Each
    chunk comes with a copy of its node that has all scores. `kind` is the scale of scores that are not ragkv's. Raises
    UsageError for a score that is not a finite number.
    """
    given: dict[str, NodeWithScore] = {}
    for node in nodes:
        if node_text(node.node).strip():
            given.setdefault(node.node_id, node)
    ordered = list(given.values())[:limit]
    known = rag.store.chunk_many(node.node_id for node in ordered)
    return [_to_scored(rag, node, known.get(node.node_id), kind) for node in ordered]


def _to_scored(
    rag: RagKV, node: NodeWithScore, chunk: Chunk | None, kind: ScoreKind
) -> tuple[NodeWithScore, ScoredChunk]:
    text = node_text(node.node)
    if chunk is None or chunk.text != text:
        chunk = rag.chunk(text, chunk_id=node.node_id, document_id=node.node.ref_doc_id or node.node_id)
    metadata = node.metadata
    raw, rerank = metadata.get(RETRIEVAL, node.score), metadata.get(RERANK)
    scored = ScoredChunk(
        chunk=chunk,
        source=str(metadata.get("document") or metadata.get("file_name") or chunk.document_id),
        retrieval_score=0.0 if raw is None else _number(node, raw),
        rerank_score=None if rerank is None else _number(node, rerank),
        score=fused(node, kind),
        stages=metadata.get(STAGES, {}),
    )
    return with_scores(node, {RETRIEVAL: raw, RERANK: rerank, FUSED: scored.score}, node.score), scored


def with_scores(node: NodeWithScore, scores: Mapping[str, float | None], score: float | None) -> NodeWithScore:
    """A copy with these scores in its metadata, hidden from language models and embedders."""
    own = node.node
    hidden = {
        name: [*kept, *(key for key in scores if key not in kept)]
        for name in ("excluded_llm_metadata_keys", "excluded_embed_metadata_keys")
        if (kept := getattr(own, name)) is not None
    }
    copied = own.model_copy(update={"metadata": {**own.metadata, **scores}, **hidden})
    return NodeWithScore(node=copied, score=score)


def fused(node: NodeWithScore, kind: ScoreKind) -> float:
    """The relevance r of a node: its fused score if it has one, else computed from its score on the scale `kind`."""
    known = node.metadata.get(FUSED)
    if isinstance(known, float) and 0.0 <= known < 1.0:
        return known
    score = node.metadata.get(RETRIEVAL, node.score)
    retrieval = _UNSCORED if score is None else normalise_retrieval(_number(node, score), kind)
    rerank = node.metadata.get(RERANK)
    return fuse(retrieval, None if rerank is None else normalise_rerank(_number(node, rerank)))


def node_text(node: BaseNode) -> str:
    """The text that the model reads: without metadata, so that equal texts have equal KV."""
    text: str = node.get_content(metadata_mode=MetadataMode.NONE)
    return text


def _number(node: NodeWithScore, score: Any) -> float:
    if not isinstance(score, (int, float)) or not math.isfinite(score):
        raise UsageError(f"Node {node.node_id!r} has the score {score!r}; a retriever must give finite numbers.")
    return float(score)
