"""Ingest LlamaIndex's nodes, convert them from and to documents and chunks of the store, translate metadata filters.

The store has columns for text, offsets, page and heading. Other metadata of a node and its relationships are stored as
JSON in the document's metadata; what all nodes share is written once, where `where` conditions see it. A node that is
returned has the raw `retrieval_score` and `rerank_score`, the raw score of each search in `stages`, and `fused_score`,
the relevance r in [0, 1) that engines decode with (PCED Eqs. 4-7), which is also `NodeWithScore.score`.

A filter operator is evaluated by LlamaIndex itself. Where that raises TypeError for a chunk (a text compared with a
number), the chunk does not match. Arguments that ragkv does not support are refused.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.schema import (
    BaseNode,
    MetadataMode,
    NodeRelationship,
    NodeWithScore,
    RelatedNodeInfo,
    RelatedNodeType,
    TextNode,
    TransformComponent,
)
from llama_index.core.vector_stores.types import FilterCondition, FilterOperator, MetadataFilter, MetadataFilters
from llama_index.core.vector_stores.utils import build_metadata_filter_fn

from ragkv.errors import UsageError
from ragkv.ingest import IngestReport, ReadyChunk, ReadyDocument
from ragkv.pipeline import RagKV
from ragkv.retrievers import ScoreKind, fuse, normalise_rerank, normalise_retrieval
from ragkv.types import Chunk, Document, ScoredChunk

KEY = "llama_index"
GAP = "\n\n"


def bundle(document_id: str, nodes: Sequence[BaseNode]) -> ReadyDocument:
    """All nodes of one source, in order, as a document whose chunks have the nodes' ids.

    LlamaIndex passes nodes without their document's text, so the text is assembled from the nodes at their offsets,
    with line ends in gaps. Nodes without an offset come last. If offsets contradict each other, all are ignored.
    """
    texts = [node.get_content(metadata_mode=MetadataMode.NONE) for node in nodes]
    text, starts = _lay_out(nodes, texts)
    chunks = [
        ReadyChunk(
            chunk_id=node.node_id,
            text=body,
            start=start,
            page=_page(node.metadata),
            heading=_heading(node.metadata),
        )
        for node, body, start in zip(nodes, texts, starts, strict=True)
    ]
    shared, packed = _pack(nodes)
    facts = [[c.chunk_id, c.text, c.start, c.page, c.heading] for c in chunks]
    document = Document(
        document_id=document_id,
        source=_source(document_id, nodes[0].metadata),
        content_hash=hashlib.blake2b(json.dumps([facts, packed]).encode()).hexdigest(),
        media_type=str(nodes[0].metadata.get("file_type") or "text/plain"),
        metadata={**{key: str(value) for key, value in shared.items()}, KEY: packed},
    )
    return ReadyDocument(document=document, text=text, chunks=chunks)


def own_part(document: Document | None, chunk_id: str) -> tuple[dict[str, Any], dict[Any, RelatedNodeType]]:
    """The stored metadata and relationships of a node; empty for chunks that ragkv cut."""
    if document is None or KEY not in document.metadata:
        return {}, {}
    stored = _kept(document)
    related = {
        NodeRelationship[name]: [RelatedNodeInfo(**each) for each in info]
        if isinstance(info, list)
        else RelatedNodeInfo(**info)
        for name, info in stored["relationships"].get(chunk_id, {}).items()
    }
    return {**stored["shared"], **stored["own"].get(chunk_id, {})}, related


def metadata_of(document: Document) -> Callable[[Chunk], dict[str, Any]]:
    """A function from a chunk of the document to its metadata for filters, in the original types.

    A node's own metadata takes precedence over the store's columns, as in retrieved nodes.
    """
    stored = _kept(document)
    common: dict[str, Any] = {
        **{key: value for key, value in document.metadata.items() if key != KEY},
        **dict.fromkeys(("document_id", "doc_id", "ref_doc_id"), document.document_id),
        **dict.fromkeys(("document", "source"), document.source),
        "title": document.title,
        "media_type": document.media_type,
    }

    def of(chunk: Chunk) -> dict[str, Any]:
        columns = {"page": chunk.page, "heading": chunk.heading, "node_id": chunk.chunk_id}
        return {**common, **columns, **stored["shared"], **stored["own"].get(chunk.chunk_id, {})}

    return of


def _kept(document: Document) -> dict[str, dict[str, Any]]:
    kept: dict[str, dict[str, Any]] = json.loads(document.metadata.get(KEY, "{}"))
    return {"shared": {}, "own": {}, "relationships": {}} | kept


def _pack(nodes: Sequence[BaseNode]) -> tuple[dict[str, Any], str]:
    """The metadata common to all nodes, and everything as JSON; values that JSON cannot hold become text."""
    plain = [json.loads(json.dumps(node.metadata, default=str)) for node in nodes]
    shared = {key: value for key, value in plain[0].items() if all(key in m and m[key] == value for m in plain)}
    own = {
        node.node_id: rest
        for node, metadata in zip(nodes, plain, strict=True)
        if (rest := {key: value for key, value in metadata.items() if key not in shared})
    }
    relationships = {node.node_id: _related(node) for node in nodes if node.relationships}
    return shared, json.dumps({"shared": shared, "own": own, "relationships": relationships}, sort_keys=True)


def _related(node: BaseNode) -> dict[str, Any]:
    def brief(info: RelatedNodeInfo) -> dict[str, str]:
        return {"node_id": info.node_id} | ({"hash": info.hash} if info.hash else {})

    return {
        NodeRelationship(name).name: [brief(i) for i in info] if isinstance(info, list) else brief(info)
        for name, info in node.relationships.items()
    }


def _lay_out(nodes: Sequence[BaseNode], texts: Sequence[str]) -> tuple[str, list[int]]:
    """The text, and where each node starts in it."""
    offsets = [getattr(node, "start_char_idx", None) for node in nodes]
    known = [
        (offset, text) for offset, text in zip(offsets, texts, strict=True) if isinstance(offset, int) and offset >= 0
    ]
    length = max((offset + len(text) for offset, text in known), default=0)
    whole = ""
    if length <= 2 * sum(len(text) for _, text in known) + 1000:  # otherwise most of the text would be gaps
        letters = ["\n"] * length
        for offset, text in known:
            letters[offset : offset + len(text)] = text
        whole = "".join(letters)
    if not all(whole.startswith(text, offset) for offset, text in known):
        whole, known = "", []
    starts = []
    for place, text in zip(offsets, texts, strict=True):
        if known and isinstance(place, int) and place >= 0:
            starts.append(place)
            continue
        whole += GAP if whole else ""
        starts.append(len(whole))
        whole += text
    return whole, starts


def _source(document_id: str, metadata: Mapping[str, Any]) -> str:
    """The name of the document in a citation."""
    named = (metadata.get(key) for key in ("document", "file_name", "source", "url", "title"))
    return next((str(name) for name in named if name), document_id)


def _page(metadata: Mapping[str, Any]) -> int | None:
    label = str(metadata.get("page", metadata.get("page_label", "")))
    return int(label) if label.isascii() and label.isdigit() and len(label) < 10 else None


def _heading(metadata: Mapping[str, Any]) -> str | None:
    if metadata.get("heading"):
        return str(metadata["heading"])
    path = [part for part in str(metadata.get("header_path") or "").split("/") if part]  # MarkdownNodeParser's
    return " > ".join(path) or None


RETRIEVAL, RERANK, FUSED, STAGES = "retrieval_score", "rerank_score", "fused_score", "stages"
OF_ANSWER = ("tokens_won", "snippet", "highlights")
"""The metadata keys that an answer adds: those of `ragkv.types.Source`."""
SCORES = (RETRIEVAL, RERANK, FUSED, STAGES, *OF_ANSWER)
"""The metadata keys that belong to one search or answer, not to the chunk."""
_UNSCORED = 0.5
"""The relevance of a node without a score."""


def to_nodes(rag: RagKV, scored: Sequence[ScoredChunk]) -> list[NodeWithScore]:
    """A node for each chunk, with the chunk's id and the metadata stored by `RagKVIngest`."""
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
        excluded_llm_metadata_keys=[*SCORES],  # other language models should not read the scores
        excluded_embed_metadata_keys=[*ours, *SCORES],
    )
    return NodeWithScore(node=node, score=scored.score)


def to_scored(
    rag: RagKV, nodes: Iterable[NodeWithScore], kind: ScoreKind, *, limit: int | None = None
) -> list[tuple[NodeWithScore, ScoredChunk]]:
    """The chunks of nodes from any retriever, in order, without duplicates and blank ones, at most `limit`.

    A node with the id and text of a chunk is that chunk. Any other node is tokenised, which loads the model. Each chunk
    comes with a copy of its node that has all scores. `kind` is the scale of scores that are not ragkv's. UsageError
    for a score that is not finite.
    """
    by_id: dict[str, NodeWithScore] = {}
    for node in nodes:
        if node_text(node.node).strip():
            by_id.setdefault(node.node_id, node)
    ordered = list(by_id.values())[:limit]
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
    """A copy with these scores in the metadata, hidden from language models and embedders."""
    own = node.node
    hidden = {
        name: [*kept, *(key for key in scores if key not in kept)]
        for name in ("excluded_llm_metadata_keys", "excluded_embed_metadata_keys")
        if (kept := getattr(own, name)) is not None
    }
    copied = own.model_copy(update={"metadata": {**own.metadata, **scores}, **hidden})
    return NodeWithScore(node=copied, score=score)


def fused(node: NodeWithScore, kind: ScoreKind) -> float:
    """The relevance r of a node: its fused score, else computed from its score on the scale `kind`."""
    known = node.metadata.get(FUSED)
    if isinstance(known, float) and 0.0 <= known < 1.0:
        return known
    score = node.metadata.get(RETRIEVAL, node.score)
    retrieval = _UNSCORED if score is None else normalise_retrieval(_number(node, score), kind)
    rerank = node.metadata.get(RERANK)
    return fuse(retrieval, None if rerank is None else normalise_rerank(_number(node, rerank)))


def node_text(node: BaseNode) -> str:
    """The text that the model reads, without metadata, so that equal texts have equal KV."""
    text: str = node.get_content(metadata_mode=MetadataMode.NONE)
    return text


def _number(node: NodeWithScore, score: Any) -> float:
    if not isinstance(score, (int, float)) or not math.isfinite(score):
        raise UsageError(f"Node {node.node_id!r} has the score {score!r}; a retriever must give finite numbers.")
    return float(score)


_PROMPT = "the index's own model answers with the index's own prompt ([prompt] in its ragkv.toml)"
_SEARCH = 'the search is set by search={"retrieval": "hybrid", "rerank": True, "candidates": 32}'
_INSTEAD: Mapping[str, str] = {
    **dict.fromkeys(("llm", "response_synthesizer", "response_mode", "output_cls", "multimodal"), _PROMPT),
    **dict.fromkeys(("text_qa_template", "refine_template", "summary_template", "simple_template"), _PROMPT),
    **dict.fromkeys(("vector_store_query_mode", "alpha", "sparse_top_k", "hybrid_top_k"), _SEARCH),
    **dict.fromkeys(("embed_model", "vector_store_kwargs", "mmr_threshold"), _SEARCH),
    "doc_ids": 'filter by the key "doc_id" with the operator "in"',
    "node_ids": 'filter by the key "node_id" with the operator "in"',
    "use_async": "call aquery",
}


def refuse_unknown(owner: type[Any], options: Mapping[str, Any], more: Sequence[str] = ()) -> None:
    """UsageError for the first of `options` that is neither a parameter of `owner`'s constructor nor one of `more`."""
    for name in options:
        if name in more:
            continue
        if name in _INSTEAD:
            raise UsageError(f"{owner.__name__} does not take {name}: {_INSTEAD[name]}.")
        known = [
            each.name
            for each in inspect.signature(owner).parameters.values()
            if each.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        raise UsageError(f"{owner.__name__} does not take {name!r}; it takes {', '.join([*known, *more])}.")


def chunk_count(top_k: int | None, similarity_top_k: int | None) -> int | None:
    """The value under either name, or None. UsageError for both names, or for anything but a whole number above 0."""
    if top_k is not None and similarity_top_k is not None:
        raise UsageError("top_k and similarity_top_k are two names of one setting; give one of them.")
    name, count = ("top_k", top_k) if similarity_top_k is None else ("similarity_top_k", similarity_top_k)
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
        raise UsageError(f"{name} must be a whole number from 1 up, not {count!r}.")
    return count


_Condition = Callable[[Mapping[str, Any]], bool]


_LISTS = (FilterOperator.IN, FilterOperator.NIN, FilterOperator.ANY, FilterOperator.ALL)
_TEXTS = (FilterOperator.TEXT_MATCH, FilterOperator.TEXT_MATCH_INSENSITIVE)


def chunk_filter(filters: MetadataFilters) -> Callable[[Document, Chunk], bool]:
    """The argument `only` of a search; caches the last document's metadata. UsageError as in `metadata_filter`."""
    holds = metadata_filter(filters)
    last: Document | None = None
    facts: Callable[[Chunk], dict[str, Any]] = lambda _: {}  # noqa: E731 - replaced at the first document

    def only(document: Document, chunk: Chunk) -> bool:
        nonlocal last, facts
        if document is not last:
            last, facts = document, metadata_of(document)
        return holds(facts(chunk))

    return only


def metadata_filter(filters: MetadataFilters) -> _Condition:
    """A predicate on metadata. UsageError for an invalid filter or a value that its operator does not support.

    An empty group matches everything; NOT matches if none of its filters does.
    """
    if not isinstance(filters, MetadataFilters):
        raise UsageError(
            f"filters takes LlamaIndex's MetadataFilters, not {type(filters).__name__}; "
            "write filters=MetadataFilters(filters=[MetadataFilter(key=…, value=…)])."
        )
    parts = [_single(part) if isinstance(part, MetadataFilter) else metadata_filter(part) for part in filters.filters]
    if not parts:
        return lambda _: True
    if filters.condition is FilterCondition.OR:
        return lambda metadata: any(part(metadata) for part in parts)
    if filters.condition is FilterCondition.NOT:
        return lambda metadata: not any(part(metadata) for part in parts)
    if filters.condition not in (FilterCondition.AND, None):
        raise UsageError(f"ragkv knows no filter condition {filters.condition!r}; use and, or, not.")
    return lambda metadata: all(part(metadata) for part in parts)


def _single(part: MetadataFilter) -> _Condition:
    if part.key in SCORES:
        raise UsageError(
            f"A filter cannot ask for {part.key!r}, which a chunk only has once it was found; "
            "drop nodes by their score with a SimilarityPostprocessor."
        )
    if (wanted := _wanted(part.operator, part.value)) is not None:
        raise UsageError(
            f"The filter operator {part.operator.value!r} takes {wanted}, not {part.value!r} (key {part.key!r})."
        )

    # it passes what it is given to the lookup: a node's id in LlamaIndex, the metadata themselves here
    holds: Callable[[Any], bool] = build_metadata_filter_fn(
        cast("Any", lambda found: found), MetadataFilters(filters=[part])
    )

    def condition(metadata: Mapping[str, Any]) -> bool:
        try:
            return holds(metadata)
        except TypeError:
            return False

    return condition


def _wanted(asked: FilterOperator, value: Any) -> str | None:
    """The type of value that the operator needs, if this is none; else None."""
    if asked is FilterOperator.IS_EMPTY:
        return None
    if asked in _LISTS:
        return None if isinstance(value, list) else "a list"
    if asked in _TEXTS:
        return None if isinstance(value, str) else "a text"
    if asked in (FilterOperator.EQ, FilterOperator.NE):
        return 'a value (a key that is not there is operator "is_empty")' if value is None else None
    return None if isinstance(value, (int, float, str)) else "a number or a text"


class RagKVIngest(TransformComponent):
    """Stores text, chunk and KV of every node under the node's own id, and returns the nodes unchanged.

    All nodes of one source (`ref_doc_id`, or the node's own id) form one document and replace its earlier version, so
    pass them in one call. A document whose nodes did not change is skipped; of one that changed, only new text is
    encoded. Blank nodes are not stored. `report` is the result of the last call.

    Pass a `RagKV`, or the folder of an index, which is opened when it is first needed. With
    `IngestionPipeline.run(num_workers=...)`, each worker process opens the index and loads the model.
    """

    index: str = Field(description="The index's folder.")
    device: str | None = Field(default=None, description="Where the model runs.")
    _rag: RagKV | None = PrivateAttr(default=None)
    _report: IngestReport | None = PrivateAttr(default=None)

    def __init__(
        self, rag: RagKV | None = None, *, index: str | Path | None = None, device: str | None = None, **unknown: Any
    ) -> None:
        refuse_unknown(type(self), unknown)
        if (rag is None) == (index is None):
            raise UsageError("RagKVIngest takes either a RagKV or the folder of an index.")
        options: dict[str, Any] = {"index": str(index if rag is None else rag.folder), "device": device}
        super().__init__(**options)
        self._rag = rag

    @classmethod
    def class_name(cls) -> str:
        return "RagKVIngest"

    @property
    def rag(self) -> RagKV:
        if self._rag is None:
            self._rag = RagKV.open(self.index, device=self.device)
        return self._rag

    @property
    def report(self) -> IngestReport:
        """The `ragkv.ingest.IngestReport` of the last call. Raises ValueError before the first call.

        `added`, `updated` and `unchanged` are lists of document ids; `kv_encoded` and `kv_reused` count chunk KVs.
        """
        if self._report is None:
            raise ValueError("nothing has been ingested yet")
        return self._report

    def __call__(self, nodes: Sequence[BaseNode], **_: Any) -> Sequence[BaseNode]:
        groups: dict[str, list[BaseNode]] = {}
        for node in nodes:
            if node_text(node).strip():
                groups.setdefault(node.ref_doc_id or node.node_id, []).append(node)
        self._report = self.rag.add_chunks([bundle(document_id, group) for document_id, group in groups.items()])
        return nodes

    async def acall(self, nodes: Sequence[BaseNode], **options: Any) -> Sequence[BaseNode]:
        return await asyncio.to_thread(self.__call__, nodes, **options)

    def delete(self, ref_doc_id: str) -> bool:
        """Delete the nodes of a source with their KV; False if there are none."""
        return bool(self.rag.delete(ref_doc_id))

    def to_dict(self, **options: Any) -> dict[str, Any]:
        """Add the store's generation, so that a pipeline's cache does not skip what was deleted from the index."""
        state: dict[str, Any] = super().to_dict(**options)
        return state | {"generation": self.rag.store.generation}

    @classmethod
    def from_dict(cls, data: dict[str, Any], **options: Any) -> RagKVIngest:
        kept = {key: value for key, value in data.items() if key in ("index", "device")}
        return cls(**kept, **options)

    def __getstate__(self) -> dict[str, Any]:
        return {"index": str(Path(self.index).absolute()), "device": self.device}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(index=state["index"], device=state["device"])  # type: ignore[misc]
