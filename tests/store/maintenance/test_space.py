"""A collection drops exactly the unreferenced records. A copy is one snapshot that passes every check; a compact copy
contains no deleted data.
"""

import shutil
import threading
from collections import namedtuple
from pathlib import Path
from typing import Any

import lmdb
import pytest
import torch
from storekit import identity, make_kv, put_kv, write

from ragkv.errors import CorruptStoreError, StoreError, StoreFullError
from ragkv.store import Manifest, Progress, Store
from ragkv.store.data_file import read_header
from ragkv.store.tables import digest


def everything(_: Manifest) -> bool:
    return True


@pytest.mark.parametrize("dry_run", [True, False])
def test_orphans_go_with_their_segments(library, dry_run):
    before = library.rows()
    staged, damaged = identity(*range(50)), identity(*range(60))
    library.store.stage_kv([(staged, make_kv(50)), (damaged, make_kv(60))])
    library.edit(lambda txn: txn.put("kv", damaged.key(), b"no manifest"))
    library.edit(lambda txn: txn.put("segments", b"x" * 32 + bytes(4), b"payload"))
    with_garbage = library.rows()
    found = library.store.maintenance.collect(in_use=everything, dry_run=dry_run)
    assert (found.records, found.segments, found.index_records) == (2, 1, 0)
    assert found.bytes == make_kv(50).nbytes + make_kv(60).nbytes + len(b"payload")
    assert library.rows() == (with_garbage if dry_run else before)
    assert library.store.maintenance.collect(in_use=everything).records == (2 if dry_run else 0)


def test_the_prefix_of_another_prompt_goes(library):
    before = library.rows()
    old, foreign = identity(7, 8), identity(1, 2, 3, model="another")
    for of in (old, foreign):
        library.store.keep_kv(of, make_kv(len(of.chunk_ids)))
    found = library.store.maintenance.collect(in_use=lambda manifest: manifest.identity == library.prefix)
    assert (found.records, found.index_records) == (0, 2)
    assert library.rows() == before


def test_what_a_chunk_needs_stays_whoever_else_needed_it(library):
    chunk = next(library.store.chunks("c"))
    of = library.identities(chunk)[0]
    library.store.keep_kv(of, library.encode([of])[0])
    assert library.store.maintenance.collect(in_use=lambda _: False).index_records == 1  # only the prefix
    assert library.store.has_kv(of)
    assert library.store.maintenance.verify().ok


def test_a_list_that_names_what_is_in_use_is_mended(library):
    used = library.identities(next(library.store.chunks("c")))[0].key()
    library.edit(lambda txn: txn.put("unreferenced", used, b""))
    assert library.store.maintenance.collect(in_use=everything, dry_run=True).records == 0
    assert not library.store.maintenance.verify().ok
    assert library.store.maintenance.collect(in_use=everything).records == 0
    assert library.store.maintenance.verify().ok


def test_a_record_that_is_taken_up_meanwhile_stays(library, monkeypatch):
    """Between the search for garbage and its deletion, a question may have stored the record for its own chunk."""
    from ragkv.store.maintenance import space

    staged = library.identities(next(library.store.chunks("c")))[0]
    late = identity(*range(9), model="m")
    library.store.stage_kv([(late, library.encode([late])[0])])
    sweep = space._sweep

    def put_first(*arguments: Any) -> None:
        put_kv(library.store, late, library.encode([late])[0], next(library.store.chunks("c")).chunk_id)
        sweep(*arguments)

    monkeypatch.setattr(space, "_sweep", put_first)
    assert library.store.maintenance.collect(in_use=everything).records == 0
    assert library.store.has_kv(late)
    assert library.store.has_kv(staged)


# ---- copies


@pytest.mark.parametrize("compact", [False, True])
def test_a_copy_is_the_store(library, tmp_path, compact):
    before = library.rows()
    result: list[Progress] = []
    size = library.store.maintenance.copy(tmp_path / "copy", compact=compact, on_progress=result.append)
    data = tmp_path / "copy" / "store" / "data.mdb"
    header = read_header(data)
    assert header is not None
    assert size == data.stat().st_size >= header.used
    assert result[-1].done == result[-1].total
    with Store.open(tmp_path / "copy") as copied:
        assert copied.maintenance.verify().ok
        library.store = copied
        assert library.rows() == before
        with copied._live().read() as txn:  # the history of deletions
            assert (txn.count("changes") == 0) == compact
        library.write("new", "and it\ncan be written")
        assert copied.maintenance.verify().ok


@pytest.mark.parametrize("compact", [False, True])
def test_a_copy_while_others_write_is_of_one_moment(library, tmp_path, compact):
    done, failures = threading.Event(), []

    def write() -> None:
        try:
            n = 0
            while not done.is_set():
                library.write("left", f"version {n}")
                library.write("right", f"version {n}")
                n += 1
        except BaseException as error:
            failures.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for n in range(4):
            library.store.maintenance.copy(tmp_path / str(n), compact=compact)
    finally:
        done.set()
        writer.join()
    assert failures == []
    for n in range(4):
        with Store.open(tmp_path / str(n)) as copied:
            assert copied.maintenance.verify().ok
            left, right = ((copied.text(name) or "version -1").split()[1] for name in ("left", "right"))
            assert int(left) - int(right) in (0, 1)


def test_a_damaged_store_can_be_backed_up(library, tmp_path):
    library.edit(lambda txn: txn.put("texts", digest("a"), b"not sealed"))
    library.store.maintenance.copy(tmp_path / "copy")
    with Store.open(tmp_path / "copy") as copied:
        assert [finding.table for finding in copied.maintenance.verify().findings] == ["texts"]


def test_no_room_is_told_before_anything_is_written(library, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10, 9, 1))
    with pytest.raises(StoreFullError, match="make room"):
        library.store.maintenance.copy(tmp_path / "copy")
    assert list((tmp_path / "copy" / "store").iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_disk_that_fills_up_meanwhile_ends_the_copy(library, tmp_path, monkeypatch):
    opened = Path.open

    def to_full(self: Path, *arguments: Any, **more: Any) -> Any:
        return (
            opened(Path("/dev/full"), "wb", buffering=0) if arguments == ("xb",) else opened(self, *arguments, **more)
        )

    monkeypatch.setattr(Path, "open", to_full)
    threads = threading.active_count()
    with pytest.raises(StoreFullError, match="No space left"):
        library.store.maintenance.copy(tmp_path / "copy")
    assert threading.active_count() == threads
    assert library.store._live()._map.env.readers() == "(no active readers)\n"
    assert library.store.maintenance.verify().ok


@pytest.mark.parametrize(("error", "code"), [(lmdb.MapResizedError("grown"), 0), (lmdb.CorruptedError("page 7"), 1)])
def test_a_map_that_another_process_grows_is_no_failure(library, tmp_path, monkeypatch, error, code):
    database = library.store._live()
    env, raised = database._map.live(), []

    class Once:
        """An environment whose first copy fails as LMDB's would."""

        def __getattr__(self, name: str) -> Any:
            return getattr(env, name)

        def copyfd(self, *arguments: Any) -> None:
            if not raised:
                raised.append(error)
                raise error
            env.copyfd(*arguments)

    monkeypatch.setattr(database._map, "env", Once())
    if code:
        with pytest.raises(CorruptStoreError, match="page 7"):
            library.store.maintenance.copy(tmp_path / "copy")
        return
    library.store.maintenance.copy(tmp_path / "copy")
    assert raised == [error]
    with Store.open(tmp_path / "copy") as copied:
        assert copied.maintenance.verify().ok


def live(path: Path) -> bytes:
    """All keys and values of an LMDB environment, read without ragkv's code."""
    with lmdb.open(str(path / "store"), max_dbs=32, readonly=True) as env:
        with env.begin() as txn:
            names = [bytes(name) for name, _ in txn.cursor()]
        tables = [env.open_db(name, create=False) for name in names]
        with env.begin() as txn:
            return b"\0".join(part for table in tables for entry in txn.cursor(db=table) for part in entry)


@pytest.mark.parametrize("chunks", [40, 74, 300])
def test_chunks_that_share_a_record_are_compacted(store, tmp_path, chunks):
    """Their references are in a subtree, on which py-lmdb's compaction crashes."""
    write(store, "a", *[(1, 2)] * chunks)
    store.maintenance.copy(tmp_path / "copy", compact=True)
    with Store.open(tmp_path / "copy") as copy:
        assert copy.maintenance.verify().ok
        assert len(list(copy.chunks())) == chunks
        assert copy.delete_document("a")
        assert not copy.has_kv(identity(1, 2))
        assert copy.maintenance.verify().ok


def test_a_deleted_document_is_in_no_live_record_and_after_compact_nowhere(library, tmp_path):
    secret = "a secret passage\nof which no other document knows"
    chunks = library.write("deleted", secret)
    kvs = [library.store.get_kv(of) for chunk in chunks for of in library.identities(chunk)]
    traces = {
        "text": secret.encode(),
        "id": b'"deleted"',
        "source": b"deleted.txt",
        "digest of the id": digest("deleted"),
        **{f"text of chunk {n}": chunk.text.encode() for n, chunk in enumerate(chunks)},
        **{f"id of chunk {n}": chunk.chunk_id.encode() for n, chunk in enumerate(chunks)},
        **{f"digest of chunk {n}": digest(chunk.chunk_id) for n, chunk in enumerate(chunks)},
        **{
            f"tokens of chunk {n}": b"".join(i.to_bytes(4, "little") for i in c.token_ids) for n, c in enumerate(chunks)
        },
        **{f"key {n}": of.key() for n, of in enumerate(of for chunk in chunks for of in library.identities(chunk))},
        **{f"KV {n}": kv.keys[0].view(torch.uint8).numpy().tobytes() for n, kv in enumerate(kvs)},
    }
    path = library.store.directory.parent
    library.store.close()
    there = live(path)
    assert [name for name, trace in traces.items() if trace not in there] == []
    with Store.open(path) as store:
        assert store.delete_document("deleted")
        assert store.maintenance.verify().ok
        library.store = store
        library.write("after", "something else")  # LMDB keeps the pages of the last transaction but one
        store.maintenance.copy(tmp_path / "compacted", compact=True)
    there = live(path)
    assert [name for name, trace in traces.items() if trace in there] == []
    # Freed pages keep their content until they are reused; a compact copy has none.
    assert secret.encode() in (path / "store" / "data.mdb").read_bytes()
    compacted = (tmp_path / "compacted" / "store" / "data.mdb").read_bytes()
    assert [name for name, trace in traces.items() if trace in compacted] == []
    assert (path / "store" / "data.mdb").stat().st_size > len(compacted)


def test_a_copy_never_replaces_a_store(library, tmp_path):
    library.store.maintenance.copy(tmp_path / "copy")
    with pytest.raises(StoreError, match="has a store already"):
        library.store.maintenance.copy(tmp_path / "copy")
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be made"):
        library.store.maintenance.copy(tmp_path / "file")
