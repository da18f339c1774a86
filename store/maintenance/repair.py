"""Repair what `verify` finds: make a row again from intact ones where that is certain, else drop it.

KV is encoded again from a chunk's tokens, vectors from its text; places, references and counts follow from other rows.
A document whose own row, text or chunk is damaged is deleted, because answers from the rest would be wrong. It is
named, and the next ingest reads it again from its source. Its KV stays as orphans, so that nothing is encoded then.

Repair verifies and repairs in rounds until nothing is found. Each step is one transaction that checks again before it
changes anything, so a repair may be killed, repeated, and run beside queries.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ragkv.errors import CorruptStoreError
from ragkv.store.codecs import Codec, DamagedError
from ragkv.store.counters import advance, generation, recount, update_unreferenced
from ragkv.store.documents import drop_rows, drop_vectors, read_vector
from ragkv.store.environment import Database
from ragkv.store.maintenance.verify import (
    Counter,
    Notify,
    Problem,
    check_change,
    check_metadata,
    check_place,
    check_segments,
    check_uses,
    chunk_named,
    chunk_of,
    chunk_ordinals,
    document_digests,
    find_record,
    most_chunks,
    verify,
)
from ragkv.store.record import KVIdentity, encode_record
from ragkv.store.tables import (
    INDEX_OWNER,
    PLACE_BYTES,
    VALUE_BYTES,
    VECTOR_KINDS,
    ChunkVectors,
    StoredDocument,
    Transaction,
    chunk_key,
    digest,
    document_digest,
    document_key,
    for_each,
    pack_document,
    parse_document,
    parse_text,
    vector_rows,
)
from ragkv.types import Chunk
from ragkv.util import batches

if TYPE_CHECKING:
    from ragkv.attention.kv import ChunkKV


class RepairSource(Protocol):
    """Encodes and embeds chunks for a repair; the store cannot do that.

    Its methods are called outside of transactions.
    """

    def identities(self, chunk: Chunk) -> Sequence[KVIdentity]:
        """The identities of this chunk's KV that the index may need with its current configuration."""

    def encode(self, identities: Sequence[KVIdentity]) -> Sequence[ChunkKV]:
        """Encode these identities."""

    def embed(self, chunks: Sequence[Chunk]) -> Mapping[str, ChunkVectors] | None:
        """The chunks' vectors by chunk id; None if the index has no embedder."""


class UnrepairableError(Exception):
    """A document cannot be rebuilt; the message is the reason, as a clause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DamagedDocument:
    """A document with intact chunks in one snapshot; `row` and `generation` show whether it has changed since.

    `extra` are the ordinals of rows beyond the document's count, `bad_vectors` those of chunks with an unreadable
    vector.
    """

    key: bytes
    row: bytes
    generation: int
    stored: StoredDocument
    chunks: list[Chunk]
    extra: list[int]
    bad_vectors: set[int]

    @property
    def digest(self) -> bytes:
        """The digest of the document's id."""
        return document_digest(self.key)


def find_damage(txn: Transaction, key: bytes) -> DamagedDocument:
    """Read a document with all its rows; `UnrepairableError` unless its row, text and chunks are intact."""
    row = bytes(txn.get("documents", key) or b"")
    try:
        stored = parse_document(row)
    except CorruptStoreError as error:
        raise UnrepairableError("its row is damaged") from error
    document = document_digest(key)
    try:
        parse_text(txn.get("texts", document) or b"")
    except CorruptStoreError as error:
        raise UnrepairableError("its text is lost") from error
    ordinals = chunk_ordinals(txn, document)
    if stored.chunks > most_chunks(ordinals):
        raise UnrepairableError(f"it counts {stored.chunks} chunks, of which {len(ordinals)} are there")
    chunks = []
    for ordinal in range(stored.chunks):
        place = chunk_key(document, ordinal)
        chunk, _ = chunk_of(txn, place)
        if chunk is None or (chunk.document_id, chunk.ordinal) != (stored.document.document_id, ordinal):
            raise UnrepairableError(f"its chunk {ordinal} is lost")
        if _is_taken(txn, chunk, place):
            raise UnrepairableError("its chunk ids are another document's")
        chunks.append(chunk)
    return DamagedDocument(
        key=key,
        row=row,
        generation=generation(txn),
        stored=stored,
        chunks=chunks,
        extra=sorted(ordinals - set(range(stored.chunks))),
        bad_vectors={ordinal for ordinal in range(stored.chunks) if _has_bad_vector(txn, chunk_key(document, ordinal))},
    )


def repair_document(damaged: DamagedDocument, vectors: Mapping[str, ChunkVectors], txn: Transaction) -> bool:
    """Make places, counts and these vectors of a document again; False if it has changed since it was read."""
    if generation(txn) != damaged.generation or bytes(txn.get("documents", damaged.key) or b"") != damaged.row:
        return False
    for ordinal in damaged.extra:
        txn.delete("chunks", chunk_key(damaged.digest, ordinal))
    for chunk in damaged.chunks:
        place = chunk_key(damaged.digest, chunk.ordinal)
        txn.put("places", digest(chunk.chunk_id), place)
        if chunk.ordinal in damaged.bad_vectors:
            drop_vectors(txn, place)
            for key, part in vector_rows(vectors[chunk.chunk_id], place):
                txn.put("vectors", key, part)
    tokens = sum(len(chunk.token_ids) for chunk in damaged.chunks)
    txn.put("documents", damaged.key, pack_document(replace(damaged.stored, tokens=tokens)))
    advance(txn)
    return True


def _has_bad_vector(txn: Transaction, chunk: bytes) -> bool:
    try:
        for kind in VECTOR_KINDS:
            read_vector(txn, kind, chunk)
    except DamagedError:
        return True
    return False


def _is_taken(txn: Transaction, chunk: Chunk, at: bytes) -> bool:
    """Whether the chunk's id is also that of a chunk elsewhere."""
    home = txn.get("places", digest(chunk.chunk_id))
    if home is None or bytes(home) == at:
        return False
    other, _ = chunk_of(txn, bytes(home))
    return other is not None and other.chunk_id == chunk.chunk_id


_ROUNDS = 5
_VECTORS_BYTES = 1 << 20
"""More than the vectors of nearly any chunk."""
_BATCH_TOKENS = 2048
_OF_DOCUMENTS = ("documents", "texts", "chunks", "places", "vectors")
T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class Repair:
    """The report of a repair.

    `encoded` and `dropped_records` count KV records; `mended` and `dropped` name documents, the dropped ones with the
    reason; `rows` counts other rows that were repaired or belonged to nothing; `facts` names lost metadata of the
    index; `points` were sent to Qdrant or deleted there. Dropped documents have to be ingested again.
    """

    problems: tuple[Problem, ...] = ()
    left: tuple[Problem, ...] = ()
    encoded: int = 0
    dropped_records: int = 0
    rows: int = 0
    mended: list[str] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)
    facts: list[str] = field(default_factory=list)
    points: int = 0
    dry_run: bool = False

    @property
    def ok(self) -> bool:
        """Whether no problem is left and nothing had to be dropped."""
        return not self.left and not self.dropped

    def to_json(self) -> dict[str, Any]:
        """The object that `ragkv repair --json` prints."""
        return {
            "ok": self.ok,
            "dry_run": self.dry_run,
            "found": [problem.to_json() for problem in self.problems],
            "left": [problem.to_json() for problem in self.left],
            "encoded": self.encoded,
            "dropped_records": self.dropped_records,
            "rows": self.rows,
            "mended": self.mended,
            "dropped": [{"document": name, "reason": reason} for name, reason in self.dropped.items()],
            "facts": self.facts,
            "points": self.points,
        }


class _Repairer:
    """A running repair."""

    def __init__(
        self, database: Database, repair_source: RepairSource, codec: Codec, report: Repair, notify: Notify | None
    ) -> None:
        self._database = database
        self._repair_source = repair_source
        self._codec = codec
        self._notify = notify
        self._report = report

    def run(self, problems: Sequence[Problem], *, encode: bool) -> None:
        """Repair documents before KV, because they determine which KV their chunks need."""
        for key in sorted({problem.key for problem in problems if problem.table == "meta"}):
            self._repair_fact(key)
        whole = [problem for problem in problems if problem.kind != "stray"]
        documents = {f.key: f.where for f in whole if f.table == "documents"}
        documents |= {document_key(f.document): f.document for f in whole if f.document and f.table in _OF_DOCUMENTS}
        progress = Counter(self._notify, "documents", len(documents), "documents")
        for key in documents:
            self._repair_document(key)
            progress.add()
        self._drop_stray([problem for problem in problems if problem.kind == "stray"])
        self._drop_damaged("changes", check_change, problems)  # so that derived indexes are rebuilt
        self._repair_records([problem for problem in problems if problem.table == "kv"], encode=encode)
        for problem in problems:
            if problem.table in ("references", "needs"):
                self._repair_reference(problem.owner, problem.key)
        self._drop_damaged("uses", check_uses, problems)  # these records then count as never used
        if listed := [problem.key for problem in problems if problem.table == "unreferenced"]:
            self._write(for_each(listed, update_unreferenced))
            self._report.rows += len(listed)
        if any(problem.table == "counters" for problem in problems):
            self._write(recount)

    def _write(self, apply: Callable[[Transaction], T], need: int = 0) -> T | None:
        """Run one transaction; none in a dry run."""
        return None if self._report.dry_run else self._database.write(apply, need=need)

    def _repair_fact(self, key: bytes) -> None:
        def apply(txn: Transaction) -> None:
            if not any(check_metadata(txn, key)):
                return
            if key == b"generation":  # a number without any retrieval index, so that all are rebuilt
                txn.put("meta", key, (secrets.randbits(48) + (1 << 48)).to_bytes(8, "big"))
            else:
                txn.delete("meta", key)

        self._write(apply)
        self._report.facts.append(key.removeprefix(b"fact/").decode(errors="replace"))

    def _repair_document(self, key: bytes) -> None:
        """Try until the document is intact or deleted: a writer may change it between reading and repairing."""
        while True:
            name = key.decode("utf-8", "replace")
            try:
                with self._database.read() as txn:
                    row = bytes(txn.get("documents", key) or b"")
                    with suppress(CorruptStoreError):
                        name = parse_document(row).document.document_id
                    misplaced = name != key.decode("utf-8", "replace") and document_key(name) != key
                    damaged = None if misplaced or not row else find_damage(txn, key)
                if misplaced:
                    self._write(lambda txn: _move_document(txn, key))
                    self._report.rows += 1
                if damaged is None:
                    return
                vectors = self._vectors(damaged)
            except UnrepairableError as reason:
                self._write(lambda txn: _drop_document(txn, key))
                self._report.dropped[name] = str(reason)
                return
            if self._report.dry_run or self._database.write(
                partial(repair_document, damaged, vectors), need=_VECTORS_BYTES * len(vectors)
            ):
                self._report.mended.append(name)
                return

    def _vectors(self, damaged: DamagedDocument) -> Mapping[str, ChunkVectors]:
        """The vectors that have to be made again, by chunk id."""
        chunks = [chunk for chunk in damaged.chunks if chunk.ordinal in damaged.bad_vectors]
        vectors = self._repair_source.embed(chunks) if chunks else {}
        if vectors is None:
            raise UnrepairableError("a vector of it is damaged, and there is no embedder to make it again")
        return vectors

    def _drop_stray(self, problems: Sequence[Problem]) -> None:
        def apply(txn: Transaction) -> int:
            there = document_digests(txn)
            return sum(_drop_row(txn, problem, there) for problem in problems)

        if problems:
            dropped = self._write(apply)
            self._report.rows += len(problems) if dropped is None else dropped

    def _drop_damaged(
        self, table: str, check: Callable[[Transaction, bytes], Iterator[Problem]], problems: Sequence[Problem]
    ) -> None:
        """Drop the rows of a table that `check` still finds damaged."""
        keys = [problem.key for problem in problems if problem.table == table]
        if keys:
            self._write(for_each(keys, lambda txn, key: any(check(txn, key)) and txn.delete(table, key)))
            self._report.rows += len(keys)

    def _repair_records(self, problems: Sequence[Problem], *, encode: bool) -> None:
        """Encode the records that the index may still need in batches; drop the others."""
        wanted: dict[bytes, tuple[KVIdentity, set[bytes]]] = {}
        unwanted: dict[bytes, set[bytes]] = {}
        for problem in problems:
            with self._database.read() as txn:
                owners = {*txn.values("references", problem.key), problem.owner} - {b""}
                chunks = {owner: chunk for owner in owners if (chunk := chunk_named(txn, owner)) is not None}
            identities = (
                [i for chunk in chunks.values() for i in self._repair_source.identities(chunk)] if encode else []
            )
            identity = next((identity for identity in identities if identity.key() == problem.key), None)
            if identity is None:
                unwanted.setdefault(problem.key, set()).update(owners)
            elif problem.key in wanted:
                wanted[problem.key][1].update(chunks)
            else:
                wanted[problem.key] = (identity, set(chunks))
        lost = {key: owners for key, owners in unwanted.items() if key not in wanted}
        if lost:
            self._write(for_each(lost.items(), lambda txn, one: txn.evict(*one)))
        self._report.dropped_records += len(lost)
        progress = Counter(self._notify, "encode", sum(i.tokens for i, _ in wanted.values()), "tokens")
        for batch in batches(wanted.values(), lambda entry: entry[0].tokens, _BATCH_TOKENS):
            if not self._report.dry_run:
                self._encode(batch)
            self._report.encoded += len(batch)
            progress.add(sum(identity.tokens for identity, _ in batch))

    def _encode(self, batch: Sequence[tuple[KVIdentity, set[bytes]]]) -> None:
        identities = [identity for identity, _ in batch]
        made = zip(identities, self._repair_source.encode(identities), strict=True)
        records = {identity: encode_record(kv, identity, self._codec) for identity, kv in made}

        def put(txn: Transaction, one: tuple[KVIdentity, set[bytes]]) -> None:
            identity, owners = one
            there = [owner for owner in owners if txn.get("places", owner) is not None]
            if there:  # else the documents were deleted in the meantime
                txn.put_record(records[identity])
            for owner in there:
                txn.refer(owner, records[identity].key)

        self._write(for_each(batch, put), need=sum(record.stored_bytes for record in records.values()))

    def _repair_reference(self, owner: bytes, key: bytes) -> None:
        """Put a pair into both tables if both ends exist with the same tokens, else into neither."""

        def apply(txn: Transaction) -> None:
            manifest = find_record(txn, key)
            chunk = chunk_named(txn, owner)
            its = owner == INDEX_OWNER or (chunk is not None and manifest is not None)
            if manifest is None and txn.get("kv", key) is not None and its:
                return  # the record is damaged, and is repaired first
            if manifest is not None and its and (chunk is None or manifest.identity.may_serve(chunk.token_ids)):
                txn.refer(owner, key)
            else:
                txn.delete("references", key, owner)
                txn.delete("needs", owner, key)

        self._write(apply)
        self._report.rows += 1


def repair(
    database: Database,
    repair_source: RepairSource,
    codec: Codec,
    *,
    encode: bool = True,
    dry_run: bool = False,
    on_progress: Notify | None = None,
) -> Repair:
    """Verify and repair until nothing is found; `encode=False` drops bad KV, which questions then encode again.

    A dry run reports the first round and changes nothing. Hold the writer's lock, so that no ingest changes the
    documents meanwhile.
    """
    report = Repair(dry_run=dry_run)
    repairer = _Repairer(database, repair_source, codec, report, on_progress)
    for _ in range(_ROUNDS):
        report.left = verify(database, on_progress=on_progress).findings
        report.problems = report.problems or report.left
        if not report.left or any(problem.kind == "pages" for problem in report.left):
            return report
        repairer.run(report.left, encode=encode)
        if dry_run:
            report.left = ()
            return report
    report.left = verify(database, on_progress=on_progress).findings
    return report


def _move_document(txn: Transaction, key: bytes) -> None:
    """Move a row to its correct key, unless that is taken."""
    row = bytes(txn.get("documents", key) or b"")
    own = document_key(parse_document(row).document.document_id)
    txn.delete("documents", key)
    if txn.get("documents", own) is None:
        txn.put("documents", own, row)
    advance(txn)


def _drop_document(txn: Transaction, key: bytes) -> None:
    """Delete a document except its KV, which the next ingest reuses or `gc` drops."""
    txn.delete("documents", key)
    drop_rows(txn, document_digest(key))


def _drop_row(txn: Transaction, problem: Problem, documents: set[bytes]) -> bool:
    """Drop a row that belongs to nothing; False if it belongs to something now or is gone."""
    table, key = problem.table, problem.key
    if txn.get(table, key) is None or (table in ("texts", "chunks") and key[:32] in documents):
        return False
    if table == "vectors":
        if len(key) != PLACE_BYTES + 5:
            return txn.delete(table, key)
        if txn.get("chunks", key[1:-4]) is not None:
            return False
        for part in [part for part, _ in txn.scan(table, key[:-4])]:
            txn.delete(table, part)
    elif table == "segments":
        if not any(stray.key == key for stray in check_segments(txn, key[:VALUE_BYTES])):
            return False
        txn.delete(table, key)
    elif table == "chunks":
        drop_rows(txn, key)  # the rows whose keys begin with the chunk's: its place, needs and vectors go with it
    elif table == "texts" or any(check_place(txn, key)):
        txn.delete(table, key)
    return True
