"""`ragkv verify`: every row, every checksum and every reference, while others read and one writes.

The store is walked table by table, each batch in a snapshot of its own (`Database.walk`), and a check only compares
rows of one snapshot. Whether a row's document exists cannot be told from one row: such suspects are collected during
the walk and checked again in one snapshot before they become findings.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ragkv.errors import CorruptStoreError
from ragkv.store.database import Database
from ragkv.store.pages.resident import give_back, mapped_bytes
from ragkv.store.tally import Tally, has_wrong_counters, take_tally
from ragkv.store.transaction import TABLES, VALUE_BYTES, Transaction, document_digest
from ragkv.store.upkeep import check
from ragkv.store.upkeep.finding import Finding
from ragkv.store.upkeep.progress import Counter, Notify
from ragkv.store.upkeep.quick import UNCHECKED, QuickCheck, Visit

__all__ = ["Orphans", "Verification", "document_digests", "verify"]

_PAIR_BYTES = 64
_QUICK_ROWS = 4096
_MAPPED = 128 << 20  # bytes of pages that a quick walk has in memory before it gives them back
"""Rows of a quick verification in one snapshot."""
_QUICK = ("documents", "texts", "chunks", "places", "kv", "references", "vectors")
_OF_DOCUMENT = {"texts": "text", "chunks": "chunk row"}
"""Tables whose rows are of the document that their key begins with, and what people call a row."""


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

    findings: tuple[Finding, ...]
    checked: Mapping[str, int]
    orphans: Orphans
    quick: bool = False
    derived: Mapping[str, str] = field(default_factory=dict)

    @property
    def unchecked(self) -> tuple[str, ...]:
        """What was left out, for people."""
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
            "findings": [finding.to_json() for finding in self.findings],
            "checked": dict(self.checked),
            "orphans": asdict(self.orphans),
            "derived": dict(self.derived),
        }


def verify(database: Database, *, quick: bool = False, on_progress: Notify | None = None) -> Verification:
    """Check all tables; `quick` leaves out `UNCHECKED`, which is most of the bytes and of the work."""
    return _Walk(database, quick, on_progress).run()


class _Walk:
    """One verification under way."""

    def __init__(self, database: Database, quick: bool, on_progress: Notify | None) -> None:
        self._database = database
        self._quick = quick
        with database.read() as txn:
            total = sum(map(txn.count, _QUICK)) if quick else txn.used_bytes(*TABLES)
        self._progress = Counter(on_progress, "verify", total, "rows" if quick else "bytes")
        self._findings: list[Finding] = []
        self._rows: Counts[str] = Counts()
        self._documents: set[bytes] = set()
        self._suspects: dict[bytes, Finding] = {}
        self._orphans: Counts[str] = Counts()
        self._record_of_segment: tuple[Transaction | None, bytes, int] = (None, b"", 0)  # with its count of segments
        self._vector = b""  # of the vector that was checked last: its key without the number of the part
        self._tally = Tally()
        self._mapped = mapped_bytes()

    def run(self) -> Verification:
        try:
            # LMDB's own pages come first, because rows are read through them.
            self._database.check_pages(heads=not self._quick)
        except CorruptStoreError as error:
            self._findings.append(_bad_pages("", "data.mdb", str(error.__cause__ or error)))
        else:
            if self._quick:
                self._walk_quickly()
            else:
                self._walk_tables()
            self._compare_counters()
        self._progress.finish()
        rows = {table: self._rows[table] for table in TABLES}
        return Verification(
            findings=tuple(self._findings),
            checked={**rows, "bytes": self._rows["bytes"]},
            orphans=Orphans(**{name: self._orphans[name] for name in ("records", "segments", "bytes")}),
            quick=self._quick,
        )

    def _walk_tables(self) -> None:
        for table, visit in (
            ("meta", self._fact),
            ("documents", self._document),
            ("texts", self._text),
            ("chunks", self._chunk),
            ("places", self._place),
            ("kv", self._record),
            ("segments", self._segment),
            ("references", self._references),
            ("needs", self._needs),
            ("vectors", self._vectors),
            ("unreferenced", self._listed),
            ("changes", self._change),
            ("uses", self._use),
        ):
            try:
                self._database.walk(table, visit)
            except CorruptStoreError as error:
                self._unreadable(table, error)
        self._findings += self._stray()

    def _unreadable(self, table: str, error: CorruptStoreError) -> None:
        what = f"its pages cannot be read ({error.__cause__ or error})"
        self._findings.append(_bad_pages(table, f"table {table!r}", what))

    def _walk_quickly(self) -> None:
        """The tables of `QuickCheck`, many rows in a snapshot; and what it cannot tell by rows."""
        quick = QuickCheck()
        self._tally, self._orphans = quick.tally, quick.orphans
        self._database.walk("meta", self._fact)
        for table, visit in quick.tables().items():
            try:
                self._scan(table, visit, quick)
            except CorruptStoreError as error:
                self._unreadable(table, error)
        for key in quick.incomplete():
            with self._database.read() as txn:  # looked at again, because a writer may have changed it meanwhile
                if txn.get("documents", key) is not None:
                    self._findings += check.in_document(txn, key)
        with self._database.read() as txn:
            pairs, needs, segments = (txn.count(table) for table in ("references", "needs", "segments"))
        # Each reference has been found among the needs, and each segment of a record has been counted.
        if pairs == needs:
            self._rows["needs"] = needs
        else:
            self._database.walk("needs", self._needs)
        if segments == quick.segments:
            self._rows["segments"] = segments
        else:
            self._database.walk("segments", self._segment)
        self._database.walk("unreferenced", self._listed)
        self._database.walk("changes", self._change)
        self._findings += self._stray()
        self._findings = list(dict.fromkeys(self._findings))  # two rows may lead to the same one

    def _scan(self, table: str, visit: Visit, quick: QuickCheck) -> None:
        after, more = b"", True
        while more:
            rows, more = 0, False
            with self._database.read() as txn:
                for key, value in txn.scan(table, after=after or None):
                    if rows >= _QUICK_ROWS and key != after:  # the next snapshot begins behind a key
                        more = True
                        break
                    if table in _OF_DOCUMENT and quick.stray(key):
                        self._suspect(table, key, f"{_OF_DOCUMENT[table]} {key.hex()[:16]}")
                    self._findings += visit(txn, key, value)
                    self._rows["bytes"] += len(value)
                    rows, after = rows + 1, key
            if mapped_bytes() - self._mapped > _MAPPED:  # they stay in the system's cache
                give_back(self._database.directory / "data.mdb")
            self._rows[table] += rows
            self._progress.add(rows)

    def _seen(self, table: str, findings: Iterable[Finding], size: int, rows: int = 1) -> int:
        self._findings += findings
        self._rows[table] += rows
        self._rows["bytes"] += size
        self._progress.add(size)
        return size

    def _fact(self, txn: Transaction, key: bytes) -> int:
        return self._seen("meta", check.in_facts(txn, key), _length(txn, "meta", key))

    def _document(self, txn: Transaction, key: bytes) -> int:
        document = document_digest(key)
        self._documents.add(document)
        self._tally.count_document(key, txn.get("documents", key) or b"")
        size = _length(txn, "documents", key) + _length(txn, "texts", document)
        size += sum(len(value) for _, value in txn.scan("chunks", document))
        return self._seen("documents", check.in_document(txn, key), size)

    def _text(self, txn: Transaction, key: bytes) -> int:
        self._suspect("texts", key, f"{_OF_DOCUMENT['texts']} {key.hex()[:16]}")
        return self._seen("texts", (), 0)

    def _chunk(self, txn: Transaction, key: bytes) -> int:
        self._suspect("chunks", key, f"{_OF_DOCUMENT['chunks']} {key.hex()[:16]}")
        return self._seen("chunks", (), 0)

    def _suspect(self, table: str, key: bytes, where: str) -> None:
        """Note a row whose document was not there when documents were walked."""
        if key[:32] not in self._documents:
            what = "it is of a document that is not there"
            self._suspects[table.encode() + key] = Finding(kind="stray", table=table, key=key, where=where, what=what)

    def _stray(self) -> Iterator[Finding]:
        """The suspects that still have no document in one and the same snapshot."""
        if self._suspects:
            with self._database.read() as txn:
                there = document_digests(txn)
                for finding in self._suspects.values():
                    if txn.get(finding.table, finding.key) is not None and finding.key[:32] not in there:
                        yield finding

    def _place(self, txn: Transaction, key: bytes) -> int:
        return self._seen("places", check.in_place(txn, key), check.PLACE_BYTES)

    def _record(self, txn: Transaction, key: bytes) -> int:
        size = _length(txn, "kv", key)
        manifest = check.find_record(txn, key)
        stored = 0 if manifest is None else manifest.stored_bytes
        if not txn.is_referenced(key):
            self._orphans["records"] += 1
            self._orphans["bytes"] += stored
        self._tally.count_record(key, txn.get("kv", key) or b"", needed=txn.is_needed(key))
        found = (*check.in_record(txn, key, payload=True), *check.in_list(txn, key))
        return self._seen("kv", found, size + stored)

    def _segment(self, txn: Transaction, key: bytes) -> int:
        """Whether a segment belongs to a record. Its payload is checked with the record."""
        record = key[:VALUE_BYTES]
        if self._record_of_segment[:2] != (txn, record):
            self._record_of_segment = (txn, record, check.segment_count(txn, record))
        found: Iterable[Finding] = ()
        if int.from_bytes(key[VALUE_BYTES:], "big") >= self._record_of_segment[2]:
            if txn.get("kv", record) is None or not txn.is_referenced(record):
                self._orphans["segments"] += 1
                self._orphans["bytes"] += _length(txn, "segments", key)
                found = check.in_list(txn, record)
            else:
                found = [finding for finding in check.in_segments(txn, record) if finding.key == key]
        return self._seen("segments", found, 0)

    def _listed(self, txn: Transaction, key: bytes) -> int:
        return self._seen("unreferenced", check.in_list(txn, key), 0)

    def _compare_counters(self) -> None:
        """Report counters that are wrong, unless rows are damaged, of which it is not known what they count for."""
        if any(finding.table in ("kv", "documents") for finding in self._findings):
            return
        try:
            with self._database.read() as txn:
                self._rows["counters"] = txn.count("counters")
                # A writer beside the walk changes what was counted: only a count within one snapshot is certain.
                wrong = has_wrong_counters(txn, self._tally) and has_wrong_counters(txn, take_tally(txn))
        except CorruptStoreError as error:
            self._unreadable("counters", error)
            return
        if wrong:
            what = "they are not what a count of the rows gives"
            self._findings.append(Finding(kind="mismatch", table="counters", where="the counters", what=what))

    def _references(self, txn: Transaction, key: bytes) -> int:
        rows = len(txn.values("references", key))
        return self._seen("references", check.in_references(txn, key), _PAIR_BYTES * rows, rows)

    def _needs(self, txn: Transaction, key: bytes) -> int:
        rows = len(txn.values("needs", key))
        return self._seen("needs", check.in_needs(txn, key), _PAIR_BYTES * rows, rows)

    def _change(self, txn: Transaction, key: bytes) -> int:
        return self._seen("changes", check.in_change(txn, key), _length(txn, "changes", key))

    def _use(self, txn: Transaction, key: bytes) -> int:
        return self._seen("uses", check.in_uses(txn, key), _length(txn, "uses", key))

    def _vectors(self, txn: Transaction, key: bytes) -> int:
        size = _length(txn, "vectors", key)
        kind, place = key[:1], key[1:-4]
        if self._vector == kind + place:
            return self._seen("vectors", (), size)
        self._vector = kind + place
        return self._seen("vectors", check.in_vector(txn, kind, place), size)


def document_digests(txn: Transaction) -> set[bytes]:
    """The digest of every document's id."""
    return {document_digest(key) for key in txn.keys("documents")}


def _bad_pages(table: str, where: str, what: str) -> Finding:
    remedy = "restore a backup, or ingest into a new index"
    return Finding(kind="pages", table=table, where=where, what=what, remedy=remedy)


def _length(txn: Transaction, table: str, key: bytes) -> int:
    """Bytes of a value; the value is not read."""
    value = txn.get(table, key)
    return 0 if value is None else len(value)
