"""Maintain an index: verify, repair, collect garbage, copy, delete, and prefill KV ahead of questions.

The store does this for rows and checksums. This module adds what surrounds the store: the model and settings that
encode lost KV again, the retrieval indexes that are derived from it, and the configuration that makes a folder an
index. KV that is prefilled ahead is recorded as expected uses and encoded in descending order of its eviction score, so
that new KV never evicts KV encoded before it.
"""

from __future__ import annotations

import heapq
import logging
import os
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragkv.config import CONFIG_FILE, NONE
from ragkv.errors import CorruptStoreError, RagkvError, RetrievalError, StoreError, StoreFullError, UsageError
from ragkv.index.answer import validate_task
from ragkv.index.index import Index, damaged_metadata, indexes_of, read_metadata
from ragkv.index.kv_source import KVSource
from ragkv.index.search import Finder, collection_state, derived_states, follow_collection, select, stale_derived
from ragkv.ingest import batches_of, chunk_vectors, encode_identities
from ragkv.question import Asked
from ragkv.store import (
    Collection,
    Copy,
    Holder,
    KVIdentity,
    Manifest,
    Notify,
    Repair,
    Store,
    StoredDocument,
    Use,
    Verification,
    sync_path,
)
from ragkv.store.maintenance.eviction import used
from ragkv.store.tables import digest
from ragkv.types import Chunk, Encoding
from ragkv.util.files import read_plain, refusal, remove_tree, write_plain

if TYPE_CHECKING:
    from ragkv.attention.kv import ChunkKV
    from ragkv.store import ChunkVectors

logger = logging.getLogger(__name__)


class IndexRepairSource:
    """The `RepairSource` of an index; the model is loaded only when something has to be encoded."""

    def __init__(self, index: Index, kv_source: KVSource) -> None:
        self._index = index
        self._kv_source = kv_source

    def identities(self, chunk: Chunk) -> list[KVIdentity]:
        if not self._index.has_tokens(chunk.token_ids):
            return []  # the model cannot encode unknown tokens
        _ = self._index.shape  # records the model's true shape first, so that new KV matches it
        try:
            return [self._kv_source.identities(encoding, [chunk])[0] for encoding in self._index.encodings]
        except CorruptStoreError:
            return []  # an earlier chunk, which it saw, cannot be read

    def encode(self, identities: Sequence[KVIdentity]) -> list[ChunkKV]:
        """The KV of each identity, in order."""
        loader = self._kv_source
        made = encode_identities(self._index.model, identities, loader.prefix)
        return [made[identity] for identity in identities]

    def embed(self, chunks: Sequence[Chunk]) -> Mapping[str, ChunkVectors] | None:
        """The chunks' vectors as in an ingest; None for an index without an embedder."""
        embedder = self._index.encoders.embedder
        return None if embedder is None else chunk_vectors(embedder, chunks, self._index.config.vectors)


def delete_from_tiers(index: Index) -> int:
    """Delete from the shared tiers what no chunk needs any more; what cannot be reached stays noted for `gc`."""
    store, tiers, deleted_values = index.store, index.tiers, 0
    while tiers is not None and (keys := store.tombstones()):
        deleted = store.purge_tombstones(keys, tiers.delete)
        if deleted is None:
            break
        deleted_values += deleted
    return deleted_values


def _weight(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def copy_index(index: Index, path: Path, *, compact: bool, verify: bool, on_progress: Notify | None) -> Copy:
    """Copy a whole index to `path`, which must be new or empty; it appears there only when it is complete.

    The retrieval indexes are left out; the first question rebuilds them.
    """
    require_free(path, index.folder)
    with partial_folder(path) as partial:
        size = index.store.maintenance.copy(partial, compact=compact, on_progress=on_progress)
        write_plain(partial / CONFIG_FILE, read_plain(index.folder / CONFIG_FILE))
        if verify:
            with Store.open(partial, readonly=True) as copied:
                verification = copied.maintenance.verify(on_progress=on_progress)
            (partial / "store" / "lock.mdb").unlink(missing_ok=True)
            if not verification.ok:
                raise StoreError(
                    f"the copy has {len(verification.findings)} faults, of which the first is "
                    f"{verification.findings[0]}; "
                    f"nothing was written to {path}"
                )
        sync_path(partial)
        partial.rename(path)
        sync_path(path.parent)
    before, _ = index.store.sizes()
    return Copy(path=path, bytes_before=before, bytes_after=size, verified=verify)


@contextmanager
def renamed(folder: Path, name: Path | str) -> Iterator[None]:
    """In messages of errors, `name` stands for a folder that the user does not know, and that is deleted with them."""
    try:
        yield
    except RagkvError as error:
        error.args = (str(error).replace(str(folder), str(name)), *error.args[1:])
        raise


@contextmanager
def partial_folder(path: Path) -> Iterator[Path]:
    """A new folder beside `path`, to be renamed to it. At the end it is deleted, with any empty parents that were made
    for it. StoreError for an OSError; errors name `path`."""
    partial = Path(path.parent.resolve(), f".{path.name}.partial-{secrets.token_hex(4)}")
    new_parents = [parent for parent in partial.parents if not parent.exists()]
    try:
        partial.mkdir(parents=True)
        with renamed(partial, path):
            yield partial
    except OSError as error:
        raise StoreError(f"{path} cannot be written ({refusal(error)})") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # after a success it may have been renamed
        with suppress(OSError):  # not empty
            for parent in new_parents:
                parent.rmdir()


def require_free(path: Path, index: Path) -> None:
    """UsageError unless `path` is a new or empty folder outside of the index at `index`."""
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file; name a folder that does not exist yet.")
    inside, own = path.resolve(), index.resolve()
    if inside == own or own in inside.parents:
        raise UsageError(f"{path} is inside the index at {index}; name a folder outside of it.")
    if path.is_dir() and any(path.iterdir()):
        raise UsageError(f"{path} is not empty; name a folder that does not exist yet.")


def delete_document(index: Index, document_id: str) -> bool:
    """Delete a document and what only it needed. On a full disk, the retrieval indexes may be deleted for room."""
    _ = index.tiers  # so that the store notes what they may hold of this document
    try:
        deleted = index.store.delete_document(document_id)
    except StoreFullError:
        if not os.path.lexists(index.derived):
            raise
        with suppress(OSError):
            remove_tree(index.derived)  # can be rebuilt, and frees the missing space
        deleted = index.store.delete_document(document_id)
    delete_from_tiers(index)
    return deleted


Wanted = dict[KVIdentity, tuple[str, int]]
"""KV with expected uses: the id of a chunk that needs it, and the number of uses."""


@dataclass(slots=True, kw_only=True)
class WarmReport:
    """The result of `warm`, counted in chunk KVs.

    `wanted` were `present`, `encoded` now, or `refused` because the budget is full of KV with a higher score. `tokens`,
    `bytes` and `seconds` are for those that were made.
    """

    wanted: int = 0
    present: int = 0
    encoded: int = 0
    refused: int = 0
    tokens: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """The object that `ragkv warm --json` prints."""
        values = asdict(self)
        return {"made": values.pop("encoded"), **values, "seconds": round(self.seconds, 3)}


def of_questions(
    index: Index,
    kv_source: KVSource,
    finder: Finder,
    questions: Iterable[Asked],
    on_question: Callable[[int], None],
) -> Wanted:
    """The KV that these questions would read; none for a question that finds nothing."""
    times: Counter[KVIdentity] = Counter()
    owners: dict[KVIdentity, str] = {}
    for number, asked in enumerate(questions):
        on_question(number)
        task = validate_task(index.config, asked)
        encoding = task.engine.reads
        if encoding is None or task.engine.whole_documents:
            continue
        try:
            scored_chunks = finder.find(task.query)[: task.engine.most_chunks]
        except RetrievalError:
            continue
        identities = kv_source.identities(encoding, [scored.chunk for scored in scored_chunks])
        for scored, identity in zip(scored_chunks, identities, strict=True):
            times[identity] += 1
            owners[identity] = scored.chunk.chunk_id
    return {identity: (owners[identity], count) for identity, count in times.items()}


def of_documents(index: Index, kv_source: KVSource, documents: Iterable[StoredDocument]) -> Wanted:
    """The chunks of these documents, without duplicates."""
    wanted: Wanted = {}
    encodings = index.encodings
    for stored in documents:
        chunks = list(index.store.chunks(stored.document.document_id))
        keys = [kv_source.identities(encoding, chunks) for encoding in encodings]
        for chunk, *identities in zip(chunks, *keys, strict=True):
            wanted |= dict.fromkeys(identities, (chunk.chunk_id, 1))
    return wanted


def of_the_most_used(index: Index, kv_source: KVSource, count: int) -> Wanted:
    """The `count` chunks used most often and recently, in the encodings used.

    If the prompt, the model or `[encoding]` has changed since, in those of the index's engines.
    """
    encodings = index.encodings
    after = Encoding.CONTEXT if index.config.encoding.context else Encoding.PREFIXED
    weights: dict[bytes, float] = {}
    keys: set[bytes] = set()
    for key, row in index.store.uses():
        keys.add(key)
        weights[row.owner] = used(weights[row.owner], row.weight) if row.owner in weights else row.weight
    best = heapq.nlargest(count, weights, key=lambda owner: (weights[owner], owner))
    chunks = index.store.chunks_of(best)
    wanted: Wanted = {}
    for owner in best:
        if owner in chunks:
            kinds = dict.fromkeys((Encoding.STANDALONE, after, *encodings))
            each = {kind: kv_source.identities(kind, [chunks[owner]])[0] for kind in kinds}
            seen = [kind for kind, identity in each.items() if identity.key() in keys]
            wanted |= {each[kind]: (chunks[owner].chunk_id, 1) for kind in seen or encodings}
    return wanted


def _expected(index: Index, missing: Mapping[KVIdentity, tuple[str, int]]) -> list[KVIdentity]:
    """Record the expected uses of KV without recorded ones; returns all by eviction score, highest first.

    KV with equal uses stays in the given order.
    """
    known = {key: row.weight for key, row in index.store.uses_of([identity.key() for identity in missing]).items()}
    new = {
        identity.key(): Use(
            tokens=identity.tokens,
            nbytes=index.shape.nbytes(identity.tokens),
            owner=digest(owner),
            wanted=times,
        )
        for identity, (owner, times) in missing.items()
        if identity.key() not in known
    }
    if new:
        index.store.record_uses(new)
    rows = index.store.uses_of([identity.key() for identity in missing])
    return sorted(missing, key=lambda identity: -rows[identity.key()].weight)


class IndexMaintenance:
    """`rag.maintenance`: check, repair, clean, copy and warm an index (docs/operations.md)."""

    def __init__(self, index: Index, kv_source: KVSource, finder: Finder) -> None:
        self._index = index
        self._kv_source = kv_source
        self._finder = finder

    def verify(self, *, quick: bool = False, on_progress: Notify | None = None) -> Verification:
        """Check every row, checksum and reference, and the retrieval indexes; `quick` skips the payloads of KV."""
        index = self._index
        store = index.store
        verification = store.maintenance.verify(quick=quick, on_progress=on_progress)
        verification = replace(verification, findings=(*damaged_metadata(store), *verification.findings))
        needed = set(indexes_of(index.config.retrieval, index.config.vectors))
        if not index.config.qdrant.url:
            return replace(verification, derived=derived_states(index.derived, needed, store.generation))
        derived = derived_states(index.derived, needed - {"dense", "sparse"}, store.generation)
        if index.config.embedder != NONE:
            derived["qdrant"] = collection_state(index)
        return replace(verification, derived=derived)

    def verify_tiers(self) -> list[dict[str, Any]]:
        """For each shared tier: how many of the index's records are intact there, and the names of damaged ones."""
        return [] if (tiers := self._index.tiers) is None else tiers.check(self._index.store.identities())

    def repair(
        self,
        *,
        encode: bool = True,
        dry_run: bool = False,
        timeout: float | None = None,
        on_wait: Callable[[Holder], None] | None = None,
        on_progress: Notify | None = None,
    ) -> Repair:
        """Repair what `verify` finds; the model is loaded if KV has to be encoded again.

        `encode=False` drops bad KV, which the first question that needs it encodes again.
        """
        store, config = self._index.store, self._index.config
        with nullcontext() if dry_run else store.writing("ragkv repair", timeout=timeout, on_wait=on_wait):
            report = self._repair_store(encode=encode, dry_run=dry_run, on_progress=on_progress)
            if not dry_run:
                if config.qdrant.url and config.embedder != NONE:
                    try:
                        report.points = follow_collection(self._index, whole=True)
                    except RetrievalError as error:  # must not lose the report of the repair
                        logger.warning("the collection in Qdrant is not changed: %s", error)
                self._finder.catch_up(build=False)
            return report

    def _repair_store(self, *, encode: bool, dry_run: bool, on_progress: Notify | None) -> Repair:
        """Repair the store; if the name of the chunks' model was lost, record it from the KV."""
        index = self._index
        store = index.store
        facts = damaged_metadata(store)
        for problem in () if dry_run else facts:
            store.drop_meta(problem.key.removeprefix(b"fact/").decode())
        report = store.maintenance.repair(
            IndexRepairSource(index, self._kv_source), encode=encode, dry_run=dry_run, on_progress=on_progress
        )
        report.problems = (*facts, *report.problems)
        report.facts += [problem.key.removeprefix(b"fact/").decode() for problem in facts]
        if "model" in report.facts and not dry_run:
            # If the KV comes from several models, "unknown" makes every question refuse the index.
            models = store.maintenance.models()
            fingerprint = models.pop() if len(models) == 1 else "unknown"
            if fingerprint == index.fingerprint:
                fingerprint = index.cut_by
            store.put_meta("model", {"name": index.config.model, "fingerprint": fingerprint})
        return report

    def gc(
        self,
        *,
        dry_run: bool = False,
        timeout: float | None = None,
        on_wait: Callable[[Holder], None] | None = None,
        on_progress: Notify | None = None,
    ) -> Collection:
        """Delete what nothing needs: KV without a document or of an old prefix, and stale derived files.

        Waits until no ingest runs, because the KV of an incomplete document looks like garbage.
        """
        store = self._index.store
        with nullcontext() if dry_run else store.writing("ragkv gc", timeout=timeout, on_wait=on_wait):
            return self._collect(dry_run=dry_run, on_progress=on_progress)

    def _collect(self, *, dry_run: bool, on_progress: Notify | None) -> Collection:
        """Delete garbage in the store and outdated retrieval indexes in `derived/`."""
        index = self._index
        store = index.store
        prompt = read_metadata(store, "prompt")
        wanted = None
        if prompt is not None:
            wanted = (prompt["model"], tuple(prompt["prefix_ids"]))

        def in_use(manifest: Manifest) -> bool:
            """Whether the record is the current prompt's prefix; if that is not recorded, keep all."""
            return wanted is None or wanted == (manifest.identity.model, manifest.identity.chunk_ids)

        derived, derived_bytes = 0, 0
        # first, because it frees space on a full disk
        for path in stale_derived(index.derived, lambda since: store.changes(since) is not None):
            with suppress(FileNotFoundError):  # a question that saves deletes it too
                derived, derived_bytes = derived + 1, derived_bytes + _weight(path)
                if not dry_run:
                    remove_tree(path)
        collection = store.maintenance.collect(in_use=in_use, dry_run=dry_run, on_progress=on_progress)
        collection.derived, collection.derived_bytes = derived, derived_bytes
        if index.tiers is not None:
            collection.tiers = len(store.tombstones()) + collection.uses if dry_run else delete_from_tiers(index)
        return collection

    def backup(self, path: str | Path, *, verify: bool = False, on_progress: Notify | None = None) -> Copy:
        """Copy the index to `path` from one snapshot, while others read and write."""
        return copy_index(self._index, Path(path), compact=False, verify=verify, on_progress=on_progress)

    def compact(self, path: str | Path, *, verify: bool = False, on_progress: Notify | None = None) -> Copy:
        """Like `backup`, but without free pages: smaller, and without deleted content."""
        return copy_index(self._index, Path(path), compact=True, verify=verify, on_progress=on_progress)

    def wanted(
        self,
        *,
        questions: Iterable[Asked] = (),
        documents: Sequence[str] | None = None,
        where: Sequence[str] = (),
        most: int | None = None,
        on_question: Callable[[int], None] = lambda done: None,
    ) -> Wanted:
        """The KV for `warm` to encode: what `questions` would read (`on_question` is called with the number searched so
        far), the chunks of `documents` (names or patterns; with `where`, those that meet it), or the `most` chunks that
        were read most.

        UsageError for a wrong option, or a name without a document.
        """
        index, kv_source = self._index, self._kv_source
        if most is not None:
            return of_the_most_used(index, kv_source, most)
        if documents is not None:
            chosen = select(index.store, documents, where) if documents else self._finder.documents(where)
            return of_documents(index, kv_source, chosen)
        return of_questions(index, kv_source, self._finder, questions, on_question)

    def warm(self, wanted: Wanted, *, on_progress: Callable[[WarmReport], None] = lambda done: None) -> WarmReport:
        """Encode the KV that is missing, in batches and within the index's budget; an interrupted run can be continued
        by another. StoreError if it cannot be written.
        """
        index, kv_source = self._index, self._kv_source
        report = WarmReport(wanted=len(wanted))
        index.open_budget()
        stored = index.store.has_many(wanted)
        missing = {identity: of for identity, of in wanted.items() if identity not in stored}
        report.present = len(wanted) - len(missing)
        on_progress(report)
        for batch in batches_of(stored if index.tiers is not None else ()):
            index.offer(list(index.store.get_many(batch).items()))
        encoded = 0
        for batch in batches_of(_expected(index, missing) if missing else ()):
            fetched = index.fetch(batch)
            new = [identity for identity in batch if identity not in fetched]
            started = time.perf_counter()
            encoded += sum(identity.tokens for identity in new)
            encoded_kv = encode_identities(index.model, new, kv_source.prefix)
            report.seconds += time.perf_counter() - started
            index.offer(list(encoded_kv.items()))
            encoded_kv |= {identity: kv for identity, (_, kv) in fetched.items()}
            owned = ((identity, kv, missing[identity][0]) for identity, kv in encoded_kv.items())
            stored_keys = index.store.put_many(owned)
            report.encoded += len(stored_keys)
            report.tokens += sum(kv.tokens for identity, kv in encoded_kv.items() if identity.key() in stored_keys)
            report.bytes += sum(kv.nbytes for identity, kv in encoded_kv.items() if identity.key() in stored_keys)
            on_progress(report)
            if not stored_keys:
                break  # the rest has lower scores
        report.refused = len(missing) - report.encoded
        if encoded:
            index.store.record_uses({}, seconds_per_token=report.seconds / encoded)
        return report

    def settle(self) -> None:
        """Wait until all KV that questions have encoded is stored, and their uses of KV are recorded."""
        self._index.write_behind.settle(whole=True)
        if self._index.tiers is not None:
            self._index.tiers.settle()
