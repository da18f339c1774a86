"""Sound pages are accepted whatever LMDB did to make them; pages that would lead it or a writer astray are refused."""

from __future__ import annotations

import itertools
import random
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import lmdb
import pytest

from ragkv.attention.kv import ChunkKV
from ragkv.errors import CorruptStoreError
from ragkv.store import KVIdentity, Store
from ragkv.store.pages.snapshot import PageReport, check_pages

KINDS = {"rows": False, "large": False, "several": True}
PAGE = 4096
ROW_SIZES, LARGE_SIZES = (0, 8, 30, 200), (0, 1900, 2038, 4080, 4081, 9000)


def check(folder: Path, env: lmdb.Environment) -> PageReport:
    with env.begin() as txn:
        report = check_pages(folder / "data.mdb", txn.id(), KINDS, width=32, free=True, heads=True)
        assert report is not None
        fast = check_pages(folder / "data.mdb", txn.id(), KINDS, width=32, free=False)
        assert fast is not None
        assert (fast.free, fast.unaccounted) == (None, None)
        assert 0 <= fast.live <= report.live
    return report


@pytest.mark.parametrize("seed", range(3))
def test_whatever_lmdb_leaves_is_accepted(tmp_path: Path, seed: int) -> None:
    """Splits, merges, values that grow into trees and shrink again, free lists held back by readers: every page of
    every snapshot is accounted for."""
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


@pytest.fixture
def data(store: Store, write: Callable[..., object]) -> Path:
    """The file of a closed store with rows, a large value and free pages."""
    write(store, "a", (1, 2), tuple(range(200)))
    write(store, "b", *[(3, n) for n in range(60)])
    store.delete_document("a")
    write(store, "a", (1, 2), tuple(range(200)))
    store.close()
    return store.directory / "data.mdb"


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
        (0, b"\7", "is another one"),
        (10, b"\1", "wrong type"),
        (10, b"\x12", "wrong type"),
        (12, b"\x0f", "wrong bounds"),
        (12, b"\x10", "too few entries"),
        (14, b"\xff\x7f", "wrong bounds"),
        (16, b"\2\0", "wrong pointer"),
        (16, b"\xfe\x0f", "wrong pointer"),
    ],
)
@pytest.mark.parametrize("readonly", [False, True])
def test_damage_of_a_page_is_named(data: Path, at: int, value: bytes, what: str, readonly: bool) -> None:
    _, main = newest(data)
    patch(data, main * PAGE + at, value)
    with pytest.raises(CorruptStoreError, match=f"page {main} .*{what}.*restore a backup"):
        Store.open(data.parent.parent, readonly=readonly)


def free_list(data: Path) -> tuple[int, list[int]]:
    """Where the last record of the free list is in the file, and its pages, descending."""
    root, _ = newest(data)
    leaf = page(data, root)
    count = (struct.unpack_from("=H", leaf, 12)[0] - 16) // 2
    pointer = struct.unpack_from("=H", leaf, 16 + 2 * (count - 1))[0]
    pages = struct.unpack_from("=Q", leaf, pointer + 16)[0]
    return root * PAGE + pointer + 24, list(struct.unpack_from(f"={pages}Q", leaf, pointer + 24))


@pytest.mark.parametrize("wrong", ["live", "twice", "outside"])
def test_a_free_list_that_would_overwrite_is_refused_to_writers(data: Path, wrong: str) -> None:
    at, pages = free_list(data)
    assert len(pages) > 2
    _, main = newest(data)
    if wrong == "live":  # in its place in the order
        pages = sorted([*pages[1:], main], reverse=True)
    elif wrong == "twice":
        pages[1] = pages[0]
    else:
        pages[0] = 1 << 40
    patch(data, at, struct.pack(f"={len(pages)}Q", *pages))
    with pytest.raises(CorruptStoreError, match=r"used twice|wrong list|outside the file"):
        Store.open(data.parent.parent)
    with Store.open(data.parent.parent, readonly=True) as store:  # who only reads does not use it
        assert len(list(store.documents())) == 2


def test_a_large_value_is_not_freed_by_a_damaged_head(
    data: Path,
    identity: Callable[..., KVIdentity],
    kv_of: Callable[[KVIdentity], ChunkKV],
    equal: Callable[..., bool],
) -> None:
    """LMDB would free the pages of its neighbours."""
    of = identity(*range(200))
    content = data.read_bytes()
    with Store.open(data.parent.parent) as store, store._live().read() as txn:
        segment = txn.segment(of.key(), 0)
        assert segment is not None
        start = content.rindex(bytes(segment)) - 16
    assert start % PAGE == 0
    assert struct.unpack_from("=I", content, start + 12) == (2,)
    patch(data, start + 12, struct.pack("=I", 3))
    with Store.open(data.parent.parent) as store:
        assert equal(store.get_kv(of), kv_of(of))
        for change in (lambda: store.delete_document("a"), lambda: store.put_kv(of, kv_of(of), chunk_id="a#1")):
            with pytest.raises(CorruptStoreError, match="contradict its length"):
                change()
        assert equal(store.get_kv(of), kv_of(of))
        assert store.delete_document("b")
        with pytest.raises(CorruptStoreError, match="does not hold what its record says"):
            store._live().check_pages()


def test_opening_while_another_process_commits(tmp_path: Path) -> None:
    """A snapshot whose meta page has been written over, or a list of free pages that changes, is no damage."""
    Store.create(tmp_path).close()
    script = (
        "import sys; from ragkv.store import Store\n"
        "with Store.open(sys.argv[1]) as store:\n"
        "    print(flush=True)\n"
        "    n = 0\n"
        "    while True:\n"
        "        store.put_meta(f'fact {n % 50}', 'x' * (n % 5000)); n += 1\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, tmp_path], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"\n"
        try:
            seen = set()
            for n in itertools.count():  # until enough commits were met, however slowly the writer gets its turns
                with Store.open(tmp_path, readonly=bool(n % 2)) as store:
                    report = store._live().check_pages()
                    assert report.unaccounted == 0
                    seen.add(store._live()._env.info()["last_txnid"])
                assert writer.poll() is None
                if n >= 30 and len(seen) > 15:
                    break
        finally:
            writer.kill()
