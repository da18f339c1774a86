"""Search an index in one of five modes, rerank, and keep the raw score of every stage.

`Searcher` gets indexes, texts and vectors through callables and protocols, so that `Finder` can pass those of an index
on disk, and the evaluation those of a corpus without an index.

Retrieval indexes and the index of fields are derived from the store, in `derived/KIND`, and may be deleted at any time.
The first ingest, or the first question that needs it, builds one. Commands that write bring it up to date; a question
does so if one of them was killed or another process wrote. `Store.changes` names the changed chunks, so nothing else is
compared. `look_at` and `list_documents` inspect chunks and documents without loading a model.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from ragkv.config import MODES, Fusion, Mode
from ragkv.errors import ConfigError, ModelLoadError, RetrievalError, StoreError, UsageError
from ragkv.index.conversation import interleaved
from ragkv.index.filters import DocumentFilter, DocumentMetadata, FieldIndex, all_values, match, meeting, unmatched
from ragkv.index.index import Index, indexes_of, why_not_served
from ragkv.question import Question
from ragkv.retrievers import (
    BM25,
    DenseIndex,
    Hit,
    ScoreKind,
    SparseIndex,
    VectorSearch,
    colbert_scores,
    fuse,
    normalise_rerank,
    normalise_retrieval,
    reciprocal_rank_fusion,
    relative_score_fusion,
)
from ragkv.retrievers.arrays import KEY_BYTES, IdSet, id_key, keys_of
from ragkv.retrievers.qdrant import Point, QdrantIndex, term
from ragkv.retrievers.segments import (
    MANIFEST,
    SavedElsewhereError,
    Segmented,
    alone,
    saved_generation,
)
from ragkv.store import DocumentStats, KVRecord, Store, StoredDocument
from ragkv.store.counters import Version
from ragkv.store.tables import VECTOR_KINDS, document_key
from ragkv.types import Chunk, Document, ScoredChunk
from ragkv.util.files import is_folder, make_folder, parse_json, read_plain, refusal

if TYPE_CHECKING:
    from ragkv.retrievers import Embedder, Reranker

logger = logging.getLogger(__name__)

_FUSIONS: Mapping[Fusion, Callable[[Sequence[Sequence[Hit]]], list[Hit]]] = {
    "relative": relative_score_fusion,
    "rrf": reciprocal_rank_fusion,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A chunk with the scores of every stage.

    `stages` has the raw scores by stage: dense, sparse, colbert, bm25, relative, rrf. `score` was computed from
    `retrieval_score` (PCED Eqs. 4-7), which is on the scale `score_kind`.
    """

    chunk_id: str
    stages: Mapping[str, float]
    retrieval_score: float
    score_kind: ScoreKind
    rerank_score: float | None = None
    score: float = 0.0

    def scored(self, chunk: Chunk, source: str) -> ScoredChunk:
        """The chunk, from the document named `source`, with these scores."""
        return ScoredChunk(
            chunk=chunk,
            source=source,
            retrieval_score=self.retrieval_score,
            rerank_score=self.rerank_score,
            score=self.score,
            stages=self.stages,
        )


class Searcher:
    """Searches one set of chunks. Thread-safe.

    `indexes` has those of bm25, dense and sparse that exist; `fusion` is how hybrid merges two rankings. `texts` and
    `colbert` return the texts and ColBERT vectors of chunks by id, without deleted chunks. A search raises if its mode
    needs a missing part.
    """

    def __init__(
        self,
        *,
        embedder: Embedder | None,
        indexes: Mapping[str, VectorSearch[Any]],
        texts: Callable[[Sequence[str]], Mapping[str, str]],
        colbert: Callable[[Sequence[str]], Mapping[str, NDArray[np.floating[Any]]]],
        reranker: Reranker | None,
        fusion: Fusion = "relative",
    ) -> None:
        self._embedder = embedder
        self._fusion = fusion
        self._indexes = indexes
        self._texts = texts
        self._colbert = colbert
        self._reranker = reranker

    def candidates(
        self, question: str, *, mode: Mode, count: int, pool: int = 0, among: Collection[str] | IdSet | None = None
    ) -> list[Found]:
        """The best `count` chunks of a mode, best first, scored without the reranker.

        ColBERT and hybrid choose among the best `pool` (at least `count`) of each index that they search.
        """
        if mode not in MODES:
            raise UsageError(f"--retrieval must be one of {', '.join(MODES)}, not {mode!r}.", param="retrieval")
        if count < 1:
            raise ValueError(f"count must be at least 1, not {count}")
        asked = self._asked(question, mode)
        if mode in ("bm25", "dense", "sparse"):
            return [_found(hit.chunk_id, {mode: hit.score}, mode) for hit in self._hits(mode, asked, count, among)]
        pool = max(count, pool)
        if mode == "colbert":
            return self._late(asked, self._hits("dense", asked, pool, among))[:count]
        return self._hybrid(asked, pool, among)[:count]

    def rerank(self, question: str, candidates: Sequence[Found]) -> list[Found]:
        """The chunks with the reranker's logit in their score, best first, without deleted ones."""
        if self._reranker is None:
            raise RetrievalError(
                "This index has no reranker: set `reranker` in its ragkv.toml, or use --no-rerank.", param="rerank"
            )
        texts = self._texts([candidate.chunk_id for candidate in candidates])
        there = [candidate for candidate in candidates if candidate.chunk_id in texts]
        logits = self._reranker.score(question, [texts[candidate.chunk_id] for candidate in there])
        judged = [
            replace(
                candidate, rerank_score=logit, score=_relevance(candidate.retrieval_score, candidate.score_kind, logit)
            )
            for candidate, logit in zip(there, logits, strict=True)
        ]
        return sorted(judged, key=lambda candidate: (-candidate.score, candidate.chunk_id))

    def search(
        self,
        question: str,
        *,
        mode: Mode,
        top_k: int,
        candidates: int,
        rerank: bool,
        among: Collection[str] | IdSet | None = None,
    ) -> list[Found]:
        """The best `top_k`, best first; with `rerank`, by the fused score among `candidates`."""
        pool = max(top_k, candidates)
        found = self.candidates(question, mode=mode, count=pool if rerank else top_k, pool=pool, among=among)
        return self.rerank(question, found)[:top_k] if rerank else found

    def _asked(self, question: str, mode: Mode) -> dict[str, Any]:
        """What a mode asks each index: the question of BM25's, its vector of the others by kind."""
        if mode == "bm25":
            return {"bm25": question}
        if self._embedder is None:
            raise RetrievalError(
                f"--retrieval {mode} needs an embedder, and this index has none; use bm25.", param="retrieval"
            )
        if why := why_not_served(mode, self._embedder.modes, f"Embedder {self._embedder.name!r}"):
            raise RetrievalError(why, param="retrieval")
        query = self._embedder.embed_query(question)
        kinds = {"dense": query.dense, "sparse": query.sparse, "colbert": query.colbert}
        return {"bm25": question, **{kind: rows[0] for kind, rows in kinds.items() if rows is not None}}

    def _hits(
        self, name: str, asked: Mapping[str, Any], count: int, among: Collection[str] | IdSet | None
    ) -> list[Hit]:
        index = self._indexes.get(name)
        if index is None:
            what = "BM25 index" if name == "bm25" else f"index of {name} vectors"
            raise RetrievalError(f"There is no {what} of these chunks.")
        return index.search(asked[name], count, among=among)

    def _late(self, asked: Mapping[str, Any], hits: Sequence[Hit]) -> list[Found]:
        """Score the candidates by late interaction (ColBERT). Candidates without vectors were deleted meanwhile."""
        vectors = self._colbert([hit.chunk_id for hit in hits])
        there = [hit for hit in hits if hit.chunk_id in vectors]
        scores = colbert_scores(asked["colbert"], [vectors[hit.chunk_id] for hit in there])
        scored = [
            _found(hit.chunk_id, {"dense": hit.score, "colbert": float(score)}, "colbert")
            for hit, score in zip(there, scores, strict=True)
        ]
        return sorted(scored, key=lambda each: (-each.retrieval_score, each.chunk_id))

    def _hybrid(self, asked: Mapping[str, Any], count: int, among: Collection[str] | IdSet | None) -> list[Found]:
        """Merge the dense ranking with the sparse one, or with BM25's if there are no sparse vectors.

        The score is the dense one, which every chunk has.
        """
        words = "sparse" if "sparse" in self._indexes else "bm25"
        dense, lexical = (self._hits(name, asked, count, among) for name in ("dense", words))
        merged = _FUSIONS[self._fusion]([dense, lexical])[:count]
        cosine = {hit.chunk_id: hit.score for hit in dense}
        if lacking := {hit.chunk_id for hit in merged} - cosine.keys():
            more = self._hits("dense", asked, len(lacking), lacking)
            cosine |= {hit.chunk_id: hit.score for hit in more}
        weights = {hit.chunk_id: hit.score for hit in lexical}
        scored = []
        for hit in merged:
            stages = {self._fusion: hit.score, "dense": cosine.get(hit.chunk_id, 0.0)}
            if hit.chunk_id in weights:
                stages[words] = weights[hit.chunk_id]
            scored.append(_found(hit.chunk_id, stages, "dense"))
        return scored


def _found(chunk_id: str, stages: Mapping[str, float], stage: str) -> Found:
    kind: ScoreKind = "sparse" if stage == "bm25" else stage  # type: ignore[assignment]
    score = stages[stage]
    return Found(
        chunk_id=chunk_id,
        stages=stages,
        retrieval_score=score,
        score_kind=kind,
        score=_relevance(score, kind, None),
    )


def _relevance(score: float, kind: ScoreKind, logit: float | None) -> float:
    """r of PCED Eqs. 4-7."""
    return fuse(normalise_retrieval(score, kind), None if logit is None else normalise_rerank(logit))


OnCount = Callable[[int, int], None]
"""Called with (done, total) chunks or documents that an index has processed. An exception ends the work."""

KINDS: Mapping[str, type[Segmented[Any, Any]]] = {
    "bm25": BM25,
    "dense": DenseIndex,
    "fields": FieldIndex,
    "sparse": SparseIndex,
}
_BATCH = 1024  # chunks read from the store at once
SETTLED_SECONDS = 3600
"""A folder without a manifest's reference that is older than this is not being written any more."""

T = TypeVar("T")


def derived_states(folder: Path, needed: Collection[str], generation: int) -> dict[str, str]:
    """The state, in words, of the needed retrieval indexes and of others that exist."""
    return {
        name: _state(folder / name, kind, generation)
        for name, kind in KINDS.items()
        if name in needed or os.path.lexists(folder / name)
    }


def _state(folder: Path, kind: type[Segmented[Any, Any]], generation: int) -> str:
    if not os.path.lexists(folder):
        return "not built yet: the next question builds it"
    try:
        kept = _open(kind, folder)
    except RetrievalError as error:
        return f"will be rebuilt by the next question ({error})"
    if kept.generation != generation:
        return "will be brought up to date by the next question (documents have changed since)"
    return "current"


def stale_derived(folder: Path, follows: Callable[[Version], bool]) -> Iterator[Path]:
    """Retrieval indexes that have to be rebuilt, and remains of interrupted saves; both may be deleted.

    `follows` says whether the store's change log reaches back to a version.
    """
    settled = time.time() - SETTLED_SECONDS
    # links are skipped: ragkv makes none, and they may lead to foreign files
    for index in sorted(filter(is_folder, folder.iterdir())) if is_folder(folder) else []:
        manifest: dict[str, object] = {}
        with suppress(OSError, ValueError):
            found = parse_json(read_plain(index / MANIFEST))
            manifest = found if isinstance(found, dict) else {}
        generation, mark = manifest.get("generation"), manifest.get("mark")
        known = isinstance(generation, int) and isinstance(mark, str) and follows(Version(generation, mark))
        behind = bool(manifest) and not known
        with suppress(FileNotFoundError):  # a process that saves deletes what it has replaced
            if behind and index.lstat().st_mtime < settled:
                yield index
                continue
            for data in index.glob("data-*"):
                if data.name != manifest.get("data") and data.lstat().st_mtime < settled:
                    yield data


class Derived:
    """The retrieval indexes over one store. Thread-safe. `keep` runs writes to `folder`."""

    def __init__(self, store: Store, folder: Path, keep: Callable[[Callable[[], object]], None]) -> None:
        self._store = store
        self._folder = folder
        self._keep = keep
        self._lock = threading.Lock()
        self._indexes: dict[str, Segmented[Any, Any]] = {}
        self._lengths: dict[str, Mapping[Path, int]] = {}
        """The lengths of files that an open index may have mapped, from when they were last known to be complete."""

    def index(self, name: str, *, embedder: str = "", factory: str | None = None, notify: OnCount | None = None) -> Any:
        """The index called `name` (`KINDS`), updated to the store's generation.

        `embedder` is the fingerprint of the one that made the store's vectors. An index of another embedder or factory
        string is rebuilt, an older one updated.
        """
        wanted: Any = KINDS[name]() if factory is None else DenseIndex(factory)

        def fits(index: Any) -> bool:
            return bool((not len(index) or index.embedder == embedder) and index.fields() == wanted.fields())

        def ready(index: Any) -> bool:
            return fits(index) and (index.generation, index.mark, index.embedder) == (*now, embedder)

        now, folder = self._store.version, self._folder / name
        index = self._indexes.get(name)
        if index is not None and not self._is_cut(name) and ready(index):
            return index
        with self._lock:
            now, index = self._store.version, self._indexes.get(name)
            if index is None or self._is_cut(name):  # `is None`, because an empty index is false
                index = self._opened(name, None)
            elif index.generation < (saved_generation(folder) or 0) <= now.generation:
                # another process has updated the saved index, and perhaps merged its segments
                index = self._opened(name, index) or index
            if index is None or not fits(index):
                index = wanted
            if not ready(index):
                index = self._updated(index, wanted, now, embedder, notify)
                self._keep(lambda: self._save(index, folder))
                self._measure(name)
            self._indexes[name] = index
            return index

    def merge(self, name: str) -> None:
        """Merge the segments of an index in use and save it, for commands that write.

        Questions continue with the old segments and do not wait.
        """
        index = self._indexes.get(name)
        if index is not None and index.merge():
            self._keep(lambda: self._save(index, self._folder / name))
            self._measure(name)

    def _updated(self, index: Any, empty: Any, now: Version, embedder: str, notify: OnCount | None) -> Any:
        """The index with the changes since its version; if those are unknown, `empty` filled again.

        If `notify` raises, nothing has changed.
        """
        changes = self._store.changes(Version(index.generation, index.mark)) if len(index) else None
        if changes is None:
            if len(index):
                logger.info("the %s index is built again: it is too far behind", index.name)
            found = _with_progress(_once(self._all(index.name)), notify, partial(self._size, index.name))
            empty.update(found, (), generation=now.generation, embedder=embedder)
            empty.mark = now.mark
            return empty
        # The store's rows may be newer than `changes`. Then the next update replaces them once more.
        touched = changes.documents if index.name == "fields" else changes.chunks
        added = _with_progress(self._some(index.name, sorted(touched)), notify, lambda: len(touched))
        generation, mark = changes.version
        index.update(added, IdSet.of(touched), generation=generation, embedder=embedder, merge=False)
        index.mark = mark
        return index

    def _all(self, name: str) -> Iterator[tuple[str, Any]]:
        """All ids with their content for this index: a chunk's text or vector, a document's fields."""
        if name == "bm25":
            return ((chunk.chunk_id, chunk.text) for chunk in self._store.chunks())
        return _all_fields(self._store) if name == "fields" else self._store.vectors(name)  # type: ignore[arg-type]

    def _size(self, name: str) -> int:
        """The number of these ids, from the store's counters."""
        stats = self._store.stats()
        return stats.documents if name == "fields" else stats.chunks

    def _some(self, name: str, names: Sequence[bytes]) -> Iterator[tuple[str, Any]]:
        """Like `_all`, for the chunks or documents named by `Changes` that are in the store."""
        for batch in _batched(names):
            if name == "fields":
                for stored, chunk_ids in self._store.documents_named(batch):
                    yield _fields_of(stored.document, keys_of(chunk_ids))
                continue
            there = self._store.chunks_named(batch)
            if name == "bm25":
                yield from ((chunk.chunk_id, chunk.text) for chunk in there)
            else:
                yield from self._store.vector_many(name, (chunk.chunk_id for chunk in there)).items()  # type: ignore[arg-type]

    def _opened(self, name: str, like: Any) -> Any:
        """The saved index; None if there is no usable one."""
        opened = None
        try:
            opened = _open(KINDS[name], self._folder / name, like)
        except RetrievalError as error:
            logger.info("a retrieval index is built again: %s", error)
        self._measure(name)
        return opened

    def _measure(self, kind: str) -> None:
        lengths = {}
        with suppress(OSError):  # another process is replacing it; the old files can no longer be cut
            for data in (self._folder / kind).glob("data-*"):
                for path in data.iterdir():
                    lengths[path] = path.stat().st_size
        self._lengths[kind] = lengths

    def _is_cut(self, kind: str) -> bool:
        """Whether a file that an open index maps was truncated: reading the lost bytes would raise SIGBUS.

        A deleted file was replaced, and stays available to processes that have it mapped.
        """
        for path, length in self._lengths.get(kind, {}).items():
            with suppress(FileNotFoundError):
                if path.stat().st_size < length:
                    logger.warning("%s was cut short while it was open; the index is built again", path)
                    return True
        return False

    def _save(self, index: Segmented[Any, Any], folder: Path) -> None:
        """Save an index, but not through a link, which could lead out of the index folder."""
        try:
            make_folder(self._folder, parents=False)
        except OSError as error:
            raise RetrievalError(f"The retrieval index in {folder} cannot be written: {error}.") from error
        with suppress(SavedElsewhereError):  # the saved index follows the change log
            index.save(folder)


def _all_fields(store: Store) -> Iterator[tuple[str, DocumentMetadata]]:
    """The fields of all documents. Documents written meanwhile are in the change log."""
    names, owners = bytearray(), bytearray()
    for name, owner in store.places():  # only keys, so that no chunk is read
        names += name[:KEY_BYTES]
        owners += owner[:KEY_BYTES]
    order = np.argsort(np.frombuffer(owners, dtype="S16"), kind="stable")
    chunks, owned = (np.frombuffer(column, dtype="S16")[order] for column in (names, owners))
    for stored in store.documents():
        [key] = keys_of([stored.document.document_id])
        low, high = np.searchsorted(owned, key), np.searchsorted(owned, key, side="right")
        yield _fields_of(stored.document, chunks[low:high])


def _fields_of(document: Document, chunks: NDArray[Any]) -> tuple[str, DocumentMetadata]:
    return document.document_id, DocumentMetadata(values=all_values(document), chunks=chunks)


def follow_collection(index: Index, *, whole: bool = False, notify: OnCount | None = None) -> int:
    """Bring the index's collection in Qdrant to the store's generation; returns how many points were sent or deleted.

    `whole`: send all points again, and replace a collection of another embedder. The collection is not changed if the
    index is open read-only, or if another process is sending.
    """
    collection, store, folder = index.collection, index.store, index.derived / "qdrant"
    if collection.made and not whole and (store.readonly or collection.version == store.version):
        return 0
    facts = _collected(index)
    with collection.sending:
        collection.open(*facts, replace=whole)
        if store.readonly and not collection.made:
            raise RetrievalError("Nothing of this index is in Qdrant yet: run ragkv repair on it.")
        if store.readonly or (collection.version == store.version and not whole):
            return 0
        try:
            make_folder(index.derived, parents=False)
            make_folder(folder, parents=False)
            with alone(folder, "qdrant"):
                return _send(index, facts, None if whole else collection.version, notify)
        except SavedElsewhereError:
            return 0
        except OSError as error:
            raise RetrievalError(f"{folder} cannot be locked ({refusal(error)}).") from error


def collection_state(index: Index) -> str:
    """The state, in words, of the index's collection in Qdrant."""
    store = index.store
    try:
        collection = index.collection
        collection.open(*_collected(index))
        if not collection.made:
            return "not made yet: ragkv repair, or the next question, makes it"
        if collection.version != store.version:
            return "will be brought up to date by the next question (documents have changed since)"
        if points := collection.count() - store.stats().chunks:
            what = "chunks are missing" if points < 0 else "points are left over"
            return f"{abs(points)} {what}: ragkv repair sends all again"
    except RetrievalError as error:
        return str(error)
    return "current"


def _collected(index: Index) -> tuple[str, list[ScoreKind]]:
    """The embedder and the kinds of the vectors that are in Qdrant."""
    kinds: tuple[ScoreKind, ...] = ("dense", "sparse")
    return index.encoders.require_same_embedder(), [kind for kind in kinds if kind in index.config.vectors]


def _send(
    index: Index, facts: tuple[str, list[ScoreKind]], since: tuple[int, str] | None, notify: OnCount | None
) -> int:
    """Send and delete what has changed since a version; everything if that version is unknown."""
    collection, store, now = index.collection, index.store, index.store.version
    changes = None if since is None else store.changes(Version(*since))
    if not collection.made:
        width = next((len(vector) for _, vector in store.vectors("dense")), 0)
        if not width and store.empty:
            return 0
        collection.make(*facts, width)
    update = secrets.token_hex(8)
    if changes is None:
        every = ((d.document, [c.chunk_id for c in store.chunks(d.document.document_id)]) for d in store.documents())
        points = _with_progress(_points(store, facts[1], every), notify, lambda: store.stats().chunks)
        sent = collection.send(points, update)
        collection.drop_others(update)
        collection.record(*facts, now)
        return sent
    named = chain.from_iterable(map(store.documents_named, _batched(sorted(changes.documents))))
    changed = [(stored.document, chunk_ids) for stored, chunk_ids in named]
    total = sum(len(chunk_ids) for _, chunk_ids in changed)
    sent = collection.send(_with_progress(_points(store, facts[1], changed), notify, lambda: total), update)
    there = chain.from_iterable(map(store.chunks_named, _batched(list(changes.chunks))))
    gone = changes.chunks - {id_key(chunk.chunk_id) for chunk in there}
    collection.drop(gone)
    collection.record(*facts, changes.version)
    return sent + len(gone)


def _batched(items: Sequence[T]) -> Iterator[Sequence[T]]:
    return (items[start : start + _BATCH] for start in range(0, len(items), _BATCH))


def _points(
    store: Store, kinds: Sequence[ScoreKind], documents: Iterable[tuple[Document, Sequence[str]]]
) -> Iterator[Point]:
    """The points of all chunks of these documents."""
    for document, chunk_ids in documents:
        terms = [term(name, value) for name, values in all_values(document).items() for value in values]
        for batch in _batched(chunk_ids):
            vectors = {kind: store.vector_many(kind, batch) for kind in kinds}
            for chunk_id in batch:
                own = {kind: rows[chunk_id] for kind, rows in vectors.items() if chunk_id in rows}
                yield Point(chunk_id=chunk_id, terms=terms, vectors=own)


def _with_progress(pairs: Iterable[T], notify: OnCount | None, total: Callable[[], int]) -> Iterable[T]:
    """The same pairs; calls `notify` at the beginning, after every batch and at the end."""
    if notify is None:
        return pairs

    def counted() -> Iterator[T]:
        most, done = total(), 0
        for done, pair in enumerate(pairs):
            if not done % _BATCH:
                notify(done, most)
            yield pair
        notify(most, most)

    return counted()


def _once(pairs: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Pairs without repeated ids: a document may be written while all are read."""
    seen: set[str] = set()
    for chunk_id, content in pairs:
        if chunk_id not in seen:
            seen.add(chunk_id)
            yield chunk_id, content


def _open(kind: type[Any], folder: Path, like: Any = None) -> Any:
    """Open a retrieval index; `RetrievalError` if it is unreadable or behind a link."""
    if os.path.lexists(folder.parent) and not is_folder(folder.parent):
        raise RetrievalError(f"{folder.parent} is not a folder of the index; it is made again from the store.")
    return kind.load(folder, like=like)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkView:
    """A chunk with everything stored for it. `vectors` describes each kind; `before` and `after` are neighbours."""

    chunk: Chunk
    document: Document
    kv: tuple[KVRecord, ...]
    vectors: dict[str, str]
    before: Chunk | None
    after: Chunk | None

    def to_json(self) -> dict[str, Any]:
        """The object that `ragkv show --json` prints."""
        chunk = asdict(self.chunk)
        return {
            **{key: value for key, value in chunk.items() if key not in ("token_ids", "document_id")},
            "tokens": len(self.chunk.token_ids),
            "document": {**asdict(self.document), "metadata": dict(self.document.metadata)},
            "kv": [asdict(record) for record in self.kv],
            "vectors": self.vectors,
            "before": None if self.before is None else self.before.chunk_id,
            "after": None if self.after is None else self.after.chunk_id,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentView:
    """A document with the sizes of what is stored for it."""

    document: Document
    stats: DocumentStats

    def to_json(self) -> dict[str, Any]:
        """The object that `ragkv ls --json` prints for a document."""
        return {
            **self.stats.to_json(),
            "media_type": self.document.media_type,
            "title": self.document.title,
            "metadata": dict(self.document.metadata),
        }


def select(store: Store, names: Sequence[str] = (), where: Sequence[str] = ()) -> list[StoredDocument]:
    """The documents that `names` select (`match`) and that meet the conditions `where`; without names, all that do.

    UsageError for a name without a document or an ambiguous one, and if no document meets `where`.
    """
    documents = list(store.documents())
    chosen = meeting(documents, where)
    if names:
        met = {stored.document.document_id for stored in chosen}
        chosen = [stored for stored in match(documents, names) if stored.document.document_id in met]
    if where and not chosen:
        raise UsageError(unmatched(where), param="where")
    return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentPage:
    """A page of documents, ordered by id. The next page begins after the id `after`, which is None on the last page."""

    documents: tuple[DocumentView, ...]
    after: str | None


def list_documents(
    store: Store,
    chosen: Iterable[StoredDocument] | None = None,
    *,
    only: Callable[[Document], bool] | None = None,
    after: str = "",
    limit: int | None = None,
) -> DocumentPage:
    """A page of the documents `chosen` (None: all) for which `only` holds, with their sizes, ordered by id.

    It has at most `limit` documents after the id `after`. Without `chosen`, only rows up to the last one returned are
    read.
    """
    if chosen is not None:
        ordered = sorted((one.document for one in chosen), key=_place)
        documents: Iterator[Document] = iter([one for one in ordered if not after or _place(one) > document_key(after)])
    else:
        documents = (stored.document for stored in store.documents(after=after))
    if only is not None:
        documents = filter(only, documents)
    shown = {document.document_id: document for document in islice(documents, limit)}
    more = next(documents, None) is not None
    views = tuple(DocumentView(document=shown[stats.document], stats=stats) for stats in store.document_stats(shown))
    return DocumentPage(documents=views, after=list(shown)[-1] if more and shown else None)


def _place(document: Document) -> bytes:
    return document_key(document.document_id)


def chunk_named(store: Store, name: str) -> Chunk:
    """The chunk with this id or unique prefix of an id, or at DOCUMENT:ORDINAL; UsageError if there is none."""
    if not name.strip():
        raise UsageError("Name a chunk: an id, the start of one, or DOCUMENT:ORDINAL as in notes.md:0.")
    if (whole := store.chunk(name)) is not None:
        return whole
    document, colon, ordinal = name.rpartition(":")
    if colon and document and ordinal.isascii() and ordinal.isdecimal():
        stored, *others = match(list(store.documents()), [document])
        if others:
            raise UsageError(f"{document!r} means {1 + len(others)} documents, and a chunk belongs to one; name one.")
        for chunk in islice(store.chunks(stored.document.document_id), int(ordinal), None):
            return chunk
        raise UsageError(f"{document} ends with chunk {stored.chunks - 1} (the first is 0); there is no {ordinal}.")
    chunks = list(islice((chunk for chunk in store.chunks() if chunk.chunk_id.startswith(name)), 4))
    if not chunks:
        raise UsageError(
            f"No chunk's id begins with {name!r}; ragkv query --json names those of an answer, and DOCUMENT:NUMBER "
            "means one of a document that ragkv ls lists."
        )
    if len(chunks) > 1:
        ids = ", ".join(chunk.chunk_id for chunk in chunks[:3])
        raise UsageError(f"{name!r} begins several ids ({ids}{', …' if len(chunks) > 3 else ''}); write more of it.")
    return chunks[0]


def look_at(store: Store, chunk: Chunk) -> ChunkView:
    """Everything stored for a chunk."""
    stored = store.document(chunk.document_id)
    if stored is None:
        raise UsageError(f"The document of chunk {chunk.chunk_id} is gone: another process has deleted it.")
    start = max(0, chunk.ordinal - 1)
    around = {one.ordinal: one for one in islice(store.chunks(chunk.document_id), start, chunk.ordinal + 2)}
    vectors: dict[str, str] = {}
    for kind in VECTOR_KINDS:
        vector = store.vector_many(kind, [chunk.chunk_id]).get(chunk.chunk_id)
        if isinstance(vector, np.ndarray):
            vectors[kind] = f"{' x '.join(map(str, vector.shape))} {vector.dtype}"
        elif vector is not None:
            vectors[kind] = f"{len(vector)} weights"
    return ChunkView(
        chunk=chunk,
        document=stored.document,
        kv=tuple(store.kv_of(chunk.chunk_id)),
        vectors=vectors,
        before=around.get(chunk.ordinal - 1),
        after=around.get(chunk.ordinal + 1),
    )


class Finder:
    """Searches one index on disk. Thread-safe."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._store = index.store
        self._derived = Derived(index.store, index.derived, index.write_behind.keep)
        self._inventory = DocumentFilter(partial(self._derived.index, "fields"))

    def find(
        self,
        query: Question,
        *,
        on_candidates: Callable[[list[ScoredChunk]], None] | None = None,
    ) -> list[ScoredChunk]:
        """The best chunks, best first; `on_candidates` gets the likely winners before reranking."""
        query = query.completed(self._index.config)
        mode = cast("Mode", query.retrieval)
        searcher = self.searcher(mode, rerank=query.rerank)
        among = self._among(query.where, query.only)
        pool = max(query.top_k, query.candidates)
        count = pool if query.rerank else query.top_k
        rankings = [
            searcher.candidates(text, mode=mode, count=count, pool=pool, among=among) for text in query.searches
        ]
        candidates = interleaved(rankings, count, lambda candidate: candidate.chunk_id)  # of one ranking: the same
        known = self._fetch(candidates)
        # another process may have deleted a chunk since the search
        candidates = [candidate for candidate in candidates if candidate.chunk_id in known]
        if on_candidates is not None:
            on_candidates([candidate.scored(*known[candidate.chunk_id]) for candidate in candidates[: query.top_k]])
        if query.rerank and candidates:
            candidates = searcher.rerank(query.searches[0], candidates)
        return [candidate.scored(*known[candidate.chunk_id]) for candidate in candidates[: query.top_k]]

    def documents(self, where: Sequence[str]) -> list[StoredDocument]:
        """The documents that meet `where`, ordered by id. UsageError if there is none.

        Without the index of fields (`ragkv.index.filters`), all documents are read.
        """
        if not where or not os.path.lexists(self._index.derived / "fields"):
            return select(self._store, where=where)
        ids = sorted(self._inventory.documents(where), key=document_key)
        # another process may have changed or deleted some
        return meeting(list(filter(None, map(self._store.document, ids))), where)

    def word_weights(self, words: Sequence[str]) -> Mapping[str, float]:
        """The rarity of words by the BM25 index (`ragkv.index.snippets`); empty if there is none to use."""
        with suppress(RetrievalError, StoreError):
            if os.path.lexists(self._index.derived / "bm25"):
                weights: dict[str, float] = self._current("bm25").rarity(words)
                return weights
        return {}

    def catch_up(self, *, build: bool = True, notify: Callable[[str, int, int], None] | None = None) -> None:
        """Update the existing retrieval indexes, so that no question has to.

        `build`: also build those that the index's mode and `--where` need. A failure is logged and left to questions.
        `notify(name, done, total)` reports progress; if it raises, the rest is left to the next ingest.
        """
        if not self._store.generation:
            return
        config = self._index.config
        kinds = self._store.vector_kinds() & set(config.vectors)  # without loading the embedder
        known = [name for name in ("bm25", "fields", *kinds) if name in KINDS]
        if config.qdrant.url and kinds:
            known.append("qdrant")
        wanted = {name for name in known if os.path.lexists(self._index.derived / name)}
        if build:
            wanted.update(indexes_of(config.retrieval, kinds), ("fields",))
        if config.qdrant.url and wanted & {"dense", "sparse"}:
            wanted = wanted - {"dense", "sparse"} | {"qdrant"}
        for name in sorted(wanted):
            try:
                progress = None if notify is None else partial(notify, name)
                if name == "qdrant":
                    follow_collection(self._index, notify=progress)
                else:
                    self._current(name, progress)
                    self._derived.merge(name)
            except (RetrievalError, StoreError, ConfigError, ModelLoadError) as error:
                level = logging.WARNING if name == "qdrant" else logging.INFO
                logger.log(level, "the %s index is left to the next question: %s", name, error)

    def _current(self, name: str, notify: OnCount | None = None) -> Any:
        """The index called `name`, updated to the store's generation."""
        if name not in ("dense", "sparse"):
            return self._derived.index(name, notify=notify)
        config = self._index.config
        if config.qdrant.url:
            follow_collection(self._index, notify=notify)
            kind: Any = name
            return QdrantIndex(
                collection=self._index.collection, score_kind=kind, vectors=partial(self._store.vector_many, kind)
            )
        factory = config.index_factory if name == "dense" else None
        embedder = self._index.encoders.require_same_embedder()
        return self._derived.index(name, embedder=embedder, factory=factory, notify=notify)

    def searcher(self, mode: Mode, *, rerank: bool) -> Searcher:
        """A searcher over the retrieval indexes that the mode needs, updated to the store's generation."""
        encoders, config = self._index.encoders, self._index.config
        searched: tuple[str, ...] = ("bm25",)
        if mode != "bm25":
            encoders.require_same_embedder()
            kinds = encoders.kinds
            if why := why_not_served(mode, kinds, "This index"):
                raise RetrievalError(why, param="retrieval")
            searched = indexes_of(mode, kinds)
        colbert: Any = partial(self._store.vector_many, "colbert")
        return Searcher(
            embedder=None if mode == "bm25" else encoders.embedder,
            indexes={name: self._current(name) for name in searched},
            texts=lambda ids: {name: chunk.text for name, chunk in self._store.chunk_many(ids).items()},
            colbert=colbert,
            reranker=encoders.reranker if rerank else None,
            fusion=config.fusion,
        )

    def _fetch(self, found: Sequence[Found]) -> Mapping[str, tuple[Chunk, str]]:
        """The found chunks that are still there, by id, each with its document's source."""
        chunks = self._store.chunk_many(each.chunk_id for each in found)
        documents = {chunk.document_id for chunk in chunks.values()}
        sources = {d: stored.document.source for d in documents if (stored := self._store.document(d))}
        return {name: (chunk, sources.get(chunk.document_id, chunk.document_id)) for name, chunk in chunks.items()}

    def _among(self, where: Sequence[str], only: Callable[[Document, Chunk], bool] | None) -> IdSet | None:
        """The chunks that may be found, or None for all. UsageError if no document meets `where`.

        `only` is called for every chunk of the matching documents, so all of them are read.
        """
        if only is None:
            return self._inventory.among(where) if where else None
        return IdSet.of(
            [
                chunk.chunk_id
                for stored in self.documents(where)
                for chunk in self._store.chunks(stored.document.document_id)
                if only(stored.document, chunk)
            ]
        )
