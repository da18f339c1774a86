"""A verification checks everything, and reports no false damage while another process writes."""

import dataclasses
import threading
from typing import Any

import pytest
from storekit import identity, kv_of, make_kv, put_kv

from ragkv.store import Progress
from ragkv.store.codecs import add_checksum
from ragkv.store.counters import COUNTERS
from ragkv.store.tables import INDEX_OWNER, pack_document, parse_document
from ragkv.util.plugins import PluginRegistry


def test_a_whole_store_is_checked_whole(library):
    result = library.store.maintenance.verify()
    assert result.ok
    # 4 + 2 + 1 chunks with one passage twice, in two encodings, and the prefix
    assert {table: result.checked[table] for table in ("documents", "texts", "chunks", "places", "kv")} == {
        "documents": 3,
        "texts": 3,
        "chunks": 7,
        "places": 7,
        "kv": 13,
    }
    assert result.checked["references"] == result.checked["needs"] == 15
    assert result.checked["vectors"] == 21
    assert result.checked["bytes"] > library.store.stats().kv_bytes
    assert result.to_json()["ok"] is True


def test_orphans_are_counted_and_no_damage(library):
    staged = identity(*range(50))
    kv = make_kv(50)
    library.store.stage_kv([(staged, kv)])
    library.edit(lambda txn: txn.put("segments", b"x" * 32 + bytes(4), b"payload"))
    library.edit(lambda txn: txn.put("segments", staged.key() + (9).to_bytes(4, "big"), b"more"))
    found = library.store.maintenance.verify()
    assert found.ok
    assert (found.orphans.records, found.orphans.segments) == (1, 1)
    assert found.orphans.bytes == kv.nbytes + len(b"payload" + b"more")


def test_quick_reads_no_payload_and_finds_the_rest(library):
    record = library.identities(next(library.store.chunks("a")))[0]
    key = record.key() + bytes(4)
    library.edit(lambda txn: txn.put("segments", key, bytes(len(txn.get("segments", key)))))
    assert library.store.maintenance.verify(quick=True).ok
    [finding] = library.store.maintenance.verify().findings
    assert (finding.kind, finding.table, finding.document) in {("damaged", "kv", "a"), ("damaged", "kv", "b")}
    assert "checksum of segment 0" in finding.what
    assert "ragkv repair" in str(finding)
    library.edit(lambda txn: txn.delete("segments", key))
    assert [f.what for f in library.store.maintenance.verify(quick=True).findings] == ["segment 0 is missing"]


@pytest.mark.parametrize("quick", [False, True])
def test_a_whole_record_under_another_key_is_found(library, quick):
    other = b"k" * 32

    def copy(txn: Any) -> None:
        own = library.prefix.key()
        txn.put("kv", other, bytes(txn.get("kv", own)))
        for key, payload in list(txn.scan("segments", own)):
            txn.put("segments", other + key[32:], bytes(payload))
        txn.refer(INDEX_OWNER, other)

    library.edit(copy)
    [finding] = [each for each in library.store.maintenance.verify(quick=quick).findings if each.table == "kv"]
    assert (finding.kind, finding.key, finding.what) == ("damaged", other, "it has a key that is not its own")


@pytest.mark.parametrize("quick", [False, True])
def test_a_count_that_cannot_be_is_not_looked_for_chunk_by_chunk(library, quick):
    def claim(txn: Any) -> None:
        stored = parse_document(txn.get("documents", b"a"))
        txn.put("documents", b"a", pack_document(dataclasses.replace(stored, chunks=70_000)))

    library.edit(claim)
    found = {finding.what for finding in library.store.maintenance.verify(quick=quick).findings}
    assert found == {"it counts 70000 chunks, of which 4 are there"}


def test_a_codec_that_is_not_installed_is_named(library, monkeypatch):
    monkeypatch.setattr("ragkv.store.codecs.CODECS", PluginRegistry("ragkv.no_codecs"))
    found = library.store.maintenance.verify()
    assert len(found.findings) == 13
    assert all("unknown codec 'raw'" in finding.what for finding in found.findings)


def test_progress_comes_to_its_end(library):
    result: list[Progress] = []
    library.store.maintenance.verify(on_progress=result.append)
    assert [step.done for step in result] == sorted(step.done for step in result)
    assert result[-1].done == result[-1].total > 0


def test_pages_that_lmdb_cannot_read_are_told(library, monkeypatch):
    import lmdb

    from ragkv.store.tables import Transaction

    keys = Transaction.keys

    def broken(self: Transaction, table: str, *, after: bytes | None = None) -> Any:
        if table == "chunks":
            raise lmdb.CorruptedError("page 7")
        return keys(self, table, after=after)

    monkeypatch.setattr(Transaction, "keys", broken)
    result = library.store.maintenance.verify()
    assert [(finding.kind, finding.table) for finding in result.findings] == [("pages", "chunks")]
    assert "restore a backup" in result.findings[0].remedy
    report = library.store.maintenance.repair(library)
    assert report.left == result.findings
    assert not report.ok


@pytest.mark.parametrize(("keys", "quick"), [(1, False), (3, True)])
def test_a_writer_beside_it_is_no_damage(library, monkeypatch, keys, quick):
    """Documents are added, changed and deleted between batches of the smallest size."""
    monkeypatch.setattr("ragkv.store.environment._WALK_KEYS", keys)
    done = threading.Event()
    failures: list[BaseException] = []
    rounds = []

    def write() -> None:
        try:
            while not done.is_set():
                n = len(rounds)
                library.write(f"{'AM'[n % 2]}{n % 5}", f"one two three\nfour five\nnew {n % 7}")
                library.store.delete_document(f"{'MA'[n % 2]}{(n + 2) % 5}")
                rounds.append(n)
        except BaseException as error:
            failures.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        result, verified = [], 0
        while not failures and (verified < 4 or len(rounds) < 10):  # however rarely the writer is scheduled
            result += library.store.maintenance.verify(quick=quick).findings
            verified += 1
    finally:
        done.set()
        writer.join()
    assert failures == []
    assert result == []
    assert library.store.maintenance.verify().ok


def test_wrong_counters_are_found_and_mended(library):
    """Damage that the store itself never causes: in counters, in the list of unreferenced KV, and in the record of a
    counter.
    """
    before, stats = library.rows(), library.store.stats()
    record = library.identities(next(library.store.chunks("a")))[0].key()

    def spoil(txn: Any) -> None:
        txn.put("meta", COUNTERS, add_checksum(bytes(txn.get("meta", COUNTERS)[:-8]).replace(b": ", b": 1")))
        txn.put("unreferenced", record, b"")

    library.edit(spoil)
    for quick in (True, False):
        found = library.store.maintenance.verify(quick=quick).findings
        assert {(finding.kind, finding.table) for finding in found} == {
            ("mismatch", "counters"),
            ("mismatch", "unreferenced"),
        }
    assert library.store.maintenance.collect(in_use=lambda _: True, dry_run=True).records == 0  # checked again
    assert library.store.maintenance.repair(library).ok
    assert library.rows() == before
    assert library.store.stats() == stats


@pytest.mark.parametrize("row", [b"not sealed", *map(add_checksum, (b"[]", b"[", b"9" * 5000, b'{"tokens": -1}'))])
def test_counters_that_cannot_be_read_are_counted_by_rows(library, row):
    before, stats = library.rows(), library.store.stats()
    library.edit(lambda txn: txn.put("meta", COUNTERS, row))
    now = library.store.stats()
    assert now == dataclasses.replace(stats, file_bytes=now.file_bytes, used_bytes=now.used_bytes)
    assert not library.store.maintenance.verify(quick=True).ok
    library.write("more", "x y z")  # an unreadable counter cannot be incremented
    library.store.delete_document("more")
    assert library.store.maintenance.verify().ok
    assert library.rows() == before


def test_a_record_that_was_damaged_after_it_was_counted(library):
    """A writer that replaces the record does not know how it was counted, so it counts all."""
    before = library.rows()
    chunk = next(library.store.chunks("a"))
    of = library.identities(chunk)[0]
    library.edit(lambda txn: txn._txn.put(of.key(), b"damaged", db=txn._tables["kv"]))  # bypasses bookkeeping
    assert put_kv(library.store, of, kv_of(of), chunk.chunk_id)
    assert library.rows() == before
    assert library.store.maintenance.verify().ok


def test_many_values_of_one_key_are_walked_once(library):
    """A passage in every document: more references than fit in a batch of keys."""
    for n in range(40):
        library.write(f"same{n:02}", "one two three")
    found = library.store.maintenance.verify()
    assert found.ok
    assert found.checked["references"] == 15 + 2 * 40
