"""Repair what `verify` finds: rebuild it where the rest of the store says how, else drop it.

A repair verifies and mends in rounds until nothing is found. Every step is one transaction that looks again before it
changes anything, so that a repair may be killed, run again, and run beside queries. Nothing that can be read is given
up, except when a document cannot be made whole: its text and chunks are deleted, because answers from the rest of them
would be wrong. Its KV stays, as orphans, so that ingesting the document again does not encode it again.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ragkv.store.codec import Codec
from ragkv.store.database import Database
from ragkv.store.document import drop_rows
from ragkv.store.format.identity import KVIdentity
from ragkv.store.format.row import parse_document
from ragkv.store.history import advance
from ragkv.store.tally import is_stale, recount, relist
from ragkv.store.transaction import INDEX_OWNER, VALUE_BYTES, Transaction, document_digest, document_key
from ragkv.store.upkeep.check import (
    PLACE_BYTES,
    chunk_named,
    find_record,
    in_change,
    in_facts,
    in_place,
    in_segments,
    in_uses,
)
from ragkv.store.upkeep.finding import Finding
from ragkv.store.upkeep.mending import Mender, UnmendableError, apply_plan, examine, plan_document
from ragkv.store.upkeep.progress import Counter, Notify
from ragkv.store.upkeep.verification import document_digests, verify

__all__ = ["Repair", "repair"]

_ROUNDS = 5
_BATCH_TOKENS = 2048
_OF_DOCUMENTS = ("documents", "texts", "chunks", "places", "vectors")
T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class Repair:
    """What was found, what was done, and what is left.

    `encoded` and `dropped_records` count KV records; `mended` and `dropped` name documents, the dropped ones with the
    reason; `rows` counts rows of other kinds that were mended or that belonged to nothing; `facts` names facts about
    the index that were lost. Dropped documents have to be ingested again. Mended ones are made anew by the next ingest
    of their source, which finds their KV.
    """

    found: tuple[Finding, ...] = ()
    left: tuple[Finding, ...] = ()
    encoded: int = 0
    dropped_records: int = 0
    rows: int = 0
    mended: list[str] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)
    facts: list[str] = field(default_factory=list)
    dry_run: bool = False

    @property
    def ok(self) -> bool:
        """Whether all is well now, and nothing had to be given up."""
        return not self.left and not self.dropped

    def to_json(self) -> dict[str, Any]:
        """The object that `ragkv repair --json` prints."""
        return {
            "ok": self.ok,
            "dry_run": self.dry_run,
            "found": [finding.to_json() for finding in self.found],
            "left": [finding.to_json() for finding in self.left],
            "encoded": self.encoded,
            "dropped_records": self.dropped_records,
            "rows": self.rows,
            "mended": self.mended,
            "dropped": [{"document": name, "reason": reason} for name, reason in self.dropped.items()],
            "facts": self.facts,
        }


class _Repairer:
    """One repair under way."""

    def __init__(self, database: Database, mender: Mender, codec: Codec, report: Repair, notify: Notify | None) -> None:
        self._database = database
        self._mender = mender
        self._codec = codec
        self._notify = notify
        self._report = report

    def mend(self, findings: Sequence[Finding], *, encode: bool) -> None:
        """Mend in this order: documents come before KV, because they say which KV their chunks need."""
        for key in sorted({finding.key for finding in findings if finding.table == "meta"}):
            self._mend_fact(key)
        whole = [finding for finding in findings if finding.kind != "stray"]
        documents = {f.key: f.where for f in whole if f.table == "documents"}
        documents |= {document_key(f.document): f.document for f in whole if f.document and f.table in _OF_DOCUMENTS}
        progress = Counter(self._notify, "documents", len(documents), "documents")
        for key in documents:
            self._mend_document(key)
            progress.add()
        self._drop_stray([finding for finding in findings if finding.kind == "stray"])
        self._drop_changes([finding.key for finding in findings if finding.table == "changes"])
        self._mend_records([finding for finding in findings if finding.table == "kv"], encode=encode)
        for finding in findings:
            if finding.table in ("references", "needs"):
                self._mend_reference(finding.owner, finding.key)
        self._drop_uses([finding.key for finding in findings if finding.table == "uses"])
        self._list([finding.key for finding in findings if finding.table == "unreferenced"])
        if any(finding.table == "counters" for finding in findings):
            self._write(recount)

    def count_anew(self) -> None:
        """Make counters anew that could not be kept because a damaged row was replaced (`ragkv.store.tally`)."""
        with self._database.read() as txn:
            stale = is_stale(txn)
        if stale:
            self._write(recount)

    def _write(self, apply: Callable[[Transaction], T], need: int = 0) -> T | None:
        """Run one transaction; none in a dry run."""
        return None if self._report.dry_run else self._database.write(apply, need=need)

    def _list(self, keys: Sequence[bytes]) -> None:
        """Bring the list of unreferenced KV up to date for these keys."""

        def apply(txn: Transaction) -> None:
            for key in keys:
                relist(txn, key)

        if keys:
            self._write(apply)
        self._report.rows += len(keys)

    def _mend_fact(self, key: bytes) -> None:
        def apply(txn: Transaction) -> None:
            if not any(in_facts(txn, key)):
                return
            if key == b"generation":  # any number that no retrieval index was built at, so that all are rebuilt
                txn.put("meta", key, (secrets.randbits(48) + (1 << 48)).to_bytes(8, "big"))
            else:
                txn.delete("meta", key)

        self._write(apply)
        self._report.facts.append(key.removeprefix(b"fact/").decode(errors="replace"))

    def _mend_document(self, key: bytes) -> None:
        """Try until the document is whole or gone: a writer may change it between looking and mending."""
        while True:
            name = key.decode("utf-8", "replace")
            try:
                with self._database.read() as txn:
                    if txn.get("documents", key) is None:
                        return
                    damaged = examine(txn, key)
                name = damaged.stored.document.document_id
                if document_key(name) != key:
                    self._write(lambda txn: _move_document(txn, key))
                    self._report.rows += 1
                    return
                plan = plan_document(damaged, self._mender)
            except UnmendableError as reason:
                self._write(lambda txn: _drop_document(txn, key))
                self._report.dropped[name] = str(reason)
                return
            if self._report.dry_run or self._database.write(
                lambda txn, damaged=damaged, plan=plan: apply_plan(txn, damaged, plan),  # type: ignore[misc]
                need=plan.size,
            ):
                self._report.mended.append(name)
                return

    def _drop_stray(self, findings: Sequence[Finding]) -> None:
        def apply(txn: Transaction) -> int:
            there = document_digests(txn)
            return sum(_drop_row(txn, finding, there) for finding in findings)

        if findings:
            dropped = self._write(apply)
            self._report.rows += len(findings) if dropped is None else dropped

    def _drop_changes(self, keys: Sequence[bytes]) -> None:
        """Drop rows of the history that cannot be read: what is derived is then made anew instead of followed."""

        def apply(txn: Transaction) -> None:
            for key in keys:
                if any(in_change(txn, key)):
                    txn.delete("changes", key)

        if keys:
            self._write(apply)
            self._report.rows += len(keys)

    def _drop_uses(self, keys: Sequence[bytes]) -> None:
        """Forget how often these records were used; they count as never used until the next question."""

        def apply(txn: Transaction) -> None:
            for key in keys:
                if any(in_uses(txn, key)):
                    txn.delete("uses", key)

        if keys:
            self._write(apply)
            self._report.rows += len(keys)

    def _mend_records(self, findings: Sequence[Finding], *, encode: bool) -> None:
        """Encode the records again that the index may still ask for, a batch at a time; drop the others."""
        wanted: dict[bytes, tuple[KVIdentity, set[bytes]]] = {}
        unwanted: dict[bytes, set[bytes]] = {}
        for finding in findings:
            with self._database.read() as txn:
                owners = {*txn.values("references", finding.key), finding.owner} - {b""}
                chunks = {owner: chunk for owner in owners if (chunk := chunk_named(txn, owner)) is not None}
            identities = [i for chunk in chunks.values() for i in self._mender.identities(chunk)] if encode else []
            identity = next((identity for identity in identities if identity.key() == finding.key), None)
            if identity is None:
                unwanted.setdefault(finding.key, set()).update(owners)
            elif finding.key in wanted:
                wanted[finding.key][1].update(chunks)
            else:
                wanted[finding.key] = (identity, set(chunks))
        lost = {key: owners for key, owners in unwanted.items() if key not in wanted}
        self._forget(lost)
        self._report.dropped_records += len(lost)
        progress = Counter(self._notify, "encode", sum(len(i.chunk_ids) for i, _ in wanted.values()), "tokens")
        for batch in _batches(list(wanted.values())):
            if not self._report.dry_run:
                self._encode(batch)
            self._report.encoded += len(batch)
            progress.add(sum(len(identity.chunk_ids) for identity, _ in batch))

    def _forget(self, lost: Mapping[bytes, set[bytes]]) -> None:
        """Drop records with the references to them; `lost` gives each record's owners as far as they are known."""

        def apply(txn: Transaction) -> None:
            for key, owners in lost.items():
                for owner in owners:
                    txn.delete("needs", owner, key)
                txn.delete("references", key)
                txn.drop_record(key)

        if lost:
            self._write(apply)

    def _encode(self, batch: Sequence[tuple[KVIdentity, set[bytes]]]) -> None:
        identities = [identity for identity, _ in batch]
        made = zip(identities, self._mender.encode(identities), strict=True)
        from ragkv.store.format.encode import encode_record

        records = {identity: encode_record(kv, identity, self._codec) for identity, kv in made}

        def apply(txn: Transaction) -> None:
            for identity, owners in batch:
                there = [owner for owner in owners if txn.get("places", owner) is not None]
                if not there:
                    continue  # the documents were deleted in the meantime
                txn.put_record(records[identity])
                for owner in there:
                    txn.refer(owner, records[identity].key)

        self._write(apply, need=sum(record.stored_bytes for record in records.values()))

    def _mend_reference(self, owner: bytes, key: bytes) -> None:
        """Note a pair in both tables when both ends exist and hold the same tokens, else in neither."""

        def apply(txn: Transaction) -> None:
            manifest = find_record(txn, key)
            chunk = chunk_named(txn, owner)
            its = owner == INDEX_OWNER or (chunk is not None and manifest is not None)
            if manifest is None and txn.get("kv", key) is not None and its:
                return  # the record is damaged, and is mended first
            if manifest is not None and its and (chunk is None or manifest.identity.may_serve(chunk.token_ids)):
                txn.refer(owner, key)
            else:
                txn.delete("references", key, owner)
                txn.delete("needs", owner, key)

        self._write(apply)
        self._report.rows += 1


def repair(
    database: Database,
    mender: Mender,
    codec: Codec,
    *,
    encode: bool = True,
    dry_run: bool = False,
    on_progress: Notify | None = None,
) -> Repair:
    """Verify and mend until nothing is found; `encode=False` drops bad KV, which is then made when it is asked for.

    A dry run reports the first round and changes nothing. Hold the writer's lock, so that no ingest is changing the
    documents that are being mended.
    """
    report = Repair(dry_run=dry_run)
    repairer = _Repairer(database, mender, codec, report, on_progress)
    for _ in range(_ROUNDS):
        report.left = verify(database, on_progress=on_progress).findings
        report.found = report.found or report.left
        if not report.left or any(finding.kind == "pages" for finding in report.left):
            repairer.count_anew()
            return report
        repairer.mend(report.left, encode=encode)
        if dry_run:
            report.left = ()
            return report
    report.left = verify(database, on_progress=on_progress).findings
    return report


def _batches(wanted: Sequence[tuple[KVIdentity, set[bytes]]]) -> Iterator[list[tuple[KVIdentity, set[bytes]]]]:
    """Batches of about `_BATCH_TOKENS` tokens."""
    batch: list[tuple[KVIdentity, set[bytes]]] = []
    tokens = 0
    for entry in wanted:
        if batch and tokens + len(entry[0].chunk_ids) > _BATCH_TOKENS:
            yield batch
            batch, tokens = [], 0
        batch.append(entry)
        tokens += len(entry[0].chunk_ids)
    if batch:
        yield batch


def _move_document(txn: Transaction, key: bytes) -> None:
    """Move a row to its own key, unless that key is taken."""
    row = bytes(txn.get("documents", key) or b"")
    own = document_key(parse_document(row).document.document_id)
    txn.delete("documents", key)
    if txn.get("documents", own) is None:
        txn.put("documents", own, row)
    advance(txn)


def _drop_document(txn: Transaction, key: bytes) -> None:
    """Delete a document but for its KV, which the next ingest finds again, or `gc` drops."""
    txn.delete("documents", key)
    drop_rows(txn, document_digest(key))


def _drop_row(txn: Transaction, finding: Finding, documents: set[bytes]) -> bool:
    """Drop a row that belongs to nothing; False when it belongs to something by now, or is gone."""
    table, key = finding.table, finding.key
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
        if not any(stray.key == key for stray in in_segments(txn, key[:VALUE_BYTES])):
            return False
        txn.delete(table, key)
    elif table == "chunks":
        drop_rows(txn, key)  # the rows whose keys begin with the chunk's: its place, needs and vectors go with it
    elif table == "texts" or any(in_place(txn, key)):
        txn.delete(table, key)
    return True
