"""Ingest files, bytes or ready-made chunks into a store: read, chunk, encode once, commit.

Work is skipped as early as possible: an unchanged file is only hashed, and equal chunks are encoded once. The
`IngestFingerprint` hashes how chunks, KV and vectors of a document were made, so a changed setting is noticed. A killed
ingest loses at most the current batch. The KV of a long document is committed before the document itself, so that the
next run continues from there. A dry run uses the same functions as the ingest to decide which files are new, changed,
unreadable or deleted, without a model and without writing.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

from ragkv.errors import IngestError, StoreError, UsageError
from ragkv.ingest.chunker import TextChunk, chunk_id, split_text
from ragkv.ingest.encoding import (
    Blocks,
    Encoder,
    chunk_identity,
    encode_in_context,
    encoded_tokens,
    make_blocks,
    plan_blocks,
    seen_before,
)
from ragkv.ingest.parser import ParseLimits, Unreadable, check_text, limited
from ragkv.ingest.parser import limits as limits_in_force
from ragkv.ingest.sandbox import SourceReader, SourceText, UnreadableSource
from ragkv.ingest.source import Skipped, SourceFile, find_sources, leads_to_folder, os_reason
from ragkv.model.prompt import Prompt
from ragkv.retrievers import Embedder
from ragkv.store import ChunkVectors, DocumentChange, KVIdentity, Store
from ragkv.store.data_file import mapped_bytes
from ragkv.types import Chunk, Document, Encoding
from ragkv.util import batches

if TYPE_CHECKING:
    from ragkv.attention.kv import ChunkKV
    from ragkv.engines.apb import APBConfig
    from ragkv.model.apb.compressors import Compressor
    from ragkv.model.language_model import LanguageModel
    from ragkv.store.tier import Fetched

EVERY = 1 << 16
"""Characters tokenised between two calls: some tenths of a second."""


class WorkHeartbeat:
    """Calls `notify` after a fixed number of characters of work; an exception from it ends the work.

    It counts work, not time, so the calls do not depend on the machine.
    """

    def __init__(self, notify: Callable[[], object]) -> None:
        self._notify = notify
        self._done = 0

    def __call__(self, characters: int = EVERY) -> None:
        self._done += characters
        if self._done >= EVERY:
            self._done = 0
            self._notify()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyChunk(TextChunk):
    """A chunk with the caller's id, at `start` in its document's text. It may overlap other chunks."""

    chunk_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyDocument:
    """A document with all of its chunks, in order.

    `document.content_hash` must change whenever any of this changes: a document with the same hash is not ingested
    again. Raises UsageError for chunks that are blank, share an id, or differ from the text at their place.
    """

    document: Document
    text: str
    chunks: Sequence[ReadyChunk]

    def __post_init__(self) -> None:
        name, seen = self.document.document_id, set[str]()
        for chunk in self.chunks:
            if chunk.chunk_id in seen:
                raise UsageError(f"Document {name!r} has two chunks called {chunk.chunk_id!r}; give each its own id.")
            if not chunk.text.strip():
                raise UsageError(f"Chunk {chunk.chunk_id!r} of document {name!r} is blank; leave it out.")
            if chunk.start < 0 or not self.text.startswith(chunk.text, chunk.start):
                raise UsageError(
                    f"Chunk {chunk.chunk_id!r} is not what document {name!r} holds at character {chunk.start}; "
                    "give it the place where its text is."
                )
            seen.add(chunk.chunk_id)
        if not name or not self.chunks:
            raise UsageError(f"Document {name!r} needs an id and at least one chunk.")


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestFingerprint:
    """Everything that determines what is stored for a document. If it changes, the document is ingested again."""

    model: str
    """The model's fingerprint."""
    prompt: Prompt
    chunk_tokens: int
    codec: str
    encodings: tuple[Encoding, ...]
    embedder: str | None = None
    """The embedder's fingerprint; None for an index without vectors."""
    vectors: tuple[str, ...] = ()
    blocks: Mapping[str, object] | None = None
    """How long documents are cut into blocks (`ragkv.engines.apb`); None for an index without blocks."""
    context: int = 0
    """`[encoding] context`, where an encoding depends on it."""

    def digest(self) -> str:
        """The hex digest that is stored with each document.

        Some fields only enter it if they differ from the default.
        """
        seeing = {Encoding.PREFIXED, Encoding.CONTEXT}
        prefixed = not seeing.isdisjoint(self.encodings)
        facts: dict[str, object] = {
            "model": self.model,
            "prefix": self.prompt.before_contexts if prefixed else "",
            "separator": self.prompt.separator,
            "chunk_tokens": self.chunk_tokens,
            "codec": self.codec,
            "encodings": [encoding.value for encoding in self.encodings],
        }
        if self.prompt.bos != "auto" and prefixed:
            facts["bos"] = self.prompt.bos
        if self.context:
            facts["context"] = self.context
        if self.embedder is not None:
            facts |= {"embedder": self.embedder, "vectors": self.vectors}
        if self.blocks is not None:
            facts |= {"blocks": dict(self.blocks), "prefix": self.prompt.before_contexts}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


@dataclass(slots=True, kw_only=True)
class IngestProgress:
    """The state for a progress bar, passed to the callback after every step. Bytes are those of the sources.

    After the documents the search indexes are updated: `building` names the current one, which has processed `built` of
    `to_build` chunks or documents.

    After an interrupt, `indexed` is the number of `sources` in the index, without unreadable ones.
    """

    sources: int
    total_bytes: int
    done_bytes: float = 0
    done_sources: int = 0
    indexed: int = 0
    tokens: int = 0
    kv_bytes: int = 0
    encode_seconds: float = 0.0
    current: str = ""
    building: str = ""
    built: int = 0
    to_build: int = 0
    started: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started


@dataclass(slots=True, kw_only=True)
class IngestReport:
    """What an ingest did, or with `dry_run` would do; then the number of chunks is unknown.

    `skipped` are files that are not in the index, `left_out` parts missing from files that are, both with the reason.
    `one_block` are documents of several chunks that are too short for blocks, so that the engine `apb` reads them by
    plain attention. `kv_encoded` and `kv_reused` count KVs of chunks and blocks, `kv_later` those that are encoded by
    the first question that reads them; `kv_bytes` is the uncompressed size of the encoded ones. `encode_seconds` and
    `embed_seconds` are the parts of `seconds` spent in the model and the embedder.
    """

    added: list[str] = field(default_factory=list)
    updated: list[str] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    pruned: list[str] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    left_out: list[Skipped] = field(default_factory=list)
    one_block: list[str] = field(default_factory=list)
    chunks: int = 0
    tokens: int = 0
    kv_encoded: int = 0
    kv_reused: int = 0
    kv_later: int = 0
    kv_bytes: int = 0
    encode_seconds: float = 0.0
    embed_seconds: float = 0.0
    seconds: float = 0.0
    dry_run: bool = False

    def absorb(self, other: IngestReport) -> None:
        """Add what another process did. It has encoded what this one then finds in a tier, and counts as reused."""
        for name in ("skipped", "left_out", "tokens", "kv_encoded", "kv_bytes", "encode_seconds", "embed_seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.kv_reused -= other.kv_encoded

    def to_json(self) -> dict[str, Any]:
        """The object that `ragkv ingest --json` prints."""
        found = {name: round(value, 3) if isinstance(value, float) else value for name, value in asdict(self).items()}
        for name in ("skipped", "left_out"):
            found[name] = [{"path": str(skip.path), "reason": skip.reason} for skip in getattr(self, name)]
        return found


def preview(
    store: Store | None,
    recipe: str,
    paths: Sequence[Path | SourceFile],
    *,
    prune: bool = False,
    limits: ParseLimits | None = None,
) -> IngestReport:
    """A dry run with `recipe` (`IngestFingerprint.digest`) into `store` (None: an index that does not exist yet).

    Changed files are read, so unreadable ones are reported. Nothing is chunked or encoded.
    Raises UsageError for a missing path.
    """
    started = time.perf_counter()
    report = IngestReport(dry_run=True)
    sources, skipped = find_sources(paths)
    report.skipped += skipped
    with SourceReader(limits) as reader:
        for source in sources:
            with skip_unreadable(source, report):
                text = changed_text(source.fetched(), reader, store, recipe, report)
                if text is None:
                    continue
                report.left_out += [Skipped(path=source.shown, reason=part) for part in text.left_out]
                known = store is not None and store.document(source.document_id) is not None
                (report.updated if known else report.added).append(source.document_id)
    if prune and store is not None:
        report.pruned = missing_sources(store, paths, sources, report.skipped)
    report.seconds = time.perf_counter() - started
    return report


@contextmanager
def skip_unreadable(source: SourceFile, report: IngestReport) -> Iterator[None]:
    """Leave the `with` block if the source cannot be read, and report it."""
    try:
        yield
    except UnreadableSource as error:
        report.skipped.append(Skipped(path=source.shown, reason=error.reason))
    except OSError as error:
        report.skipped.append(Skipped(path=source.shown, reason=os_reason(error)))


def changed_text(
    source: SourceFile, reader: SourceReader, store: Store | None, recipe: str, report: IngestReport
) -> SourceText | None:
    """Read a source unless the store holds it unchanged; then report that and return None.

    Raises UnreadableSource or OSError.
    """
    reader.check(source)  # before hashing: a file beyond the limit may be endless
    if store is not None and is_current(store, source, recipe):
        report.unchanged.append(source.document_id)
        return None
    return reader.read(source)


def require_readable(paths: Sequence[Path | SourceFile], *, limits: ParseLimits | None = None) -> None:
    """Raise IngestError if none of the documents can be read, before an index is made for them.

    Reading stops at the first document that can be read. Raises UsageError for a missing path.
    """
    report = IngestReport()
    sources, report.skipped = find_sources(paths)
    with SourceReader(limits) as reader:
        for source in sources:
            with skip_unreadable(source, report):
                reader.read(source.fetched())
                return
    raise nothing_read(report.skipped)


def nothing_read(skipped: Sequence[Skipped]) -> IngestError:
    """The error of an ingest without a readable document, with the first reasons."""
    reasons = "; ".join(f"{skip.path}: {skip.reason}" for skip in skipped[:3])
    return IngestError(f"Nothing to ingest: {reasons or 'no supported files found'}.", skipped)


def is_current(store: Store, source: SourceFile, recipe: str, digest: str | None = None) -> bool:
    """Whether the store holds this content with the same media type. OSError if the file cannot be hashed, unless its
    `digest` is known.
    """
    if not store.is_current(source.document_id, digest or source.digest(), recipe):
        return False
    stored = store.document(source.document_id)
    return stored is not None and stored.document.media_type == source.media_type


def missing_sources(
    store: Store, paths: Sequence[Path | SourceFile], sources: Collection[SourceFile], skipped: Collection[Skipped]
) -> list[str]:
    """The documents from the given folders whose files no longer exist, and those whose pages vanished from the web.

    Documents of a folder that could not be listed, or in which nothing could be looked at, stay, because they may still
    exist.
    """
    present = {source.document_id for source in sources}
    roots = [path.resolve() for path in paths if isinstance(path, Path) and path.is_dir()]
    closed = [skip.path for skip in skipped if isinstance(skip.path, Path) and leads_to_folder(skip.path, denied=True)]
    remotes = {id(source.remote): source.remote for source in sources if source.remote is not None}.values()
    return [
        document_id
        for document_id in (stored.document.document_id for stored in store.documents())
        if any(remote.is_gone(document_id) for remote in remotes)
        or (
            document_id not in present
            and any(Path(document_id).is_relative_to(root) for root in roots)
            and not any(Path(document_id).is_relative_to(folder) for folder in closed)
        )
    ]


@dataclass(slots=True)
class IngestItem:
    """A new or changed document on its way to the store. It was read and cut; then `references` name the KV that its
    chunks need, and the missing KV and `vectors` are made. `size` is its share of the progress.
    """

    document: Document
    text: str
    chunks: list[Chunk]
    size: int
    references: dict[str, list[KVIdentity]] = field(default_factory=dict)
    blocks: Blocks | None = None
    vectors: dict[str, ChunkVectors] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeDocument:
    """A source that another process has read, cut and embedded, with its KV in the shared tiers (`Ingester.make`).

    `item` is None if it could not be read. `report` is about it alone.
    """

    source: SourceFile
    report: IngestReport
    item: IngestItem | None = None


Make: TypeAlias = Callable[[Sequence[SourceFile]], Iterable[MadeDocument]]
"""Makes the documents of sources in other processes, in any order (`ragkv.index.ingestion`)."""

BATCH_TOKENS = 2048  # encoded together; progress is reported after each batch
WAITING_CHARACTERS = 4 << 20  # of documents waiting for their batch; a blank document is long but has few tokens
MEMORY = 1 << 30  # held besides the models: a quarter for KV, half for pages of the store
TOGETHER_BYTES = 16 << 20  # of small documents committed in one transaction
HOLD_BYTES = 256 << 20  # KV held in memory until its document is complete; more is committed ahead


@dataclass(slots=True)
class _Run:
    """One call of `run` or `run_chunks`: its report, its progress, and the documents that wait for their batch."""

    progress: IngestProgress
    report: IngestReport = field(default_factory=IngestReport)
    waiting: list[IngestItem] = field(default_factory=list)

    @property
    def batch_is_full(self) -> bool:
        tokens = sum(len(chunk.token_ids) for item in self.waiting for chunk in item.chunks)
        return tokens >= BATCH_TOKENS or sum(len(item.text) for item in self.waiting) >= WAITING_CHARACTERS


class IngestTarget(Protocol):
    """What an ingest asks of the index that it fills (`ragkv.index.ingestion`)."""

    @property
    def store(self) -> Store: ...

    @property
    def recipe(self) -> IngestFingerprint: ...

    @property
    def blocks(self) -> APBConfig | None:
        """How long documents are also stored in blocks."""
        ...

    def model(self) -> Encoder:
        """The model; called for the first chunk, so that an ingest without changes loads nothing."""
        ...

    def embedder(self) -> Embedder | None: ...

    def room_for(self, tokens: Sequence[int]) -> int:
        """How many of the first of these chunks without KV may be encoded now; questions encode the rest."""
        ...

    def fetch(self, identities: Sequence[KVIdentity]) -> Fetched:
        """Missing KV from the shared tiers."""
        ...

    def offer(self, records: Sequence[tuple[KVIdentity, ChunkKV]]) -> object:
        """Write new KV to the shared tiers."""
        ...

    def before_writing(self) -> None:
        """Called before each write to the store."""
        ...


class Ingester:
    """One ingest into one index."""

    def __init__(
        self,
        target: IngestTarget,
        *,
        limits: ParseLimits | None = None,
        memory: int = MEMORY,
        on_progress: Callable[[IngestProgress], None] = lambda _: None,
    ) -> None:
        self._target, self._store, self._recipe = target, target.store, target.recipe
        self._digest = self._recipe.digest()
        self._notify = on_progress
        self._heartbeat = WorkHeartbeat(lambda: None)
        self._limits = limits or limits_in_force()
        self._memory = memory
        self._mapped = 0
        self._prefix_ids: tuple[int, ...] = ()
        self._prefix: ChunkKV | None = None

    def run(self, paths: Sequence[Path | SourceFile], *, prune: bool = False, make: Make | None = None) -> IngestReport:
        """Ingest files and folders. `make` makes the changed ones in other processes.

        Raises UsageError for a missing path, IngestError when nothing was readable.
        """
        sources, skipped = find_sources(paths)
        run = _Run(IngestProgress(sources=len(sources), total_bytes=sum(s.size for s in sources)))
        report, progress = run.report, run.progress
        report.skipped += skipped
        go_on = partial(self._notify, progress)
        self._heartbeat = WorkHeartbeat(go_on)
        try:
            if make is None:
                with SourceReader(self._limits, waiting=go_on) as reader:
                    for source in sources:
                        self._add(run, source.name, source.size, partial(self._from_source, source, reader, report))
            else:
                seen: set[str] = set()
                for result in make(self._changed(sources, run)):
                    if result.source.document_id in seen:  # made before by a worker that was lost
                        continue
                    seen.add(result.source.document_id)
                    report.absorb(result.report)
                    self._add(run, result.source.name, result.source.size, partial(_item_of, result))
            self._commit(run)
            report.kv_reused = max(0, report.kv_reused)
            if not (report.added or report.updated or report.unchanged):
                raise nothing_read(report.skipped)
            if prune:
                for document_id in missing_sources(self._store, paths, sources, report.skipped):
                    self._store.delete_document(document_id)
                    report.pruned.append(document_id)
        except KeyboardInterrupt:
            progress.sources -= len({source.shown for source in sources} & {skip.path for skip in report.skipped})
            progress.indexed = self._indexed(sources, run.waiting)
            self._notify(progress)
            raise
        return self._finish(run)

    def make(self, source: SourceFile, reader: SourceReader) -> MadeDocument:
        """Read, cut and embed a source and put its KV into the shared tiers, for another process that commits it.

        Only KV that does not fit into memory is written to the store; `SharedTiers.settle` waits for the tiers.
        """
        run = _Run(IngestProgress(sources=1, total_bytes=source.size))
        self._heartbeat = WorkHeartbeat(lambda: None)
        item = self._from_source(source, reader, run.report)
        if item is not None:
            run.waiting.append(item)
            self._encode_missing(list(self._needed(run)), run)
            self._embed([item], run.report)
            item.references, item.blocks = {}, None
        return MadeDocument(source=source, report=run.report, item=item)

    def _changed(self, sources: Sequence[SourceFile], run: _Run) -> list[SourceFile]:
        """The sources that are new to the store or have changed."""
        changed = []
        for source in sources:
            with skip_unreadable(source, run.report):
                if not is_current(self._store, source, self._digest):
                    changed.append(source)
                    continue
                run.report.unchanged.append(source.document_id)
            run.progress.done_bytes += source.size
            run.progress.done_sources += 1
            self._notify(run.progress)
        return changed

    def run_chunks(self, documents: Sequence[ReadyDocument]) -> IngestReport:
        """Ingest documents with ready-made chunks. Each replaces its earlier version; unchanged ones are skipped.

        Raises the store's error if a chunk's id belongs to another document.
        """
        run = _Run(IngestProgress(sources=len(documents), total_bytes=sum(len(d.text) for d in documents)))
        self._heartbeat = WorkHeartbeat(partial(self._notify, run.progress))
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

    def _add(self, run: _Run, name: str, size: int, prepare: Callable[[], IngestItem | None]) -> None:
        """Prepare one document, and commit the batch if it is full. `prepare` returns None if there is nothing to
        do."""
        run.progress.current = name
        self._notify(run.progress)
        item = prepare()
        if item is None:
            run.progress.done_bytes += size
            run.progress.done_sources += 1
            return
        run.waiting.append(item)
        if run.batch_is_full:
            self._commit(run)

    def _indexed(self, sources: Sequence[SourceFile], waiting: Sequence[IngestItem]) -> int:
        """The number of sources in the index after an interrupt, from this run or an earlier one.

        A source that this run has not reached counts if it was ingested with this fingerprint, even if it has changed.
        """
        pending = {item.document.document_id: item.document.content_hash for item in waiting}
        indexed = 0
        for source in sources:
            stored = self._store.document(source.document_id)
            if stored is not None and stored.recipe == self._digest:
                expected = pending.get(source.document_id, stored.document.content_hash)
                indexed += expected == stored.document.content_hash
        return indexed

    def _from_ready(self, ready: ReadyDocument, report: IngestReport) -> IngestItem | None:
        """Tokenise a document with ready-made chunks; None if it is unchanged."""
        document = ready.document
        if self._store.is_current(document.document_id, document.content_hash, self._digest):
            report.unchanged.append(document.document_id)
            return None
        chunks = [
            chunk.of(document, ordinal, chunk.chunk_id, self._ids(chunk.text))
            for ordinal, chunk in enumerate(ready.chunks)
        ]
        return IngestItem(document, ready.text, chunks, len(ready.text))

    def _from_source(self, source: SourceFile, reader: SourceReader, report: IngestReport) -> IngestItem | None:
        """Read and cut a file; None if it is unchanged or unreadable, which is reported."""
        size = source.size
        item: IngestItem | None = None
        with skip_unreadable(source, report):
            source = source.fetched()
            text = changed_text(source, reader, self._store, self._digest, report)
            if text is not None:
                document = Document(
                    document_id=source.document_id,
                    source=source.name,
                    content_hash=text.content_hash,  # of the bytes read: the file may have changed since it was hashed
                    media_type=source.media_type,
                    title=text.title,
                )
                item = IngestItem(document, text.text, self._chunks(document, text), size)
                report.left_out += [Skipped(path=source.shown, reason=part) for part in text.left_out]
        return item

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
        chunks = split_text(text, count_tokens=lambda t: len(self._ids(t)), max_tokens=self._recipe.chunk_tokens)
        for ordinal, chunk in enumerate(chunks):
            name = chunk_id(document, ordinal, chunk.start, chunk.end)
            yield chunk.of(document, ordinal, name, self._ids(chunk.text))

    def _ids(self, text: str) -> tuple[int, ...]:
        """A chunk's tokens."""
        self._heartbeat(len(text))
        return self._recipe.prompt.chunk_ids(self._target.model().tokens, text)

    def _commit(self, run: _Run) -> None:
        """Encode the missing KV of the waiting documents, then commit them, small ones together."""
        if not run.waiting:
            return
        report = run.report
        needed = self._needed(run)
        stored = self._store.has_many(needed)
        report.kv_reused += len(stored)
        keep = {identity.key() for identity in stored}
        missing = self._affordable([identity for identity in needed if identity not in stored], report)
        stored.update(missing)
        for item in run.waiting:
            item.references = {
                chunk_id: [identity for identity in identities if identity in stored]
                for chunk_id, identities in item.references.items()
            }
        records = self._encode_missing(missing, run)
        self._embed(run.waiting, report)
        self._target.before_writing()
        together: list[tuple[IngestItem, DocumentChange]] = []
        size = 0
        for item in run.waiting:
            own = dict.fromkeys(i for identities in item.references.values() for i in identities)
            change = self._store.change(
                item.document,
                item.text,
                item.chunks,
                recipe=self._digest,
                records=[(identity, records[identity]) for identity in own if identity in records],
                references=item.references,
                vectors=item.vectors,
                lenient=True,
            )
            if size + change.size > TOGETHER_BYTES:
                self._write(together, run, keep)
                together, size = [], 0
            together.append((item, change))
            size += change.size
        self._write(together, run, keep)
        run.waiting.clear()
        self._give_back()

    def _needed(self, run: _Run) -> dict[KVIdentity, None]:
        """The KV that the waiting documents need, which their `references` then name."""
        needed: dict[KVIdentity, None] = {}
        for item in run.waiting:
            for ordinal, chunk in enumerate(item.chunks):
                identities = [self._identity(encoding, item, ordinal) for encoding in self._recipe.encodings]
                item.references[chunk.chunk_id] = identities
                needed.update(dict.fromkeys(identities))
            if self._target.blocks is not None and any(chunk.token_ids for chunk in item.chunks):
                needed.update(dict.fromkeys(self._in_blocks(item, self._target.blocks, run.report)))
        return needed

    def _give_back(self) -> None:
        """Release pages of the store if those that this process has touched exceed half of its memory limit."""
        mapped = mapped_bytes()
        self._mapped = self._mapped or mapped  # the models' weights may be mapped too
        if mapped - self._mapped > self._memory // 2:
            self._store.maintenance.give_back_pages()

    def _write(self, changes: Sequence[tuple[IngestItem, DocumentChange]], run: _Run, keep: Set[bytes]) -> None:
        """Commit documents in one transaction, because each transaction waits for the disk. `keep`: keys of the KV that
        the batch needs.

        If it fails (a full disk, a chunk of another document), they are written singly up to the one that fails.
        """
        known = {item.document.document_id for item, _ in changes if self._store.document(item.document.document_id)}
        try:
            self._store.write_changes([change for _, change in changes], keep=keep)
        except StoreError:
            if len(changes) == 1:
                raise
            for change in changes:
                self._write([change], run, keep)
            return
        for item, _ in changes:
            name = item.document.document_id
            (run.report.updated if name in known else run.report.added).append(name)
            run.report.chunks += len(item.chunks)
            run.progress.done_sources += 1
            self._notify(run.progress)

    def _affordable(self, missing: list[KVIdentity], report: IngestReport) -> list[KVIdentity]:
        """The first of these identities, as many as have room for their KV."""
        affordable = missing[: self._target.room_for([identity.tokens for identity in missing])]
        report.kv_later += len(missing) - len(affordable)
        return affordable

    def _encode_missing(self, missing: Sequence[KVIdentity], run: _Run) -> dict[KVIdentity, ChunkKV]:
        """Encode these identities; returns their KV except what was committed ahead to save memory."""
        records: dict[KVIdentity, ChunkKV] = {}
        slices = list(batches_of([identity for identity in missing if identity.encoding is not Encoding.LONG]))
        blocks = {identity for identity in missing if identity.encoding is Encoding.LONG}
        share = sum(item.size for item in run.waiting) / max(1, len(slices) + len(blocks))
        for batch in slices:
            fetched = self._target.fetch(batch)
            batch = [identity for identity in batch if identity not in fetched]
            started = time.perf_counter()
            encoded = encode_identities(self._target.model(), batch, self._prefix_kv)
            self._encoded(run, records, encoded, time.perf_counter() - started, share)
            records |= {identity: kv for identity, (_, kv) in fetched.items()}
            run.report.kv_reused += len(fetched)
        for item in run.waiting:
            started = time.perf_counter()
            for identity, kv in self._encode_blocks(item, blocks):
                self._encoded(run, records, {identity: kv}, time.perf_counter() - started, share)
                started = time.perf_counter()
        if not slices and not blocks:
            run.progress.done_bytes += share
        return records

    def _encoded(
        self,
        run: _Run,
        records: dict[KVIdentity, ChunkKV],
        encoded: Mapping[KVIdentity, ChunkKV],
        seconds: float,
        share: float,
    ) -> None:
        """Count new KV, offer it to the tiers, and add it to `records`, or to the store if they hold too much."""
        report, progress = run.report, run.progress
        records |= encoded
        report.encode_seconds += seconds
        report.kv_encoded += len(encoded)
        report.tokens += sum(identity.tokens for identity in encoded)
        report.kv_bytes += sum(kv.nbytes for kv in encoded.values())
        self._target.offer(list(encoded.items()))
        if sum(kv.nbytes for kv in records.values()) > min(HOLD_BYTES, self._memory // 4):
            self._store.stage_kv(records.items())  # invisible until a document refers to it
            records.clear()
        progress.tokens, progress.kv_bytes = report.tokens, report.kv_bytes
        progress.encode_seconds = report.encode_seconds
        progress.done_bytes += share
        self._notify(progress)

    def _identity(self, encoding: Encoding, item: IngestItem, ordinal: int) -> KVIdentity:
        """The key of the KV of a document's chunk number `ordinal`."""
        chunk, recipe = item.chunks[ordinal], self._recipe
        seen: tuple[int, ...] = ()
        if encoding is Encoding.CONTEXT:
            before = (item.chunks[number] for number in range(ordinal - 1, -1, -1))
            seen = seen_before(
                chunk, before, item.document.title, recipe.context, recipe.prompt, self._target.model().tokens
            )
        prefix_ids = () if encoding is Encoding.STANDALONE else self._prompt_prefix()
        return chunk_identity(recipe.model, encoding, prefix_ids, chunk.token_ids, seen)

    def _in_blocks(self, item: IngestItem, config: APBConfig, report: IngestReport) -> list[KVIdentity]:
        """The block records of a document, which its chunks then need."""
        chunks = [chunk for chunk in item.chunks if chunk.token_ids]
        model, prefix_ids = self._recipe.model, self._prompt_prefix()
        item.blocks = plan_blocks(chunks, config, self._compressor(), model=model, prefix_ids=prefix_ids)
        if item.blocks.short:
            report.one_block.append(item.document.document_id)
        for identity, owner in item.blocks.all.items():
            if identity not in item.references[owner]:
                item.references[owner].append(identity)
        return list(item.blocks.all)

    def _encode_blocks(self, item: IngestItem, missing: set[KVIdentity]) -> Iterator[tuple[KVIdentity, ChunkKV]]:
        """The KV of a document's blocks among `missing`, in order; blocks that exist are read from the store."""
        own = [] if item.blocks is None else [identity for identity in item.blocks.all if identity in missing]
        missing.difference_update(own)  # another document may have the same blocks
        if item.blocks is None or not own:
            return
        model = cast("LanguageModel", self._target.model())
        yield from make_blocks(
            item.blocks,
            own,
            model,
            self._compressor(),
            self._prefix_kv(),
            lambda identity: self._store.get_many([identity], device=model.place).get(identity),
        )

    def _compressor(self) -> Compressor:
        """The compressor that chooses the tokens that blocks pass on."""
        from ragkv.model.apb.document import compressor_for

        assert self._target.blocks is not None
        return compressor_for(self._target.blocks.compressor, cast("LanguageModel", self._target.model()))

    def _prompt_prefix(self) -> tuple[int, ...]:
        self._prefix_ids = self._prefix_ids or self._recipe.prompt.prefix_ids(self._target.model().tokens)
        return self._prefix_ids

    def _prefix_kv(self) -> ChunkKV | None:
        if self._prefix is None and self._prefix_ids:
            [prefix] = self._target.model().encode([self._prefix_ids])
            identity = chunk_identity(self._recipe.model, Encoding.STANDALONE, (), self._prefix_ids)
            self._prefix = self._store.rounded({identity: prefix})[identity]
        return self._prefix

    def _embed(self, items: Sequence[IngestItem], report: IngestReport) -> None:
        """Make the vectors of these documents that have none, if the index has an embedder."""
        chunks = [chunk for item in items if not item.vectors for chunk in item.chunks]
        embedder = self._target.embedder() if chunks else None
        if embedder is None:
            return
        started = time.perf_counter()  # after the embedder was loaded
        vectors: dict[str, ChunkVectors] = {}
        for some in batches(chunks, lambda chunk: len(chunk.token_ids), BATCH_TOKENS):
            if vectors:
                self._heartbeat()
            vectors |= chunk_vectors(embedder, some, self._recipe.vectors)
        report.embed_seconds += time.perf_counter() - started
        for item in items:
            names = [chunk.chunk_id for chunk in item.chunks]
            item.vectors |= {name: vectors[name] for name in names if name in vectors}


def _item_of(made: MadeDocument) -> IngestItem | None:
    return made.item


def encode_identities(
    model: Encoder,
    identities: Sequence[KVIdentity],
    prefix: Callable[[], ChunkKV | None],
) -> dict[KVIdentity, ChunkKV]:
    """Encode the chunks of these identities, in one batch per encoding.

    `prefix` returns the KV of the prompt's prefix and is not called for identities that saw none.
    """
    encoded: dict[KVIdentity, ChunkKV] = {}
    if identities and (elsewhere := getattr(model, "encode_identities", None)) is not None:  # by vLLM
        return cast("dict[KVIdentity, ChunkKV]", elsewhere(identities))
    for encoding in sorted({identity.encoding for identity in identities}):
        group = [identity for identity in identities if identity.encoding is encoding]
        before = prefix() if group[0].position else None
        if encoding is Encoding.CONTEXT:
            for batch in batches_of(group):  # the KV that the chunks see is dropped after each batch
                encoded.update(encode_in_context(model, batch, before))
            continue
        kvs = model.encode([identity.chunk_ids for identity in group], prefix=before)
        encoded.update(zip(group, kvs, strict=True))
    return encoded


def chunk_vectors(embedder: Embedder, chunks: Sequence[Chunk], kinds: Collection[str]) -> dict[str, ChunkVectors]:
    """The vectors of each chunk by chunk id, as stored: ColBERT rows are float16."""
    vectors = embedder.embed_documents([chunk.text for chunk in chunks])
    vectors = replace(vectors, **dict.fromkeys({"dense", "sparse", "colbert"} - set(kinds)))
    return {
        chunk.chunk_id: ChunkVectors(
            dense=None if vectors.dense is None else vectors.dense[row],
            sparse=None if vectors.sparse is None else vectors.sparse[row],
            colbert=None if vectors.colbert is None else vectors.colbert[row].astype("float16"),
        )
        for row, chunk in enumerate(chunks)
    }


def batches_of(identities: Iterable[KVIdentity]) -> Iterator[list[KVIdentity]]:
    """Identities in batches that are encoded together."""
    return batches(identities, encoded_tokens, BATCH_TOKENS)
