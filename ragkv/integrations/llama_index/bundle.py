"""The nodes of one source as a document of the store, with the metadata for which the store has no column.

The store has columns for text, offsets, page and heading. All other metadata of each node and its relationships are
kept as JSON in the document's metadata. Metadata that all nodes share is written once, where `where` conditions see it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llama_index.core.schema import BaseNode, MetadataMode, NodeRelationship, RelatedNodeInfo, RelatedNodeType

from ragkv.ingest import ReadyChunk, ReadyDocument
from ragkv.types import Chunk, Document

__all__ = ["bundle", "metadata_of", "own_part"]

KEY = "llama_index"
GAP = "\n\n"


def bundle(document_id: str, nodes: Sequence[BaseNode]) -> ReadyDocument:
    """All nodes of one source, in order, as a document whose chunks have the nodes' ids.

    LlamaIndex passes nodes on without the text of their document, so the text is put together from the nodes, at their
    offsets, with line ends in the gaps. A node without an offset comes after those that have one. If offsets
    contradict each other, none is kept.
    """
    texts = [node.get_content(metadata_mode=MetadataMode.NONE) for node in nodes]
    text, starts = _lay_out(nodes, texts)
    chunks = [
        ReadyChunk(
            chunk_id=node.node_id,
            text=piece,
            start=start,
            page=_page(node.metadata),
            heading=_heading(node.metadata),
        )
        for node, piece, start in zip(nodes, texts, starts, strict=True)
    ]
    shared, kept = _pack(nodes)
    facts = [[c.chunk_id, c.text, c.start, c.page, c.heading] for c in chunks]
    document = Document(
        document_id=document_id,
        source=_source(document_id, nodes[0].metadata),
        content_hash=hashlib.blake2b(json.dumps([facts, kept]).encode()).hexdigest(),
        media_type=str(nodes[0].metadata.get("file_type") or "text/plain"),
        metadata={**{key: str(value) for key, value in shared.items()}, KEY: kept},
    )
    return ReadyDocument(document=document, text=text, chunks=chunks)


def own_part(document: Document | None, chunk_id: str) -> tuple[dict[str, Any], dict[Any, RelatedNodeType]]:
    """The metadata and relationships that a node had when it was stored; empty for chunks that ragkv has cut."""
    if document is None or KEY not in document.metadata:
        return {}, {}
    kept = _kept(document)
    related = {
        NodeRelationship[name]: [RelatedNodeInfo(**each) for each in info]
        if isinstance(info, list)
        else RelatedNodeInfo(**info)
        for name, info in kept["relationships"].get(chunk_id, {}).items()
    }
    return {**kept["shared"], **kept["own"].get(chunk_id, {})}, related


def metadata_of(document: Document) -> Callable[[Chunk], dict[str, Any]]:
    """A function from a chunk of the document to its metadata, by the keys that filters use, in its original types.

    A node's own metadata takes precedence over the store's columns, as it does in the nodes that a retriever returns.
    """
    kept = _kept(document)
    common: dict[str, Any] = {
        **{key: value for key, value in document.metadata.items() if key != KEY},
        **dict.fromkeys(("document_id", "doc_id", "ref_doc_id"), document.document_id),
        **dict.fromkeys(("document", "source"), document.source),
        "title": document.title,
        "media_type": document.media_type,
    }

    def of(chunk: Chunk) -> dict[str, Any]:
        columns = {"page": chunk.page, "heading": chunk.heading, "node_id": chunk.chunk_id}
        return {**common, **columns, **kept["shared"], **kept["own"].get(chunk.chunk_id, {})}

    return of


def _kept(document: Document) -> dict[str, dict[str, Any]]:
    kept: dict[str, dict[str, Any]] = json.loads(document.metadata.get(KEY, "{}"))
    return {"shared": {}, "own": {}, "relationships": {}} | kept


def _pack(nodes: Sequence[BaseNode]) -> tuple[dict[str, Any], str]:
    """The metadata that all nodes share, and everything as JSON; values that JSON cannot hold become text."""
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
    """The text, and where each piece starts in it."""
    told = [getattr(node, "start_char_idx", None) for node in nodes]
    known = [(at, text) for at, text in zip(told, texts, strict=True) if isinstance(at, int) and at >= 0]
    length = max((at + len(text) for at, text in known), default=0)
    whole = ""
    if length <= 2 * sum(len(text) for _, text in known) + 1000:  # else most of the text would be gaps
        letters = ["\n"] * length
        for at, text in known:
            letters[at : at + len(text)] = text
        whole = "".join(letters)
    if not all(whole.startswith(text, at) for at, text in known):
        whole, known = "", []
    starts = []
    for place, text in zip(told, texts, strict=True):
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
    return int(label) if label.isascii() and label.isdigit() else None


def _heading(metadata: Mapping[str, Any]) -> str | None:
    if metadata.get("heading"):
        return str(metadata["heading"])
    path = [part for part in str(metadata.get("header_path") or "").split("/") if part]  # MarkdownNodeParser's
    return " > ".join(path) or None
