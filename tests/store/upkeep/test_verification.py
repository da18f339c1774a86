"""A verification is of what is there: beside a writer it never sees damage that is none."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ragkv.attention.kv import ChunkKV
from ragkv.boundary.plugin import PluginRegistry
from ragkv.store import KVIdentity, Progress, Store
from ragkv.store.pages.resident import give_back
from ragkv.store.seal import seal
from ragkv.store.tally import is_stale
from ragkv.store.upkeep import verification


def test_a_whole_store_is_checked_whole(library: Any) -> None:
    found = library.store.verify()
    assert found.ok
    # of 4 + 2 + 1 chunks, one passage twice; two encodings each, and the prefix
    assert {table: found.checked[table] for table in ("documents", "texts", "chunks", "places", "kv")} == {
        "documents": 3,
        "texts": 3,
        "chunks": 7,
        "places": 7,
        "kv": 13,
    }
    assert found.checked["references"] == found.checked["needs"] == 15
    assert found.checked["vectors"] == 21
    assert found.checked["bytes"] > library.store.stats().kv_bytes
    assert found.to_json()["ok"] is True


def test_a_quick_walk_gives_back_the_pages_that_it_has_read(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    library.write("a", "one\ntwo\nthree")
    expected = library.store.verify(quick=True)
    given: list[Path] = []
    monkeypatch.setattr(verification, "_MAPPED", -(1 << 50))
    monkeypatch.setattr(verification, "give_back", lambda file: given.append(file) or give_back(file))
    assert library.store.verify(quick=True) == expected
    assert given
    assert set(given) == {library.store.directory / "data.mdb"}


def test_orphans_are_counted_and_no_damage(library: Any, make_kv: Any, identity: Any) -> None:
    staged = identity(*range(50))
    kv = make_kv(50)
    library.store.stage_kv([(staged, kv)])
    library.edit(lambda txn: txn.put("segments", b"x" * 32 + bytes(4), b"payload"))
    library.edit(lambda txn: txn.put("segments", staged.key() + (9).to_bytes(4, "big"), b"more"))
    found = library.store.verify()
    assert found.ok
    assert (found.orphans.records, found.orphans.segments) == (1, 2)
    assert found.orphans.bytes == kv.nbytes + len(b"payload" + b"more")


def test_quick_reads_no_payload_and_finds_the_rest(library: Any) -> None:
    record = library.identities(next(library.store.chunks("a")))[0]
    key = record.key() + bytes(4)
    library.edit(lambda txn: txn.put("segments", key, bytes(len(txn.get("segments", key)))))
    assert library.store.verify(quick=True).ok
    [finding] = library.store.verify().findings
    assert (finding.kind, finding.table, finding.document) in {("damaged", "kv", "a"), ("damaged", "kv", "b")}
    assert "checksum of segment 0" in finding.what
    assert "ragkv repair" in str(finding)
    library.edit(lambda txn: txn.delete("segments", key))
    assert [finding.what for finding in library.store.verify(quick=True).findings] == ["a segment is missing"]


def test_a_codec_that_is_not_installed_is_named(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragkv.store.codec.CODECS", PluginRegistry("ragkv.no_codecs"))
    found = library.store.verify()
    assert len(found.findings) == 13
    assert all("unknown codec 'raw'" in finding.what for finding in found.findings)


def test_progress_comes_to_its_end(library: Any) -> None:
    told: list[Progress] = []
    library.store.verify(on_progress=told.append)
    assert [step.done for step in told] == sorted(step.done for step in told)
    assert told[-1].done == told[-1].total > 0


def test_pages_that_lmdb_cannot_read_are_told(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import lmdb

    from ragkv.store.transaction import Transaction

    keys = Transaction.keys

    def broken(self: Transaction, table: str, *, after: bytes | None = None) -> Any:
        if table == "chunks":
            raise lmdb.CorruptedError("page 7")
        return keys(self, table, after=after)

    monkeypatch.setattr(Transaction, "keys", broken)
    found = library.store.verify()
    assert [(finding.kind, finding.table) for finding in found.findings] == [("pages", "chunks")]
    assert "restore a backup" in found.findings[0].remedy
    report = library.store.repair(library)
    assert report.left == found.findings
    assert not report.ok


@pytest.mark.parametrize(("keys", "quick"), [(1, False), (3, False), (1, True), (5, True)])
def test_a_writer_beside_it_is_no_damage(library: Any, monkeypatch: pytest.MonkeyPatch, keys: int, quick: bool) -> None:
    """Documents come, change and go between the batches, which are as small as can be."""
    monkeypatch.setattr("ragkv.store.database._WALK_KEYS", keys)
    monkeypatch.setattr("ragkv.store.upkeep.verification._QUICK_ROWS", keys)
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
        found, verified = [], 0
        while not failures and (verified < 4 or len(rounds) < 10):  # however seldom the writer gets its turn
            found += library.store.verify(quick=quick).findings
            verified += 1
    finally:
        done.set()
        writer.join()
    assert failures == []
    assert found == []
    assert library.store.verify().ok


def test_a_quick_look_at_small_batches_sees_every_row_once(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    library.store.stage_kv([(of, library.encode([of])[0]) for of in library.identities(library.write("d", "x\ny")[1])])
    whole = library.store.verify()
    for rows in (1, 2, 1000):
        monkeypatch.setattr("ragkv.store.upkeep.verification._QUICK_ROWS", rows)
        quick = library.store.verify(quick=True)
        assert quick.ok
        assert {**quick.checked, "bytes": 0} == {**whole.checked, "bytes": 0}
        assert quick.orphans == whole.orphans
        assert quick.to_json()["unchecked"]
    assert whole.to_json()["unchecked"] == []


def test_wrong_counters_are_found_and_mended(library: Any) -> None:
    """Rows that nobody may change so: counters and the list of unreferenced KV, and a record changed beneath them."""
    before, stats = library.rows(), library.store.stats()
    record = library.identities(next(library.store.chunks("a")))[0].key()

    def spoil(txn: Any) -> None:
        key, value = next(txn.scan("counters", b"kv/"))
        txn.put("counters", key, seal(bytes(value[:-8]).replace(b"[", b"[ ")))
        txn.put("unreferenced", record, b"")

    library.edit(spoil)
    for quick in (True, False):
        found = library.store.verify(quick=quick).findings
        assert {(finding.kind, finding.table) for finding in found} == {
            ("mismatch", "counters"),
            ("mismatch", "unreferenced"),
        }
    assert library.store.collect(in_use=lambda _: True, dry_run=True).records == 0  # it is looked at again
    assert library.store.repair(library).ok
    assert library.rows() == before
    assert library.store.stats() == stats


@pytest.mark.parametrize("tokens", [b"not sealed", *map(seal, (b"-1", b"true", b"[", b"9" * 5000, b"9" * 30))])
def test_counters_that_cannot_be_read_are_counted_by_rows(library: Any, tokens: bytes) -> None:
    before, stats = library.rows(), library.store.stats()
    library.edit(lambda txn: txn.put("counters", b"tokens", tokens))
    now = library.store.stats()
    assert now == dataclasses.replace(stats, file_bytes=now.file_bytes, used_bytes=now.used_bytes)
    assert not library.store.verify(quick=True).ok
    library.write("more", "x y z")  # cannot be added to what cannot be read
    library.store.delete_document("more")
    assert library.store.stats().tokens == stats.tokens
    path = library.store.directory.parent
    library.store.close()
    with Store.open(path) as store:  # who opens it for writing counts anew
        assert store.verify().ok
        library.store = store
        assert library.rows()["counters"] == before["counters"]


def test_a_record_that_was_damaged_after_it_was_counted(library: Any, kv_of: Any) -> None:
    """Whoever replaces it does not know what it counted for; a repair counts anew."""
    before = library.rows()
    chunk = next(library.store.chunks("a"))
    of = library.identities(chunk)[0]
    library.edit(lambda txn: txn._txn.put(of.key(), b"damaged", db=txn._tables["kv"]))  # past the transaction
    assert library.store.put_kv(of, kv_of(of), chunk_id=chunk.chunk_id)
    with library.store._live().read() as txn:
        assert is_stale(txn)
    assert library.store.stats().kv_records == 13
    assert library.store.verify().ok
    assert library.store.repair(library).ok
    assert library.rows() == before


def test_many_values_of_one_key_are_walked_once(library: Any, identity: Any) -> None:
    """A passage that every document has: more references than a batch has keys."""
    for n in range(40):
        library.write(f"same{n:02}", "one two three")
    found = library.store.verify()
    assert found.ok
    assert found.checked["references"] == 15 + 2 * 40


def test_an_index_that_may_not_be_written_can_be_verified(library: Any) -> None:
    path = library.store.directory.parent
    library.store.close()
    with Store.open(path, readonly=True) as reader:
        assert reader.verify().ok


def test_a_store_of_the_first_format_is_verified_as_it_is(tmp_path: Path, write: Any) -> None:
    """It has no table of vectors; reading must not bring it up to date."""
    import lmdb

    with Store.create(tmp_path) as store:
        write(store, "a", (1, 2))
    with lmdb.open(str(tmp_path / "store"), max_dbs=16) as env:
        vectors = env.open_db(b"vectors", create=False)
        with env.begin(write=True) as txn:
            txn.drop(vectors)
            txn.put(b"format", b"1", db=env.open_db(b"meta", txn=txn))
    with Store.open(tmp_path, readonly=True) as store:
        found = store.verify()
        assert found.ok
        assert found.checked["vectors"] == 0
        assert store.stats().format_version == 1


def test_the_head_of_a_large_value_is_looked_at_unless_quick(
    tmp_path: Path, make_kv: Callable[..., ChunkKV], identity: Callable[..., KVIdentity]
) -> None:
    """It counts the pages that LMDB frees with the value, and nothing else reads it."""
    of = identity(*range(200))
    with Store.create(tmp_path) as store:
        store.stage_kv([(of, make_kv(200, head_dim=16))])
        data = store.directory / "data.mdb"
    raw = bytearray(data.read_bytes())
    heads = [
        at
        for at in range(8192, len(raw), 4096)  # the number of the page, its type
        if raw[at : at + 8] == (at // 4096).to_bytes(8, "little") and raw[at + 10] == 4
    ]
    raw[heads[-1] + 12] ^= 2
    data.write_bytes(raw)
    with Store.open(tmp_path, readonly=True) as store:
        assert store.verify(quick=True).ok
        found = store.verify()
        assert [finding.kind for finding in found.findings] == ["pages"]
        assert "overflow page" in found.findings[0].what
        assert store.get_kv(of) is not None  # what it counts is no part of the value
