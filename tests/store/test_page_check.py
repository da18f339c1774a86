"""The check accepts every page layout that LMDB produces, and refuses pages that would mislead LMDB or a writer."""

import itertools
import os
import random
import shutil
import struct
import subprocess
from pathlib import Path

import lmdb
import pytest
from clichild import CliChild
from storekit import identity, write

from ragkv.errors import CorruptStoreError
from ragkv.store import Store
from ragkv.store.data_file import PageReport, TrustStamp, check_pages

KINDS = {"rows": False, "large": False, "several": True}
PAGE = 4096
ROW_SIZES, LARGE_SIZES = (0, 8, 30, 200), (0, 1900, 2038, 4080, 4081, 9000)


def check(folder: Path, env: lmdb.Environment) -> PageReport:
    with env.begin():
        return check_pages(folder / "data.mdb")


@pytest.mark.parametrize("seed", range(3))
def test_whatever_lmdb_leaves_is_accepted(tmp_path, seed):
    """Splits, merges, values that grow into trees and shrink again, free lists held back by readers: every page of
    every snapshot is accounted for.
    """
    rng = random.Random(seed)
    keys: dict[str, list[bytes]] = {name: [] for name in KINDS}
    with lmdb.open(str(tmp_path), map_size=1 << 28, max_dbs=3, sync=False) as env:
        tables = {name: env.open_db(name.encode(), dupsort=kind, dupfixed=kind) for name, kind in KINDS.items()}
        readers, depth = [], 0
        for step in range(16):
            if rng.random() < 0.3:
                readers.append(env.begin())
            if readers and rng.random() < 0.3:
                readers.pop(rng.randrange(len(readers))).abort()
            with env.begin(write=True) as txn:
                for _ in range(rng.randrange(200)):
                    name = rng.choice(list(KINDS))
                    table, known = tables[name], keys[name]
                    if known and rng.random() < (0.2 if step < 10 else 0.7):
                        key = known.pop(rng.randrange(len(known)))
                        with txn.cursor(table) as cursor:
                            values = list(cursor.iternext_dup()) if KINDS[name] and cursor.set_key(key) else []
                        for value in values[: rng.randrange(len(values) + 1)]:
                            txn.delete(key, value, db=table)
                        if not values:
                            txn.delete(key, db=table)
                        continue
                    length = rng.choice([1, 7, 8, 9, 36, 100, 511]) if name == "rows" else 32
                    key = rng.choice(known) if known and rng.random() < 0.4 else rng.randbytes(length)
                    known.append(key)
                    sizes = {"rows": ROW_SIZES, "large": LARGE_SIZES, "several": (32,)}
                    for _ in range(rng.choice([1, 1, 2, 70, 300]) if KINDS[name] else 1):
                        txn.put(key, rng.randbytes(rng.choice(sizes[name])), db=table)
            assert check(tmp_path, env).unaccounted == 0
            with env.begin() as txn:
                depth = max(depth, *(txn.stat(table)["depth"] for table in tables.values()))
        assert depth > 1
        for reader in readers:
            reader.abort()


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of a store with rows, a large value and free pages."""
    with Store.create(tmp_path_factory.mktemp("sound"), map_size=1 << 20) as store:
        write(store, "a", (1, 2), tuple(range(200)))
        write(store, "b", *[(3, n) for n in range(60)])
        store.delete_document("a")
        write(store, "a", (1, 2), tuple(range(200)))
    return (store.directory / "data.mdb").read_bytes()


@pytest.fixture
def data(sound: bytes, tmp_path: Path) -> Path:
    """The file of a closed store that this user has written to."""
    data = tmp_path / "index" / "store" / "data.mdb"
    data.parent.mkdir(parents=True)
    data.write_bytes(sound)
    Store.open(tmp_path / "index").close()
    return data


def page(data: Path, number: int) -> bytearray:
    return bytearray(data.read_bytes()[number * PAGE : (number + 1) * PAGE])


def newest(data: Path) -> tuple[int, int]:
    """Roots of the free list and of the tables, from the meta page with the higher transaction."""
    metas = [page(data, number) for number in (0, 1)]
    meta = max(metas, key=lambda meta: struct.unpack_from("=Q", meta, 144)[0])
    return struct.unpack_from("=Q", meta, 80)[0], struct.unpack_from("=Q", meta, 128)[0]


def patch(data: Path, at: int, value: bytes) -> None:
    with data.open("r+b") as file:
        file.seek(at)
        file.write(value)


@pytest.mark.parametrize(
    ("at", "value", "what"),
    [
        (0, b"\7", "stores mp_pgno"),
        (10, b"\1", "gap|nodes"),
        (10, b"\x12", "P_DIRTY"),
        (12, b"\x0f", "bad mp_lower"),
        (12, b"\x10", "too few nodes"),
        (14, b"\xff\x7f", "bad mp_lower"),
        (16, b"\2\0", "gap"),
        (16, b"\xfe\x0f", "gap"),
    ],
)
def test_damage_of_a_page_is_named(data, at, value, what):
    _, main = newest(data)
    patch(data, main * PAGE + at, value)
    for readonly in (False, True):
        with pytest.raises(CorruptStoreError, match=rf"page {main}\b.*{what}.*restore a backup"):
            Store.open(data.parent.parent, readonly=readonly)


def free_list(data: Path) -> tuple[int, list[int]]:
    """The file offset of the free list's last record, and its page numbers, descending."""
    root, _ = newest(data)
    leaf = page(data, root)
    count = (struct.unpack_from("=H", leaf, 12)[0] - 16) // 2
    pointer = struct.unpack_from("=H", leaf, 16 + 2 * (count - 1))[0]
    pages = struct.unpack_from("=Q", leaf, pointer + 16)[0]
    return root * PAGE + pointer + 24, list(struct.unpack_from(f"={pages}Q", leaf, pointer + 24))


@pytest.mark.parametrize("wrong", ["live", "twice", "outside"])
def test_a_free_list_that_would_overwrite_is_refused(data, wrong):
    place, pages = free_list(data)
    assert len(pages) > 2
    _, main = newest(data)
    if wrong == "live":  # inserted in order
        pages = sorted([*pages[1:], main], reverse=True)
    elif wrong == "twice":
        pages[1] = pages[0]
    else:
        pages[0] = 1 << 40
    patch(data, place, struct.pack(f"={len(pages)}Q", *pages))
    for readonly in (False, True):
        with pytest.raises(CorruptStoreError, match=r"both in use|strictly descending|out-of-range"):
            Store.open(data.parent.parent, readonly=readonly)


def test_a_damaged_head_of_a_large_value_is_refused(data):
    """With a wrong page count, LMDB would free the neighbours' pages."""
    of = identity(*range(200))
    content = data.read_bytes()
    with Store.open(data.parent.parent) as store, store._live().read() as txn:
        segment = txn.segment(of.key(), 0)
        assert segment is not None
        start = content.rindex(bytes(segment)) - 16
    assert start % PAGE == 0
    assert struct.unpack_from("=I", content, start + 12) == (2,)
    patch(data, start + 12, struct.pack("=I", 3))
    with pytest.raises(CorruptStoreError, match=r"more than once|walked .* overflow pages|both in use"):
        Store.open(data.parent.parent)


def test_opening_while_another_process_commits(tmp_path):
    """A snapshot whose meta page was overwritten, or a changing free list, is not damage."""
    Store.create(tmp_path).close()
    script = (
        "import sys; from ragkv.store import Store\n"
        "with Store.open(sys.argv[1]) as store:\n"
        "    print(flush=True)\n"
        "    n = 0\n"
        "    while True:\n"
        "        store.put_meta(f'fact {n % 50}', 'x' * (n % 5000)); n += 1\n"
    )
    writer = CliChild(tmp_path, program=script)
    assert writer.line() == "\n"
    try:
        seen = set()
        for n in itertools.count():  # until enough commits were observed, however rarely the writer is scheduled
            with Store.open(tmp_path, readonly=bool(n % 2)) as store:
                report = store._live().check_pages()
                assert report.unaccounted == 0
                seen.add(store._live()._map.env.info()["last_txnid"])
            assert writer.process.is_alive()
            if n >= 20 and len(seen) > 10:
                break
    finally:
        writer.process.kill()
        writer.end()


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were checked completely."""
    result: list[Path] = []

    def counted(data: Path, on_progress: object = None) -> PageReport:
        result.append(data)
        return check_pages(data)

    monkeypatch.setattr("ragkv.store.environment.check_pages", counted)
    return result


def test_a_file_that_this_user_wrote_is_not_checked_again(data, checks):
    for readonly in (True, False):
        with Store.open(data.parent.parent, readonly=readonly) as store:
            if not readonly:
                store.put_meta("model", "one")
    Store.open(data.parent.parent).close()
    assert checks == []


@pytest.mark.parametrize("how", ["copied", "overwritten", "touched", "stamp lost", "stamp damaged", "another user"])
def test_a_file_that_is_not_known_is_checked_once(data, checks, how, tmp_path, monkeypatch):
    stamp = TrustStamp(data)._path()
    if how == "copied":
        shutil.copytree(data.parent, tmp_path / "copy" / "store", copy_function=shutil.copy2)
        data = tmp_path / "copy" / "store" / "data.mdb"
    elif how == "overwritten":
        content = data.read_bytes()
        data.write_bytes(content)
    elif how == "touched":
        os.utime(data)
    elif how == "stamp lost":
        stamp.unlink()
    elif how == "stamp damaged":
        stamp.write_bytes(b"\xff" * 50)
    else:
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another"))
    for readonly in (True, False):
        Store.open(data.parent.parent, readonly=readonly).close()
    assert checks == [data]


def test_where_no_stamp_can_be_kept_every_opening_checks(data, checks, tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    for _ in range(2):
        with Store.open(data.parent.parent) as store:
            store.put_meta("model", "one")
    assert len(checks) == 2


def test_a_writer_at_work_is_trusted_and_a_killed_one_is_not(data, checks):
    script = (
        "import sys, time; from ragkv.store import Store\n"
        "with Store.open(sys.argv[1]) as store:\n"
        "    store._live().write(lambda txn: (txn.put('meta', b'model', b'x'), print(flush=True), time.sleep(600)))\n"
    )
    writer = CliChild(data.parent.parent, program=script)
    assert writer.line() == "\n"
    os.utime(data)  # LMDB does this when it writes pages
    Store.open(data.parent.parent, readonly=True).close()
    assert checks == []
    writer.process.kill()
    writer.end()
    Store.open(data.parent.parent).close()
    assert checks == [data]


def test_a_writer_that_has_ended_is_not_taken_for_a_process_with_its_number(data, checks):
    _, pid, began, boot = (stamp := TrustStamp(data))._writing.split(" ")
    ended = subprocess.Popen(["true"])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # a zombie, whose number is still in use
    start = Path(f"/proc/{ended.pid}/stat").read_text().split(" ")[21]
    for found in (f"writing {pid} {int(began) - 1} {boot}", f"writing {ended.pid} {start} {boot}"):
        stamp.write(found)
        Store.open(data.parent.parent).close()
    ended.wait()
    assert checks == [data, data]


def test_an_open_store_looks_again_at_a_file_that_something_else_wrote_to(data, checks, monkeypatch):
    """LMDB would follow the damaged page, which may crash the process."""
    _, root = newest(data)
    sound = bytes(page(data, root))
    with Store.open(data.parent.parent) as store:
        listed = list(store.documents())
        patch(data, root * PAGE + 12, b"\x10")
        assert checks == []  # not before the interval has passed

        monkeypatch.setattr("ragkv.store.environment.LOOK_SECONDS", 0.0)
        database = store._live()
        database._look_at = 0.0
        for _ in range(2):
            with pytest.raises(CorruptStoreError, match="too few nodes"):
                list(store.documents())
            with pytest.raises(CorruptStoreError, match="too few nodes"):
                store.put_meta("model", "one")
        monkeypatch.setattr("ragkv.store.environment._LOOK_SHARE", 1e9)
        database._look_at = 0.0
        patch(data, root * PAGE, sound)
        assert list(store.documents()) == listed
        seen = len(checks)
        store.put_meta("model", "one")  # its own commit is expected
        assert list(store.documents()) == listed
        assert len(checks) == seen


def test_a_sparse_file_that_claims_many_pages_fills_no_memory(data):
    with data.open("r+b") as file:
        file.truncate(1 << 40)
        for meta in (0, PAGE):
            file.seek(meta + 136)
            file.write(struct.pack("=Q", (1 << 28) - 1))
    with pytest.raises(CorruptStoreError, match="holes"):
        check_pages(data)


def test_progress_is_reported_and_ends_below_the_total(tmp_path):
    with lmdb.open(str(tmp_path), map_size=1 << 26, sync=False) as env, env.begin(write=True) as txn:
        for n in range(40):
            txn.put(b"%04d" % n, bytes(1 << 20))
    calls: list[tuple[int, int]] = []
    report = check_pages(tmp_path / "data.mdb", lambda done, total: calls.append((done, total)))
    assert calls == [(done, calls[0][1]) for done in range(4096, report.live + 1, 4096)]
    assert calls
