"""From files to visible documents: read, chunk, encode once, commit.

Work is skipped as early as possible: an unchanged file is only hashed, and equal chunks are encoded once. A process
that is killed loses at most the current batch. The KV of a long document is committed before the document itself, so
the next run continues with what is there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

from ragkv.errors import StoreError
from ragkv.ingest.block import Blocks, make_blocks, plan_blocks
from ragkv.ingest.chunker import split_text
from ragkv.ingest.isolated import SourceReader
from ragkv.ingest.limit import Limits, Unreadable, check_text, limited
from ragkv.ingest.limit import limits as limits_in_force
from ragkv.ingest.preview import changed_text, gone, nothing_read, skip_unreadable
from ragkv.ingest.pulse import Pulse
from ragkv.ingest.reader import SourceText, UnreadableSource
from ragkv.ingest.ready import ReadyDocument
from ragkv.ingest.recipe import Recipe
from ragkv.ingest.report import IngestProgress, IngestReport
from ragkv.ingest.source import Skipped, SourceFile, find_sources
from ragkv.ingest.span import chunk_id
from ragkv.model.prompt import Tokens
from ragkv.retrievers import Embedder
from ragkv.store import ChunkVectors, DocumentChange, KVIdentity, Store
from ragkv.store.pages.resident import mapped_bytes
from ragkv.types import Chunk, Document, Encoding

if TYPE_CHECKING:
    from ragkv.attention.kv import ChunkKV
    from ragkv.engines.apb import APBConfig
    from ragkv.model.apb import Compressor
    from ragkv.model.language import LanguageModel

__all__ = ["Encoder", "Ingester", "batches_of", "chunk_vectors", "encode_identities"]

T = TypeVar("T")

BATCH_TOKENS = 2048  # encoded together; progress is reported after each batch
WAITING_CHARACTERS = 4 << 20  # of documents that wait for their batch; a blank document is long but has few tokens
MEMORY = 1 << 30  # that an ingest holds beside its models: a quarter for KV, half for pages of the store
TOGETHER_BYTES = 16 << 20  # of small documents are committed in one transaction
HOLD_BYTES = 256 << 20  # KV that is held in memory until its document is complete; more is committed ahead


class Encoder(Protocol):
    """What the ingester needs of a model. It is loaded only when there is something to encode."""

    tokens: Tokens

    def encode(self, chunks: Sequence[Sequence[int]], *, prefix: ChunkKV | None = None) -> list[ChunkKV]: ...


@dataclass(slots=True)
class _Prepared:
    """A new or changed document, cut into chunks. `size` is its share of the progress, `known` that it has a row."""

    document: Document
    text: str
    chunks: list[Chunk]
    size: int
    known: bool
    references: dict[str, list[KVIdentity]] = field(default_factory=dict)
    blocks: Blocks | None = None


@dataclass(slots=True)
class _Run:
    """One call of `run` or `run_chunks`: its report, its progress, and the documents that wait for their batch."""

    progress: IngestProgress
    report: IngestReport = field(default_factory=IngestReport)
    waiting: list[_Prepared] = field(default_factory=list)

    @property
    def batch_is_full(self) -> bool:
        tokens = sum(len(chunk.token_ids) for prepared in self.waiting for chunk in prepared.chunks)
        return tokens >= BATCH_TOKENS or sum(len(prepared.text) for prepared in self.waiting) >= WAITING_CHARACTERS


class Ingester:
    """One ingest into one store. `model` is called for the first chunk, so an ingest without changes loads nothing."""

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
        memory: int = MEMORY,
        afford: Callable[[Sequence[int]], int] = len,
        blocks: APBConfig | None = None,
    ) -> None:
        """`afford` is given the tokens of chunks without KV, and says of how many, from the first on, it may be made
        now; the first question that reads a chunk makes the rest. `blocks`: long documents are stored in blocks too."""
        self._afford = afford
        self._blocks = blocks
        self._store = store
        self._recipe = recipe
        self._digest = recipe.digest()
        self._load = model
        self._embedder = embedder
        self._before_writing = before_writing
        self._notify = on_progress or (lambda _: None)
        self._pulse = Pulse(lambda: None)
        self._limits = limits or limits_in_force()
        self._memory = memory
        self._mapped = 0
        self._prefix_ids: tuple[int, ...] = ()
        self._prefix: ChunkKV | None = None

    def run(self, paths: Sequence[Path | SourceFile], *, prune: bool = False) -> IngestReport:
        """Ingest files and folders. Raises UsageError for a missing path, IngestError when nothing was readable."""
        sources, skipped = find_sources(paths)
        run = _Run(IngestProgress(sources=len(sources), total_bytes=sum(s.size for s in sources)))
        report, progress = run.report, run.progress
        report.skipped += skipped
        go_on = partial(self._notify, progress)
        self._pulse = Pulse(go_on)
        try:
            with SourceReader(self._limits, waiting=go_on) as reader:
                for source in sources:
                    self._add(run, source.name, source.size, partial(self._from_source, source, reader, report))
            self._commit(run)
            if not (report.added or report.updated or report.unchanged):
                raise nothing_read(report.skipped)
            if prune:
                for document_id in gone(self._store, paths, sources, report.skipped):
                    self._store.delete_document(document_id)
                    report.pruned.append(document_id)
        except KeyboardInterrupt:
            progress.sources -= len({source.path for source in sources} & {skip.path for skip in report.skipped})
            progress.indexed = self._indexed(sources, run.waiting)
            self._notify(progress)
            raise
        return self._finish(run)

    def run_chunks(self, documents: Sequence[ReadyDocument]) -> IngestReport:
        """Ingest documents that the caller has cut. Each replaces its earlier version; unchanged ones are left alone.

        Raises what the store raises when a chunk's id belongs to another document.
        """
        run = _Run(IngestProgress(sources=len(documents), total_bytes=sum(len(d.text) for d in documents)))
        self._pulse = Pulse(partial(self._notify, run.progress))
        for ready in documents:
            size = len(ready.text)
            self._add(run, ready.document.source, size, partial(self._from_ready, ready, run.report))
        self._commit(run)
        return self._finish(run)

    def _finish(self, run: _Run) -> IngestReport:
        report = run.report
        report.seconds = run.progress.seconds
        run.progress.indexed = len(report.added) + len(report.updated) + len(report.unchanged)
        self._notify(run.progress)
        return report

    def _add(self, run: _Run, name: str, size: int, prepare: Callable[[], _Prepared | None]) -> None:
        """Prepare one document, and commit the batch when it is full. None from `prepare`: there is nothing to do."""
        run.progress.current = name
        self._notify(run.progress)
        prepared = prepare()
        if prepared is None:
            run.progress.done_bytes += size
            run.progress.done_sources += 1
            return
        run.waiting.append(prepared)
        if run.batch_is_full:
            self._commit(run)

    def _indexed(self, sources: Sequence[SourceFile], waiting: Sequence[_Prepared]) -> int:
        """How many of the sources the index holds after an interrupt, by this run or an earlier one.

        A source that this run has not reached counts if it was ingested with this recipe; it may have changed since.
        """
        pending = {prepared.document.document_id: prepared.document.content_hash for prepared in waiting}
        found = 0
        for source in sources:
            stored = self._store.document(source.document_id)
            if stored is not None and stored.recipe == self._digest:
                found += pending.get(source.document_id, stored.document.content_hash) == stored.document.content_hash
        return found

    def _from_ready(self, ready: ReadyDocument, report: IngestReport) -> _Prepared | None:
        """Tokenise a document that the caller has cut; None if it is unchanged."""
        document = ready.document
        if self._store.is_current(document.document_id, document.content_hash, self._digest):
            report.unchanged.append(document.document_id)
            return None
        chunks = ready.cut([self._ids(chunk.text) for chunk in ready.chunks])
        return self._prepared(document, ready.text, chunks, len(ready.text))

    def _from_source(self, source: SourceFile, reader: SourceReader, report: IngestReport) -> _Prepared | None:
        """Read and cut a file; None if it is unchanged or unreadable, which the report then says."""
        found: _Prepared | None = None
        with skip_unreadable(source, report):
            text = changed_text(source, reader, self._store, self._digest, report)
            if text is not None:
                document = Document(
                    document_id=source.document_id,
                    source=source.name,
                    content_hash=text.content_hash,  # of the bytes that were read: the file may have changed since
                    media_type=source.media_type,
                    title=text.title,
                )
                found = self._prepared(document, text.text, self._chunks(document, text), source.size)
                report.left_out += [Skipped(path=source.path, reason=part) for part in text.left_out]
        return found

    def _prepared(self, document: Document, text: str, chunks: list[Chunk], size: int) -> _Prepared:
        known = self._store.document(document.document_id) is not None
        return _Prepared(document, text, chunks, size, known)

    def _chunks(self, document: Document, text: SourceText) -> list[Chunk]:
        """Cut a text. Raises UnreadableSource if it has more tokens than a document may have characters."""
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
        pieces = split_text(text, count_tokens=lambda t: len(self._ids(t)), max_tokens=self._recipe.chunk_tokens)
        for ordinal, piece in enumerate(pieces):
            yield Chunk(
                chunk_id=chunk_id(document, ordinal, piece.start, piece.end),
                document_id=document.document_id,
                ordinal=ordinal,
                text=piece.text,
                token_ids=self._ids(piece.text),
                start=piece.start,
                end=piece.end,
                page=piece.page,
                heading=piece.heading,
            )

    def _ids(self, text: str) -> tuple[int, ...]:
        """A chunk's tokens."""
        self._pulse(len(text))
        return self._recipe.prompt.chunk_ids(self._load().tokens, text)

    def _commit(self, run: _Run) -> None:
        """Encode what the store lacks of the waiting documents, then make them visible, small ones together."""
        if not run.waiting:
            return
        report = run.report
        needed: dict[KVIdentity, None] = {}
        for prepared in run.waiting:
            for chunk in prepared.chunks:
                identities = [self._identity(encoding, chunk) for encoding in self._recipe.encodings]
                prepared.references[chunk.chunk_id] = identities
                needed.update(dict.fromkeys(identities))
            if self._blocks is not None and any(chunk.token_ids for chunk in prepared.chunks):
                needed.update(dict.fromkeys(self._in_blocks(prepared, self._blocks, report)))
        stored = self._store.has_many(needed)
        report.kv_reused += len(stored)
        missing = self._affordable([identity for identity in needed if identity not in stored], report)
        stored.update(missing)
        for prepared in run.waiting:
            prepared.references = {
                chunk_id: [identity for identity in identities if identity in stored]
                for chunk_id, identities in prepared.references.items()
            }
        records = self._encode_missing(missing, run)
        vectors = self._embed([chunk for prepared in run.waiting for chunk in prepared.chunks], report)
        if self._before_writing is not None:
            self._before_writing()
            self._before_writing = None
        together: list[tuple[_Prepared, DocumentChange]] = []
        size = 0
        for prepared in run.waiting:
            own = dict.fromkeys(i for identities in prepared.references.values() for i in identities)
            change = self._store.change(
                prepared.document,
                prepared.text,
                prepared.chunks,
                recipe=self._digest,
                records=[(identity, records[identity]) for identity in own if identity in records],
                references=prepared.references,
                vectors={c.chunk_id: vectors[c.chunk_id] for c in prepared.chunks if c.chunk_id in vectors},
                lenient=True,
            )
            if size + change.size > TOGETHER_BYTES:
                self._write(together, run)
                together, size = [], 0
            together.append((prepared, change))
            size += change.size
        self._write(together, run)
        run.waiting.clear()
        self._give_back()

    def _give_back(self) -> None:
        """Keep the pages of the store that this process has touched within half of its memory."""
        mapped = mapped_bytes()
        self._mapped = self._mapped or mapped  # the models' weights may be mapped too
        if mapped - self._mapped > self._memory // 2:
            self._store.give_back_pages()

    def _write(self, changes: Sequence[tuple[_Prepared, DocumentChange]], run: _Run) -> None:
        """Make documents visible in one transaction, because each transaction waits for the disk.

        If that fails (a full disk, a chunk of another document), those before the one that fails are written alone.
        """
        try:
            self._store.write_changes([change for _, change in changes])
        except StoreError:
            if len(changes) == 1:
                raise
            for one in changes:
                self._write([one], run)
            return
        for prepared, _ in changes:
            (run.report.updated if prepared.known else run.report.added).append(prepared.document.document_id)
            run.report.chunks += len(prepared.chunks)
            run.progress.done_sources += 1
            self._notify(run.progress)

    def _affordable(self, missing: list[KVIdentity], report: IngestReport) -> list[KVIdentity]:
        """Those of the identities, from the first on, whose KV there is room for."""
        found = missing[: self._afford([len(identity.chunk_ids) for identity in missing])]
        report.kv_later += len(missing) - len(found)
        return found

    def _encode_missing(self, missing: Sequence[KVIdentity], run: _Run) -> dict[KVIdentity, ChunkKV]:
        """The KV of these identities, less what was committed ahead because memory should not hold all of it."""
        report, progress = run.report, run.progress
        records: dict[KVIdentity, ChunkKV] = {}
        slices = list(batches_of([identity for identity in missing if identity.encoding is not Encoding.LONG]))
        slices += [[identity] for identity in missing if identity.encoding is Encoding.LONG]
        making = self._made_blocks(missing, run)
        share = sum(prepared.size for prepared in run.waiting) / max(1, len(slices))
        for piece in slices:
            started = time.perf_counter()
            if piece[0].encoding is Encoding.LONG:
                encoded = dict([next(making)])
            else:
                encoded = encode_identities(self._load(), piece, self._prefix_kv)
            report.encode_seconds += time.perf_counter() - started
            records |= encoded
            report.kv_encoded += len(encoded)
            report.tokens += sum(len(identity.chunk_ids) for identity in piece)
            report.kv_bytes += sum(kv.nbytes for kv in encoded.values())
            if sum(kv.nbytes for kv in records.values()) > min(HOLD_BYTES, self._memory // 4):
                self._store.stage_kv(records.items())  # invisible until a document refers to it
                records = {}
            progress.tokens, progress.kv_bytes = report.tokens, report.kv_bytes
            progress.encode_seconds = report.encode_seconds
            progress.done_bytes += share
            self._notify(progress)
        if not slices:
            progress.done_bytes += share
        return records

    def _identity(self, encoding: Encoding, chunk: Chunk) -> KVIdentity:
        return KVIdentity(
            model=self._recipe.model,
            encoding=encoding,
            prefix_ids=self._prompt_prefix() if encoding is Encoding.PREFIXED else (),
            chunk_ids=chunk.token_ids,
        )

    def _in_blocks(self, prepared: _Prepared, config: APBConfig, report: IngestReport) -> list[KVIdentity]:
        """What is stored of a document in blocks, which its chunks then need."""
        chunks = [chunk for chunk in prepared.chunks if chunk.token_ids]
        model, prefix_ids = self._recipe.model, self._prompt_prefix()
        prepared.blocks = plan_blocks(chunks, config, self._compressor(), model=model, prefix_ids=prefix_ids)
        if prepared.blocks.short:
            report.one_block.append(prepared.document.document_id)
        for identity, owner in prepared.blocks.all.items():
            if identity not in prepared.references[owner]:
                prepared.references[owner].append(identity)
        return list(prepared.blocks.all)

    def _made_blocks(self, missing: Sequence[KVIdentity], run: _Run) -> Iterator[tuple[KVIdentity, ChunkKV]]:
        """The KV of the blocks among these, in their order; each document's that is there is read from the store."""
        wanted = {identity for identity in missing if identity.encoding is Encoding.LONG}
        for prepared in run.waiting:
            mine = [] if prepared.blocks is None else [each for each in prepared.blocks.all if each in wanted]
            wanted.difference_update(mine)
            if prepared.blocks is not None and mine:
                model = cast("LanguageModel", self._load())
                yield from make_blocks(
                    prepared.blocks,
                    mine,
                    model,
                    self._compressor(),
                    self._prefix_kv(),
                    lambda identity: self._store.get_many([identity], device=model.place).get(identity),  # noqa: B023
                )

    def _compressor(self) -> Compressor:
        """What chooses the tokens that blocks pass on."""
        from ragkv.model.apb.choice import compressor_for

        assert self._blocks is not None
        return compressor_for(self._blocks.compressor, cast("LanguageModel", self._load()))

    def _prompt_prefix(self) -> tuple[int, ...]:
        self._prefix_ids = self._prefix_ids or self._recipe.prompt.prefix_ids(self._load().tokens)
        return self._prefix_ids

    def _prefix_kv(self) -> ChunkKV | None:
        if self._prefix is None and self._prefix_ids:
            [self._prefix] = self._load().encode([self._prefix_ids])
        return self._prefix

    def _embed(self, chunks: Sequence[Chunk], report: IngestReport) -> dict[str, ChunkVectors]:
        """The chunks' vectors by chunk id; none without an embedder."""
        if self._embedder is None or not chunks:
            return {}
        embedder = self._embedder()  # before the clock starts: loading is not part of `embed_seconds`
        started = time.perf_counter()
        made: dict[str, ChunkVectors] = {}
        for some in _batched(chunks, lambda chunk: len(chunk.token_ids)):
            if made:
                self._pulse()
            made |= chunk_vectors(embedder, some, self._recipe.vectors)
        report.embed_seconds += time.perf_counter() - started
        return made


def encode_identities(
    model: Encoder, identities: Sequence[KVIdentity], prefix: Callable[[], ChunkKV | None]
) -> dict[KVIdentity, ChunkKV]:
    """Encode the chunks of these identities; those of one encoding go through the model together.

    `prefix` returns the KV of the prompt's prefix; it is called only if one of the identities is prefixed.
    """
    made: dict[KVIdentity, ChunkKV] = {}
    for encoding in sorted({identity.encoding for identity in identities}):
        group = [identity for identity in identities if identity.encoding is encoding]
        before = prefix() if encoding is Encoding.PREFIXED else None
        kvs = model.encode([identity.chunk_ids for identity in group], prefix=before)
        made.update(zip(group, kvs, strict=True))
    return made


def chunk_vectors(embedder: Embedder, chunks: Sequence[Chunk], kinds: Collection[str]) -> dict[str, ChunkVectors]:
    """The vectors of each chunk's text by chunk id, in the form that the store keeps: ColBERT rows as float16."""
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


def batches_of(identities: Iterable[KVIdentity]) -> Iterator[list[KVIdentity]]:
    """Identities that are encoded together."""
    return _batched(identities, lambda identity: len(identity.chunk_ids))


def _batched(items: Iterable[T], tokens_of: Callable[[T], int]) -> Iterator[list[T]]:
    """What goes through a model together, in order: at most `BATCH_TOKENS` tokens, or one item."""
    batch: list[T] = []
    tokens = 0
    for item in items:
        if batch and tokens + tokens_of(item) > BATCH_TOKENS:
            yield batch
            batch, tokens = [], 0
        batch.append(item)
        tokens += tokens_of(item)
    if batch:
        yield batch
