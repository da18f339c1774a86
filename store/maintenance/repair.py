"""Repair what `verify` finds: rebuild a row from the rest of the store where possible, else drop it.

Much of a row can be derived from others. A chunk's id is a hash of its span, so the span is found by trying. Its tokens
are also in its KV's manifest. A text consists of its chunks and the white space between them. Page and heading are
taken from the neighbouring chunks where these agree. A rebuilt document loses its ingest fingerprint, so the next
ingest of its source makes it again, with the KV that exists.

Repair verifies and repairs in rounds until nothing is found. Each step is one transaction that checks again before it
changes anything, so a repair may be killed, repeated, and run beside queries. Nothing readable is dropped, with one
exception: if a document cannot be made whole, its text and chunks are deleted, because answers from the rest would be
wrong. Its KV stays as orphans, so ingesting the document again does not encode it again.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ragkv.errors import CorruptStoreError
from ragkv.store.codecs import Codec, DamagedError
from ragkv.store.counters import advance, generation, is_stale, recount, update_unreferenced
from ragkv.store.documents import drop_rows, drop_vectors, names_of, read_vector
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
    pack_chunk,
    pack_document,
    pack_text,
    parse_document,
    parse_text,
    vector_rows,
)
from ragkv.types import Chunk, Document, Encoding
from ragkv.util import batches

if TYPE_CHECKING:
    from ragkv.attention.kv import ChunkKV


class RepairSource(Protocol):
    """Cuts, tokenises, encodes and embeds chunks for a repair; the store cannot do that.

    Its methods are called outside of transactions.
    """

    def find_chunk(
        self, document: Document, text: str, ordinal: int, low: int, high: int, known: Callable[[str], bool]
    ) -> tuple[str, int, int] | None:
        """Id, start and end of the chunk within `text[low:high]` whose id is `known`, else None."""

    def tokens(self, text: str) -> tuple[int, ...]:
        """A chunk's token ids."""

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
    """Everything in one snapshot about a document; `row` and `generation` show whether it has changed since.

    `good` are the intact chunks by ordinal, `bad` the ordinals of the others, `extra` those beyond the document's
    count. `names` are, for each bad chunk, the digests of its possible ids; `tokens` the token ids in the KV of such a
    name. `bad_vectors` are the ordinals of chunks with an unreadable vector. `ids_taken`: a chunk's id is also used by
    another document.
    """

    key: bytes
    row: bytes
    generation: int
    stored: StoredDocument
    text: str | None
    good: dict[int, Chunk]
    bad: list[int]
    extra: list[int]
    names: dict[int, set[bytes]]
    tokens: dict[bytes, tuple[int, ...]]
    bad_vectors: set[int]
    ids_taken: bool

    @property
    def digest(self) -> bytes:
        """The digest of the document's id."""
        return document_digest(self.key)


@dataclass(slots=True, kw_only=True)
class RepairPlan:
    """The changes that rebuild a document."""

    deletes: list[tuple[str, bytes]] = field(default_factory=list)
    puts: list[tuple[str, bytes, bytes]] = field(default_factory=list)

    @property
    def size(self) -> int:
        """The approximate number of bytes to write."""
        return sum(len(value) for _, _, value in self.puts)


def find_damage(txn: Transaction, key: bytes) -> DamagedDocument:
    """Read a document with all its rows; `UnrepairableError` if the document's row is lost."""
    row = bytes(txn.get("documents", key) or b"")
    try:
        stored = parse_document(row)
    except CorruptStoreError as error:
        raise UnrepairableError("its row is damaged") from error
    document = document_digest(key)
    good: dict[int, Chunk] = {}
    there = chunk_ordinals(txn, document)
    if stored.chunks > most_chunks(there):
        raise UnrepairableError(f"it counts {stored.chunks} chunks, of which {len(there)} are there")
    for ordinal in sorted(there & set(range(stored.chunks))):
        chunk, _ = chunk_of(txn, chunk_key(document, ordinal))
        if chunk is not None and (chunk.document_id, chunk.ordinal) == (stored.document.document_id, ordinal):
            good[ordinal] = chunk
    bad = [ordinal for ordinal in range(stored.chunks) if ordinal not in good]
    names = {ordinal: set(names_of(txn, chunk_key(document, ordinal))) for ordinal in bad}
    if not all(names.values()):
        # The place is lost too. Then the name is one that needs KV and has no place.
        unplaced = {name for name in txn.keys("needs") if name != INDEX_OWNER and txn.get("places", name) is None}
        names = {ordinal: found or unplaced for ordinal, found in names.items()}
    known = {name for found in names.values() for name in found}
    return DamagedDocument(
        key=key,
        row=row,
        generation=generation(txn),
        stored=stored,
        text=_text(txn, document),
        good=good,
        bad=bad,
        extra=sorted(there - set(range(stored.chunks))),
        names=names,
        tokens={name: tokens for name in known if (tokens := _tokens(txn, name)) is not None},
        bad_vectors={ordinal for ordinal in range(stored.chunks) if _has_bad_vector(txn, chunk_key(document, ordinal))},
        ids_taken=any(_is_taken(txn, chunk, chunk_key(document, ordinal)) for ordinal, chunk in good.items()),
    )


def plan_document(damaged: DamagedDocument, repair_source: RepairSource) -> RepairPlan:
    """Plan how to rebuild a document; `UnrepairableError` if that is impossible."""
    stored, text = damaged.stored, damaged.text
    if damaged.ids_taken:
        raise UnrepairableError("its chunk ids are another document's")
    if text is None and damaged.bad:
        raise UnrepairableError("its text is lost, and chunks of it too")
    plan = RepairPlan()
    chunks = dict(damaged.good)
    if text is None:
        text = _joined(list(chunks.values()))
        plan.puts.append(("texts", damaged.digest, pack_text(text)))
    for ordinal in damaged.bad:
        chunks[ordinal] = _found(damaged, text, ordinal, chunks, repair_source)
        plan.puts.append(("chunks", chunk_key(damaged.digest, ordinal), pack_chunk(chunks[ordinal])))
        plan.deletes += [("places", name) for name in damaged.names[ordinal] if len(damaged.names[ordinal]) == 1]
    plan.deletes += [("chunks", chunk_key(damaged.digest, ordinal)) for ordinal in damaged.extra]
    plan.puts += [("places", digest(chunk.chunk_id), chunk_key(damaged.digest, n)) for n, chunk in chunks.items()]
    if damaged.bad_vectors:
        plan.puts += _vectors(damaged, [chunks[ordinal] for ordinal in sorted(damaged.bad_vectors)], repair_source)
    # A rebuilt chunk may lack its page or heading. Without a fingerprint, the next ingest replaces the document.
    whole = not (damaged.bad or damaged.text is None or damaged.bad_vectors)
    now = replace(
        stored,
        recipe=stored.recipe if whole else "",
        chunks=len(chunks),
        tokens=sum(len(chunk.token_ids) for chunk in chunks.values()),
    )
    plan.puts.append(("documents", damaged.key, pack_document(now)))
    return plan


def apply_plan(txn: Transaction, damaged: DamagedDocument, plan: RepairPlan) -> bool:
    """Apply the plan; False if the document has changed since it was read."""
    if generation(txn) != damaged.generation or bytes(txn.get("documents", damaged.key) or b"") != damaged.row:
        return False
    for ordinal in damaged.bad_vectors:
        drop_vectors(txn, chunk_key(damaged.digest, ordinal))
    for table, key in plan.deletes:
        txn.delete(table, key)
    for table, key, value in plan.puts:
        txn.put(table, key, value)
    advance(txn)
    return True


def _found(
    damaged: DamagedDocument, text: str, ordinal: int, chunks: Mapping[int, Chunk], repair_source: RepairSource
) -> Chunk:
    """Find the chunk between its neighbours; earlier chunks have already been rebuilt."""
    before, after = chunks.get(ordinal - 1), chunks.get(min((n for n in chunks if n > ordinal), default=-1))
    low, high = 0 if before is None else before.end, len(text) if after is None else after.start
    names = damaged.names[ordinal]
    document = damaged.stored.document
    span = repair_source.find_chunk(document, text, ordinal, low, high, lambda name: digest(name) in names)
    if span is None:
        raise UnrepairableError(
            f"its chunk {ordinal} is damaged, and its text does not show where the chunk began and ended"
        )
    chunk_id, start, end = span
    next_to = [chunk for chunk in (before, after) if chunk is not None]
    pages, headings = {chunk.page for chunk in next_to}, {chunk.heading for chunk in next_to}
    tokens = damaged.tokens.get(digest(chunk_id))
    return Chunk(
        chunk_id=chunk_id,
        document_id=document.document_id,
        ordinal=ordinal,
        text=text[start:end],
        token_ids=repair_source.tokens(text[start:end]) if tokens is None else tokens,
        start=start,
        end=end,
        page=pages.pop() if len(pages) == 1 else None,
        heading=headings.pop() if len(headings) == 1 else None,
    )


def _vectors(
    damaged: DamagedDocument, chunks: Sequence[Chunk], repair_source: RepairSource
) -> Iterator[tuple[str, bytes, bytes]]:
    made = repair_source.embed(chunks)
    if made is None:
        raise UnrepairableError("a vector of it is damaged, and there is no embedder to make it again")
    for chunk in chunks:
        for key, part in vector_rows(made[chunk.chunk_id], chunk_key(damaged.digest, chunk.ordinal)):
            yield "vectors", key, part


def _joined(chunks: Sequence[Chunk]) -> str:
    """The text that the chunks were cut from, with line ends for the white space between them."""
    text = ""
    for chunk in chunks:
        if chunk.start < len(text) or chunk.end - chunk.start != len(chunk.text):
            raise UnrepairableError("its text is lost, and its chunks do not say where they stood in it")
        text += "\n" * (chunk.start - len(text)) + chunk.text
    return text


def _text(txn: Transaction, document: bytes) -> str | None:
    value = txn.get("texts", document)
    try:
        return None if value is None else parse_text(value)
    except CorruptStoreError:
        return None


def _tokens(txn: Transaction, name: bytes) -> tuple[int, ...] | None:
    """The token ids of a chunk, from the manifest of its KV."""
    for key in txn.values("needs", name):
        manifest = find_record(txn, key)
        if manifest is not None and manifest.identity.encoding is not Encoding.LONG:
            return manifest.identity.chunk_ids
    return None


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
_BATCH_TOKENS = 2048
_OF_DOCUMENTS = ("documents", "texts", "chunks", "places", "vectors")
T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class Repair:
    """The report of a repair.

    `encoded` and `dropped_records` count KV records; `mended` and `dropped` name documents, the dropped ones with the
    reason; `rows` counts other rows that were repaired or belonged to nothing; `facts` names lost metadata of the
    index; `points` were sent to Qdrant or deleted there. Dropped documents have to be ingested again. Mended ones are
    replaced by the next ingest of their source, which reuses their KV.
    """

    found: tuple[Problem, ...] = ()
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
            "found": [problem.to_json() for problem in self.found],
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

    def count_anew(self) -> None:
        """Recount if counters became stale because a damaged row was replaced (`ragkv.store.counters`)."""
        with self._database.read() as txn:
            stale = is_stale(txn)
        if stale:
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
                    if txn.get("documents", key) is None:
                        return
                    damaged = find_damage(txn, key)
                name = damaged.stored.document.document_id
                if document_key(name) != key:
                    self._write(lambda txn: _move_document(txn, key))
                    self._report.rows += 1
                    return
                plan = plan_document(damaged, self._repair_source)
            except UnrepairableError as reason:
                self._write(lambda txn: _drop_document(txn, key))
                self._report.dropped[name] = str(reason)
                return
            if self._report.dry_run or self._database.write(
                lambda txn, damaged=damaged, plan=plan: apply_plan(txn, damaged, plan),  # type: ignore[misc]
                need=plan.size,
            ):
                self._report.mended.append(name)
                return

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
        report.found = report.found or report.left
        if not report.left or any(problem.kind == "pages" for problem in report.left):
            repairer.count_anew()
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
