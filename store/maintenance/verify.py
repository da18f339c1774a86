"""`ragkv verify`: check every row, checksum and reference while others read and one process writes.

A `Problem` names what is wrong, in words for the user and in keys for `repair`. There is one check per table, and each
compares only rows of one snapshot, so a concurrent writer never causes a false report. The store is walked table by
table, each batch in its own snapshot (`Database.walk`). Whether a row's document exists cannot be decided within a
batch: suspects are collected and checked again in one snapshot before they become problems.

`--quick` leaves out the payloads of KV, which are nearly all bytes: it only compares their lengths.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias

from ragkv.errors import ConfigError, CorruptStoreError
from ragkv.store.codecs import DamagedError
from ragkv.store.counters import count_all, is_garbage, parse_change, read_counters
from ragkv.store.documents import read_vector, require_shape
from ragkv.store.environment import Database
from ragkv.store.record import Manifest, check_payloads, checked_payloads
from ragkv.store.tables import (
    INDEX_OWNER,
    PLACE_BYTES,
    TABLES,
    VALUE_BYTES,
    VECTOR_KINDS,
    Transaction,
    UseRow,
    chunk_key,
    digest,
    document_digest,
    document_key,
    parse_chunk,
    parse_document,
    parse_text,
)
from ragkv.types import Chunk
from ragkv.util.files import parse_json

ProblemKind: TypeAlias = Literal["damaged", "missing", "mismatch", "stray", "pages"]

REPAIR = "run `ragkv repair`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One fault in a store.

    `damaged`: a row cannot be read; `missing`: other rows point to a row that is not there; `mismatch`: two rows
    contradict each other; `stray`: a row belongs to nothing; `pages`: LMDB itself cannot read a table. `where` names
    the row, `document` the id of its document if known. `key` is the row's key, `owner` the digest of the id of a
    related chunk.
    """

    kind: ProblemKind
    table: str
    where: str
    what: str
    document: str | None = None
    remedy: str = REPAIR
    key: bytes = field(default=b"", repr=False)
    owner: bytes = field(default=b"", repr=False)

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("kind", "table", "where", "what", "document", "remedy")}

    def __str__(self) -> str:
        return f"{self.where}: {self.what}; {self.remedy}"


_KINDS = {kind[:1].encode(): kind for kind in VECTOR_KINDS}


def check_metadata(txn: Transaction, key: bytes) -> Iterator[Problem]:
    """`meta`: facts are JSON, the generation is a number of 8 bytes."""
    value = bytes(txn.get("meta", key) or b"")
    damaged = partial(Problem, kind="damaged", table="meta", key=key)
    if key == b"generation" and len(value) != 8:
        yield damaged(where="the generation", what="it is not a number of 8 bytes")
    if key.startswith(b"fact/"):
        try:
            parse_json(value)
        except ValueError as error:
            yield damaged(where=f"fact {key[5:].decode(errors='replace')!r}", what=f"it is not JSON ({error})")


def check_change(txn: Transaction, key: bytes) -> Iterator[Problem]:
    """`changes`: names a document and its chunks."""
    value = txn.get("changes", key)
    try:
        if value is not None:
            parse_change(value)
    except DamagedError as error:
        where = f"change {int.from_bytes(key[:8], 'big')}"
        yield Problem(kind="damaged", table="changes", key=key, where=where, what=str(error))


def check_document(txn: Transaction, key: bytes) -> Iterator[Problem]:
    """`documents`, with the document's text, its chunks and their places."""
    try:
        stored = parse_document(txn.get("documents", key) or b"")
    except CorruptStoreError as error:
        name = key.decode(errors="replace")
        where, what = f"document {name}", _cause(error)
        yield Problem(kind="damaged", table="documents", key=key, where=where, what=what, document=name)
        return
    name = stored.document.document_id
    of_row = partial(Problem, table="documents", key=key, where=f"document {name}")
    if document_key(name) != key:
        # `document` stays unset: repair has to treat this row, not the one under the document's key.
        yield of_row(kind="mismatch", what="it has a key that is not its own")
        return
    yield from _in_text(txn, key, name)
    document = document_digest(key)
    ordinals = chunk_ordinals(txn, document)
    if stored.chunks > most_chunks(ordinals):
        what = f"it counts {stored.chunks} chunks, of which {len(ordinals)} are there"
        yield of_row(kind="damaged", what=what, document=name)
        return
    expected = set(range(stored.chunks))
    tokens: int | None = 0  # None once a chunk's tokens are unknown
    for ordinal in sorted(ordinals | expected):
        place_key = chunk_key(document, ordinal)
        of_chunk = partial(Problem, table="chunks", key=place_key, where=f"chunk {ordinal} of {name}", document=name)
        if ordinal not in ordinals:
            tokens = None
            yield of_chunk(kind="missing", what="its row is missing")
            continue
        chunk, cause = chunk_of(txn, place_key)
        if chunk is None or chunk.document_id != name or chunk.ordinal != ordinal:
            tokens = None
            yield of_chunk(kind="damaged", what=cause or "it is another chunk's row")
            continue
        tokens = None if tokens is None else tokens + len(chunk.token_ids)
        own = digest(chunk.chunk_id)
        place = txn.get("places", own)
        if place is None:
            yield of_chunk(kind="missing", table="places", key=own, what="its place is missing")
        elif bytes(place) != place_key:
            yield of_chunk(kind="mismatch", table="places", key=own, what="its place is another's")
    if ordinals - expected or tokens not in (None, stored.tokens):
        what = f"it counts {stored.chunks} chunks and {stored.tokens} tokens, which its chunks do not add up to"
        yield of_row(kind="mismatch", what=what, document=name)


def _in_text(txn: Transaction, key: bytes, name: str) -> Iterator[Problem]:
    text_key = document_digest(key)
    of_text = partial(Problem, table="texts", key=text_key, where=f"the text of {name}", document=name)
    value = txn.get("texts", text_key)
    if value is None:
        yield of_text(kind="missing", what="its row is missing")
        return
    try:
        parse_text(value)
    except CorruptStoreError as error:
        yield of_text(kind="damaged", what=_cause(error))


def check_place(txn: Transaction, key: bytes) -> Iterator[Problem]:
    """`places`: the chunk that a place leads to is the one that the place belongs to."""
    chunk_place = bytes(txn.get("places", key) or b"")
    chunk, _ = chunk_of(txn, chunk_place)
    if chunk is not None and digest(chunk.chunk_id) == key:
        return
    if chunk is None and txn.get("chunks", chunk_place) is not None:
        # The chunk's row is damaged, which is reported for the row; repair needs the place to identify the chunk.
        return
    what = "there is no such chunk where it leads"
    yield Problem(kind="stray", table="places", key=key, where=f"place {key.hex()[:16]}", what=what)


def check_vector(txn: Transaction, kind: bytes, place: bytes) -> Iterator[Problem]:
    """`vectors`: all parts of a chunk's vector of one kind."""
    keys = [key for key, _ in txn.scan("vectors", kind + place)]
    name = _KINDS.get(kind)
    of_vector = partial(Problem, table="vectors", key=keys[0] if keys else b"")
    where = f"vector {kind!r} of chunk {place.hex()[:16]}"
    if name is None or len(place) != PLACE_BYTES or any(len(key) != PLACE_BYTES + 5 for key in keys):
        yield of_vector(kind="stray", where=where, what="it has a key that means nothing")
        return
    if txn.get("chunks", place) is None:
        yield of_vector(kind="stray", where=where, what="it is of a chunk that is not there")
        return
    chunk, _ = chunk_of(txn, place)
    document = None if chunk is None else chunk.document_id
    if chunk is not None:
        where = f"{name} vector of chunk {chunk.ordinal} of {document}"
    try:
        read_vector(txn, name, place)
    except DamagedError as error:
        yield of_vector(kind="damaged", where=where, what=str(error), document=document)


def check_record(txn: Transaction, key: bytes, *, payload: bool) -> Iterator[Problem]:
    """`kv`; with `payload` also `segments`: every checksum, and that the codec restores the tensors' bytes."""
    try:
        manifest = Manifest.parse(txn.get("kv", key) or b"")
        if manifest.identity.key() != key:
            raise DamagedError("it has a key that is not its own")
        require_shape(txn, manifest)
        (check_payloads if payload else checked_payloads)(manifest, partial(txn.segment, key))
    except (ValueError, ConfigError) as error:
        where, what = f"KV record {key.hex()[:16]}", str(error).rstrip(".")
        yield Problem(kind="damaged", table="kv", key=key, where=where, what=what, document=_needed_by(txn, key))


def check_unreferenced(txn: Transaction, key: bytes) -> Iterator[Problem]:
    """`unreferenced`: it lists the KV that nothing refers to, and nothing else."""
    garbage = is_garbage(txn, key)
    if garbage == (txn.get("unreferenced", key) is not None):
        return
    what = (
        "nothing refers to it, and it is not on the list" if garbage else "it is on the list, and it is in use or gone"
    )
    where = f"KV {key.hex()[:16]} in the list of what nothing refers to"
    yield Problem(kind="mismatch", table="unreferenced", key=key, where=where, what=what)


def check_segments(txn: Transaction, key: bytes) -> Iterator[Problem]:
    """`segments` beyond those of a record that is in use; those of garbage go with it."""
    if not txn.is_referenced(key):
        return
    manifest = find_record(txn, key)
    if manifest is None and txn.get("kv", key) is not None:
        return  # how many segments a damaged record should have is unknown
    count = 0 if manifest is None else len(manifest.segments)
    for segment_key, _ in txn.scan("segments", key):
        if int.from_bytes(segment_key[VALUE_BYTES:], "big") >= count:
            where = f"segment of KV record {key.hex()[:16]}"
            what = "the record has fewer segments"
            yield Problem(kind="stray", table="segments", key=segment_key, where=where, what=what)


def check_references(txn: Transaction, key: bytes) -> Iterator[Problem]:
    """`references`: every chunk that refers to a record exists, and names the record too."""
    for owner in txn.values("references", key):
        known = _is_owner(txn, owner)
        if known and txn.has("needs", owner, key):
            continue
        yield Problem(
            kind="mismatch",
            table="references",
            key=key,
            owner=owner,
            where=f"reference of chunk {owner.hex()[:16]} to KV record {key.hex()[:16]}",
            what="the chunk does not know of it" if known else "there is no such chunk",
        )


def check_needs(txn: Transaction, owner: bytes) -> Iterator[Problem]:
    """`needs`: every record that a chunk needs is there, holds the chunk's tokens, and names the chunk."""
    chunk = chunk_named(txn, owner)
    name = None if chunk is None else chunk.document_id
    for key in txn.values("needs", owner):
        record = f"KV record {key.hex()[:16]}"
        problem = partial(Problem, key=key, owner=owner, document=name)
        value = txn.get("kv", key)
        if not _is_owner(txn, owner):
            what = "there is no such chunk"
        elif value is None:
            yield problem(kind="missing", table="kv", where=record, what="its row is missing")
            continue
        elif not txn.has("references", key, owner):
            what = "the record does not know of it"
        elif chunk is not None and not _is_of(value, chunk):
            what = "the record is of other tokens"
        else:
            continue
        where = f"need of chunk {owner.hex()[:16]} for {record}"
        yield problem(kind="mismatch", table="needs", where=where, what=what)


def check_uses(txn: Transaction, key: bytes) -> Iterator[Problem]:
    """`uses`: a row that can be read. What it counts belongs to no other row."""
    try:
        UseRow.parse(txn.get("uses", key) or b"")
    except DamagedError as error:
        where = f"uses of KV record {key.hex()[:16]}"
        yield Problem(kind="damaged", table="uses", key=key, where=where, what=str(error))


def chunk_of(txn: Transaction, place: bytes) -> tuple[Chunk | None, str]:
    """The chunk at a place; None with the reason when it cannot be read."""
    value = txn.get("chunks", place) if len(place) == PLACE_BYTES else None
    if value is None:
        return None, "its row is missing"
    try:
        return parse_chunk(value), ""
    except CorruptStoreError as error:
        return None, _cause(error)


def chunk_named(txn: Transaction, owner: bytes) -> Chunk | None:
    """The chunk whose id has the digest `owner`, if it is there and can be read."""
    place = txn.get("places", owner)
    return None if place is None else chunk_of(txn, bytes(place))[0]


def chunk_ordinals(txn: Transaction, document: bytes) -> set[int]:
    """The ordinals of a document's rows; the document is given by the digest of its id."""
    return {int.from_bytes(key[32:], "big") for key, _ in txn.scan("chunks", document) if len(key) == PLACE_BYTES}


def most_chunks(there: set[int]) -> int:
    """The largest credible chunk count of a document's row if the chunks `there` were found.

    Missing chunks are searched one by one, so a damaged or hostile count must not be trusted. No real damage takes this
    many.
    """
    return 4 * len(there) + (1 << 16)


def find_record(txn: Transaction, key: bytes) -> Manifest | None:
    """A record's manifest, if it can be read and has its own key."""
    try:
        manifest = Manifest.parse(txn.get("kv", key) or b"")
    except ValueError:
        return None
    return manifest if manifest.identity.key() == key else None


def _needed_by(txn: Transaction, key: bytes) -> str | None:
    """The id of one document that needs a record."""
    chunks = (chunk_named(txn, owner) for owner in txn.values("references", key))
    return next((chunk.document_id for chunk in chunks if chunk is not None), None)


def _is_owner(txn: Transaction, owner: bytes) -> bool:
    return owner == INDEX_OWNER or txn.get("places", owner) is not None


def _is_of(value: bytes | memoryview, chunk: Chunk) -> bool:
    """Whether a manifest holds the chunk's tokens; a damaged one passes, since `check_record` reports it."""
    try:
        return Manifest.parse(value).identity.may_serve(chunk.token_ids)
    except ValueError:
        return True


def _cause(error: CorruptStoreError) -> str:
    return str(error.__cause__ or error)


UNCHECKED = ("the KV itself: whether its payloads match their checksums and can be decoded",)
"""The checks that a quick verification leaves out, in words for the user."""

Check = Callable[[Transaction, bytes], Iterable[Problem]]
Visit = Callable[[Transaction, bytes], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """`done` of about `total` units of the step that is running."""

    step: str
    done: int
    total: int
    unit: str = "bytes"


Notify: TypeAlias = Callable[[Progress], None]


class Counter:
    """Calls `notify` at every hundredth of a step, and at its end."""

    def __init__(self, notify: Notify | None, step: str, total: int, unit: str = "bytes") -> None:
        self._notify = notify
        self._step, self._total, self._unit = step, max(1, total), unit
        self._done = self._reported = 0

    def add(self, amount: int = 1) -> None:
        self._done += amount
        if 100 * (self._done - self._reported) >= self._total:
            self._report_step(min(self._done, self._total))

    def finish(self) -> None:
        self._report_step(self._total)

    def _report_step(self, done: int) -> None:
        self._reported = self._done
        if self._notify is not None:
            self._notify(Progress(step=self._step, done=done, total=self._total, unit=self._unit))


_PAIR_BYTES = 64
_OF_DOCUMENT = {"texts": "text", "chunks": "chunk row"}
"""Tables whose keys begin with a document's digest, with the name of a row for the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Orphans:
    """KV that nothing refers to: staged by an ingest that runs or was killed, or left by a repair.

    Orphans are no damage; `ragkv gc` drops them. `segments` counts those without a manifest, `bytes` the payloads of
    records and segments.
    """

    records: int = 0
    segments: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The outcome of a verification.

    `checked` counts rows by table, and `bytes`. `derived` says for each retrieval index whether it will be rebuilt,
    which is no damage either.
    """

    findings: tuple[Problem, ...]
    checked: Mapping[str, int]
    orphans: Orphans
    quick: bool = False
    derived: Mapping[str, str] = field(default_factory=dict)

    @property
    def unchecked(self) -> tuple[str, ...]:
        """The checks that were left out, in words for the user."""
        return UNCHECKED if self.quick else ()

    @property
    def ok(self) -> bool:
        return not self.findings

    def to_json(self) -> dict[str, Any]:
        """The object that `ragkv verify --json` prints."""
        return {
            "ok": self.ok,
            "quick": self.quick,
            "unchecked": list(self.unchecked),
            "findings": [problem.to_json() for problem in self.findings],
            "checked": dict(self.checked),
            "orphans": asdict(self.orphans),
            "derived": dict(self.derived),
        }


def verify(database: Database, *, quick: bool = False, on_progress: Notify | None = None) -> Verification:
    """Check all tables; `quick` leaves out `UNCHECKED`, which is most of the bytes."""
    return _Walk(database, quick, on_progress).run()


class _Walk:
    """A running verification."""

    def __init__(self, database: Database, quick: bool, on_progress: Notify | None) -> None:
        self._database = database
        self._quick = quick
        self._notify = on_progress
        with database.read() as txn:
            total = txn.used_bytes(*(TABLES.keys() - {"segments"} if quick else TABLES))
        self._progress = Counter(on_progress, "verify", total)
        self._problems: list[Problem] = []
        self._rows: Counts[str] = Counts()
        self._documents: set[bytes] = set()
        self._suspects: list[Problem] = []
        self._orphans: Counts[str] = Counts()
        self._segments_of = b""  # the record whose segments were checked last
        self._vector = b""  # of the vector that was checked last: its key without the number of the part

    def run(self) -> Verification:
        def on_pages(done: int, total: int) -> None:
            if self._notify is not None:
                self._notify(Progress(step="pages", done=done, total=total, unit="pages"))

        try:
            # LMDB's own pages come first, because rows are read through them.
            self._database.check_pages(on_pages)
        except CorruptStoreError as error:
            self._problems.append(_bad_pages("", "data.mdb", str(error.__cause__ or error)))
        else:
            self._walk_tables()
            self._problems += self._stray()
            self._compare_counters()
        self._progress.finish()
        rows = {table: self._rows[table] for table in TABLES}
        return Verification(
            findings=tuple(self._problems),
            checked={**rows, "bytes": self._rows["bytes"]},
            orphans=Orphans(**{name: self._orphans[name] for name in ("records", "segments", "bytes")}),
            quick=self._quick,
        )

    def _walk_tables(self) -> None:
        visits: dict[str, Visit] = {
            "meta": self._checked("meta", check_metadata),
            "documents": self._document,
            "texts": partial(self._owned, "texts"),
            "chunks": partial(self._owned, "chunks"),
            "places": self._checked("places", check_place),
            "kv": self._record,
            "segments": self._segment,
            "references": self._pairs("references", check_references),
            "needs": self._pairs("needs", check_needs),
            "vectors": self._vectors,
            "unreferenced": self._checked("unreferenced", check_unreferenced),
            "changes": self._checked("changes", check_change),
            "uses": self._checked("uses", check_uses),
        }
        for table, visit in visits.items():
            try:
                self._database.walk(table, visit)
            except CorruptStoreError as error:
                self._unreadable(table, error)

    def _unreadable(self, table: str, error: CorruptStoreError) -> None:
        what = f"its pages cannot be read ({error.__cause__ or error})"
        self._problems.append(_bad_pages(table, f"table {table!r}", what))

    def _seen(self, table: str, problems: Iterable[Problem], size: int, rows: int = 1) -> int:
        self._problems += problems
        self._rows[table] += rows
        self._rows["bytes"] += size
        self._progress.add(size)
        return size

    def _checked(self, table: str, check: Check) -> Visit:
        """A visitor of the rows of a table, each of which is checked by itself."""
        return lambda txn, key: self._seen(table, check(txn, key), _length(txn, table, key))

    def _pairs(self, table: str, check: Check) -> Visit:
        """A visitor of the keys of a table with several values per key."""

        def visit(txn: Transaction, key: bytes) -> int:
            rows = len(txn.values(table, key))
            return self._seen(table, check(txn, key), _PAIR_BYTES * rows, rows)

        return visit

    def _document(self, txn: Transaction, key: bytes) -> int:
        document = document_digest(key)
        self._documents.add(document)
        size = _length(txn, "documents", key) + _length(txn, "texts", document)
        size += sum(len(value) for _, value in txn.scan("chunks", document))
        return self._seen("documents", check_document(txn, key), size)

    def _owned(self, table: str, txn: Transaction, key: bytes) -> int:
        """A row of a document, whose parts were checked with the document, unless that was not there."""
        if key[:32] not in self._documents:
            where, what = f"{_OF_DOCUMENT[table]} {key.hex()[:16]}", "it is of a document that is not there"
            self._suspects.append(Problem(kind="stray", table=table, key=key, where=where, what=what))
        return self._seen(table, (), 0)

    def _stray(self) -> Iterator[Problem]:
        """The suspects that have no document in one snapshot."""
        if self._suspects:
            with self._database.read() as txn:
                there = document_digests(txn)
                for problem in self._suspects:
                    if txn.get(problem.table, problem.key) is not None and problem.key[:32] not in there:
                        yield problem

    def _record(self, txn: Transaction, key: bytes) -> int:
        size, stored = _length(txn, "kv", key), txn.payload_bytes(key)
        if not txn.is_referenced(key):
            self._orphans["records"] += 1
            self._orphans["bytes"] += stored
        problems = (*check_record(txn, key, payload=not self._quick), *check_unreferenced(txn, key))
        return self._seen("kv", problems, size if self._quick else size + stored)

    def _segment(self, txn: Transaction, key: bytes) -> int:
        """The segments of a record: whether they belong to it. Their payloads are checked with the record."""
        record = key[:VALUE_BYTES]
        if self._segments_of == record:
            return self._seen("segments", (), 0)
        self._segments_of = record
        if txn.get("kv", record) is not None:
            return self._seen("segments", check_segments(txn, record), 0)
        self._orphans["segments"] += sum(1 for _ in txn.scan("segments", record))
        self._orphans["bytes"] += txn.payload_bytes(record)
        return self._seen("segments", (*check_segments(txn, record), *check_unreferenced(txn, record)), 0)

    def _compare_counters(self) -> None:
        """Report wrong counters, unless damaged rows make the right ones unknown."""
        if any(problem.table in ("kv", "documents") for problem in self._problems):
            return
        try:
            with self._database.read() as txn:
                wrong = read_counters(txn) != +count_all(txn)
        except CorruptStoreError as error:
            self._unreadable("kv", error)
            return
        if wrong:
            what = "they are not what a count of the rows gives"
            self._problems.append(Problem(kind="mismatch", table="counters", where="the counters", what=what))

    def _vectors(self, txn: Transaction, key: bytes) -> int:
        size = _length(txn, "vectors", key)
        kind, place = key[:1], key[1:-4]
        if self._vector == kind + place:
            return self._seen("vectors", (), size)
        self._vector = kind + place
        return self._seen("vectors", check_vector(txn, kind, place), size)


def document_digests(txn: Transaction) -> set[bytes]:
    """The digest of every document's id."""
    return {document_digest(key) for key in txn.keys("documents")}


def _bad_pages(table: str, where: str, what: str) -> Problem:
    remedy = "restore a backup, or ingest into a new index"
    return Problem(kind="pages", table=table, where=where, what=what, remedy=remedy)


def _length(txn: Transaction, table: str, key: bytes) -> int:
    """Bytes of a value; the value is not read."""
    value = txn.get(table, key)
    return 0 if value is None else len(value)
