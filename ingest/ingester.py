"""From files to visible documents: read, chunk, encode once, commit.

Work is skipped as early as it can be: an unchanged file is hashed and no more, and equal chunks are encoded once.
A kill loses at most the batch in hand; long documents commit their KV ahead, so the next run goes on from there.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from ragkv.attention.kv import ChunkKV
from ragkv.config import IndexConfig
from ragkv.ingest.chunker import split_text
from ragkv.ingest.isolated import SourceReader
from ragkv.ingest.limit import Limits, Unreadable, check_text, limited
from ragkv.ingest.limit import limits as limits_in_force
from ragkv.ingest.preview import gone, is_current, nothing_read
from ragkv.ingest.reader import SourceText, UnreadableSource
from ragkv.ingest.ready import ReadyDocument
from ragkv.ingest.report import IngestProgress, IngestReport
from ragkv.ingest.source import Skipped, SourceFile, find_sources
from ragkv.ingest.span import chunk_id
from ragkv.model.prompt import Prompt, Tokens
from ragkv.retrievers import Embedder
from ragkv.store import ChunkVectors, KVIdentity, Store
from ragkv.types import Chunk, Document, Encoding

__all__ = ["Encoder", "Ingester", "Recipe", "chunk_vectors"]

BATCH_TOKENS = 2048  # encoded together, and how often progress is told
WAITING_CHARACTERS = 4 << 20  # of documents that wait for their batch; blank ones are long and have few tokens
HOLD_BYTES = 256 << 20  # KV kept in memory until its document is complete; more is committed ahead


class Encoder(Protocol):
    """What the ingester needs of a model; loaded only when there is something to encode."""

    tokens: Tokens

    def encode(self, chunks: Sequence[Sequence[int]], *, prefix: ChunkKV | None = None) -> list[ChunkKV]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How documents become chunks and KV; a document made by another recipe is made again."""

    model: str
    prompt: Prompt
    chunk_tokens: int
    codec: str
    encodings: tuple[Encoding, ...]
    embedder: str | None = None
    """Its fingerprint; None for an index without vectors."""
    vectors: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        config: IndexConfig,
        *,
        model: str,
        prompt: Prompt,
        encodings: Sequence[Encoding],
        embedder: str | None = None,
    ) -> Recipe:
        return cls(
            model=model,
            prompt=prompt,
            chunk_tokens=config.chunk_tokens,
            codec=config.codec,
            encodings=tuple(sorted(encodings)),
            embedder=embedder,
            vectors=() if embedder is None else tuple(sorted(config.vectors)),
        )

    def digest(self) -> str:
        """Hex digest that the store keeps beside each document."""
        facts: dict[str, object] = {
            "model": self.model,
            "prefix": self.prompt.before_contexts if Encoding.PREFIXED in self.encodings else "",
            "separator": self.prompt.separator,
            "chunk_tokens": self.chunk_tokens,
            "codec": self.codec,
            "encodings": [encoding.value for encoding in self.encodings],
        }
        if self.prompt.bos != "auto" and Encoding.PREFIXED in self.encodings:
            facts["bos"] = self.prompt.bos
        if self.embedder is not None:  # without one, the digest is that of the time before there were embedders
            facts |= {"embedder": self.embedder, "vectors": self.vectors}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


@dataclass(slots=True)
class _Prepared:
    """A changed document, chunked, waiting for its batch."""

    document: Document
    text: str
    chunks: list[Chunk]
    size: int
    known: bool
    references: dict[str, list[KVIdentity]] = field(default_factory=dict)


class Ingester:
    """One ingest into one store. `model` is called at the first chunk, so that a no-op ingest loads nothing."""

    def __init__(
        self,
        store: Store,
        recipe: Recipe,
        model: Callable[[], Encoder],
        *,
        embedder: Callable[[], Embedder] | None = None,
        before_writing: Callable[[], object] | None = None,
        on_progress: Callable[[IngestProgress], None] | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._store = store
        self._recipe = recipe
        self._digest = recipe.digest()
        self._load = model
        self._embedder = embedder
        self._before_writing = before_writing
        self._notify = on_progress or (lambda _: None)
        self._limits = limits or limits_in_force()
        self._prefix_ids: tuple[int, ...] = ()
        self._prefix: ChunkKV | None = None

    def run(self, paths: Sequence[Path | SourceFile], *, prune: bool = False) -> IngestReport:
        """Ingest files and folders. Raises UsageError for a missing path, IngestError when nothing was readable."""
        report = IngestReport()
        sources, skipped = find_sources(paths)
        report.skipped += skipped
        progress = IngestProgress(sources=len(sources), total_bytes=sum(s.size for s in sources))
        waiting: list[_Prepared] = []
        try:
            with SourceReader(self._limits) as reader:
                self._walk(sources, reader, waiting, report, progress)
            if not (report.added or report.updated or report.unchanged):
                raise nothing_read(report.skipped)
            if prune:
                for document_id in gone(self._store, paths, sources, report.skipped):
                    self._store.delete_document(document_id)
                    report.pruned.append(document_id)
        except KeyboardInterrupt:
            progress.sources -= len({source.path for source in sources} & {skip.path for skip in report.skipped})
            progress.indexed = self._indexed(sources, waiting)
            self._notify(progress)
            raise
        report.seconds = progress.seconds
        self._notify(progress)
        return report

    def _walk(
        self,
        sources: Sequence[SourceFile],
        reader: SourceReader,
        waiting: list[_Prepared],
        report: IngestReport,
        progress: IngestProgress,
    ) -> None:
        """Source by source; `waiting` is empty at the end, and at an interrupt what was not committed."""
        for source in sources:
            progress.current = source.name
            self._notify(progress)
            prepared = self._prepare(source, reader, report)
            if prepared is None:
                progress.done_bytes += source.size
                progress.done_sources += 1
                continue
            waiting.append(prepared)
            tokens = sum(len(c.token_ids) for p in waiting for c in p.chunks)
            if tokens >= BATCH_TOKENS or sum(len(p.text) for p in waiting) >= WAITING_CHARACTERS:
                self._commit(waiting, report, progress)
                waiting.clear()
        self._commit(waiting, report, progress)
        waiting.clear()

    def _indexed(self, sources: Sequence[SourceFile], waiting: Sequence[_Prepared]) -> int:
        """How many sources the index holds: what this run left, and what an earlier one did of those still to come.

        Of the latter it is not known whether they have changed since, only that they were made by this recipe.
        """
        pending = {prepared.document.document_id: prepared.document.content_hash for prepared in waiting}
        found = 0
        for source in sources:
            stored = self._store.document(source.document_id)
            if stored is not None and stored.recipe == self._digest:
                found += pending.get(source.document_id, stored.document.content_hash) == stored.document.content_hash
        return found

    def run_chunks(self, documents: Sequence[ReadyDocument]) -> IngestReport:
        """Ingest documents that were cut elsewhere, each in place of its earlier version; one that did not change is
        left alone. Raises what the store raises when a chunk's id belongs to another document."""
        report = IngestReport()
        progress = IngestProgress(sources=len(documents), total_bytes=sum(len(d.text) for d in documents))
        waiting: list[_Prepared] = []
        for ready in documents:
            document = ready.document
            progress.current = document.source
            self._notify(progress)
            if self._store.is_current(document.document_id, document.content_hash, self._digest):
                report.unchanged.append(document.document_id)
                progress.done_bytes += len(ready.text)
                progress.done_sources += 1
                continue
            tokens, prompt = self._load().tokens, self._recipe.prompt
            chunks = ready.cut([prompt.chunk_ids(tokens, chunk.text) for chunk in ready.chunks])
            known = self._store.document(document.document_id) is not None
            waiting.append(_Prepared(document, ready.text, chunks, len(ready.text), known))
            if sum(len(c.token_ids) for p in waiting for c in p.chunks) >= BATCH_TOKENS:
                self._commit(waiting, report, progress)
                waiting = []
        self._commit(waiting, report, progress)
        report.seconds = progress.seconds
        self._notify(progress)
        return report

    def _prepare(self, source: SourceFile, reader: SourceReader, report: IngestReport) -> _Prepared | None:
        """Read and chunk a source that changed; None (and noted in the report) otherwise."""
        try:
            reader.check(source)
            if is_current(self._store, source, self._digest):
                report.unchanged.append(source.document_id)
                return None
            text = reader.read(source)
            document = Document(
                document_id=source.document_id,
                source=source.name,
                content_hash=text.content_hash,  # of the bytes that were read: the file may have changed since
                media_type=source.media_type,
                title=text.title,
            )
            chunks = self._chunks(document, text)
        except UnreadableSource as error:
            report.skipped.append(Skipped(path=source.path, reason=error.reason))
            return None
        except OSError as error:
            report.skipped.append(Skipped(path=source.path, reason=(error.strerror or str(error)).lower()))
            return None
        report.left_out += [Skipped(path=source.path, reason=part) for part in text.left_out]
        known = self._store.document(source.document_id) is not None
        return _Prepared(document, text.text, chunks, source.size, known)

    def _chunks(self, document: Document, text: SourceText) -> list[Chunk]:
        """Raises UnreadableSource when they have more tokens together than a document may have characters."""
        chunks, size = [], 0
        try:
            with limited(self._limits):
                for chunk in self._cut(document, text):
                    chunks.append(chunk)
                    size += len(chunk.token_ids)
                    check_text(size)
        except Unreadable as error:
            raise UnreadableSource(document.source, str(error)) from None
        return chunks

    def _cut(self, document: Document, text: SourceText) -> Iterator[Chunk]:
        tokens = self._load().tokens
        prompt, limit = self._recipe.prompt, self._recipe.chunk_tokens
        pieces = split_text(text, count_tokens=lambda t: len(prompt.chunk_ids(tokens, t)), max_tokens=limit)
        for ordinal, piece in enumerate(pieces):
            yield Chunk(
                chunk_id=chunk_id(document, ordinal, piece.start, piece.end),
                document_id=document.document_id,
                ordinal=ordinal,
                text=piece.text,
                token_ids=prompt.chunk_ids(tokens, piece.text),
                start=piece.start,
                end=piece.end,
                page=piece.page,
                heading=piece.heading,
            )

    def _commit(self, waiting: list[_Prepared], report: IngestReport, progress: IngestProgress) -> None:
        """Encode what the store lacks for these documents, then make each visible in one transaction."""
        if not waiting:
            return
        needed: dict[KVIdentity, None] = {}
        for prepared in waiting:
            for chunk in prepared.chunks:
                identities = [self._identity(encoding, chunk) for encoding in self._recipe.encodings]
                prepared.references[chunk.chunk_id] = identities
                needed.update(dict.fromkeys(identities))
        missing = [identity for identity in needed if not self._store.has_kv(identity)]
        report.kv_reused += len(needed) - len(missing)
        records: dict[KVIdentity, ChunkKV] = {}
        slices = list(_slices(missing))
        share = sum(p.size for p in waiting) / max(1, len(slices))
        for piece in slices:
            started = time.perf_counter()
            encoded = self._encode(piece)
            report.encode_seconds += time.perf_counter() - started
            records |= encoded
            report.kv_encoded += len(encoded)
            report.tokens += sum(len(identity.chunk_ids) for identity in piece)
            report.kv_bytes += sum(kv.nbytes for kv in encoded.values())
            if sum(kv.nbytes for kv in records.values()) > HOLD_BYTES:  # invisible until referenced
                self._store.stage_kv(records.items())
                records = {}
            progress.tokens, progress.kv_bytes = report.tokens, report.kv_bytes
            progress.encode_seconds = report.encode_seconds
            progress.done_bytes += share
            self._notify(progress)
        if not slices:
            progress.done_bytes += share
        vectors = self._embed([chunk for prepared in waiting for chunk in prepared.chunks], report)
        if self._before_writing is not None:
            self._before_writing()
            self._before_writing = None
        for prepared in waiting:
            own = {i for identities in prepared.references.values() for i in identities}
            self._store.write_document(
                prepared.document,
                prepared.text,
                prepared.chunks,
                recipe=self._digest,
                records=[(identity, kv) for identity, kv in records.items() if identity in own],
                references=prepared.references,
                vectors={c.chunk_id: vectors[c.chunk_id] for c in prepared.chunks if c.chunk_id in vectors},
            )
            (report.updated if prepared.known else report.added).append(prepared.document.document_id)
            report.chunks += len(prepared.chunks)
            progress.done_sources += 1
            self._notify(progress)

    def _identity(self, encoding: Encoding, chunk: Chunk) -> KVIdentity:
        if encoding is Encoding.PREFIXED and not self._prefix_ids:
            self._prefix_ids = self._recipe.prompt.prefix_ids(self._load().tokens)
        return KVIdentity(
            model=self._recipe.model,
            encoding=encoding,
            prefix_ids=self._prefix_ids if encoding is Encoding.PREFIXED else (),
            chunk_ids=chunk.token_ids,
        )

    def _encode(self, identities: Sequence[KVIdentity]) -> dict[KVIdentity, ChunkKV]:
        model = self._load()
        encoded: dict[KVIdentity, ChunkKV] = {}
        for encoding in self._recipe.encodings:
            group = [identity for identity in identities if identity.encoding is encoding]
            if not group:
                continue
            prefix = None
            if encoding is Encoding.PREFIXED and self._prefix_ids:
                if self._prefix is None:
                    [self._prefix] = model.encode([self._prefix_ids])
                prefix = self._prefix
            kvs = model.encode([identity.chunk_ids for identity in group], prefix=prefix)
            encoded.update(zip(group, kvs, strict=True))
        return encoded

    def _embed(self, chunks: Sequence[Chunk], report: IngestReport) -> dict[str, ChunkVectors]:
        """The chunks' vectors by chunk id; none without an embedder."""
        if self._embedder is None or not chunks:
            return {}
        embedder = self._embedder()  # loading it is not part of embedding
        started = time.perf_counter()
        made = chunk_vectors(embedder, chunks, self._recipe.vectors)
        report.embed_seconds += time.perf_counter() - started
        return made


def chunk_vectors(embedder: Embedder, chunks: Sequence[Chunk], kinds: Collection[str]) -> dict[str, ChunkVectors]:
    """What the embedder says of each chunk's text, by chunk id, as the store keeps it: ColBERT rows in float16."""
    said = embedder.embed_documents([chunk.text for chunk in chunks])
    said = replace(said, **dict.fromkeys({"dense", "sparse", "colbert"} - set(kinds)))
    return {
        chunk.chunk_id: ChunkVectors(
            dense=None if said.dense is None else said.dense[row],
            sparse=None if said.sparse is None else said.sparse[row],
            colbert=None if said.colbert is None else said.colbert[row].astype("float16"),
        )
        for row, chunk in enumerate(chunks)
    }


def _slices(identities: Sequence[KVIdentity]) -> Iterator[list[KVIdentity]]:
    """Runs of identities with about `BATCH_TOKENS` tokens each."""
    piece: list[KVIdentity] = []
    tokens = 0
    for identity in identities:
        if piece and tokens + len(identity.chunk_ids) > BATCH_TOKENS:
            yield piece
            piece, tokens = [], 0
        piece.append(identity)
        tokens += len(identity.chunk_ids)
    if piece:
        yield piece
